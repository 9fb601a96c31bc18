"""Cost of copies to an object store for a run, and the time to resume from a mirror.

    python -m scripts.benchmark.measure.mirror

*Rate*: one run trains in alternating turns, during copies of a checkpoint and without copies. The store is a folder in
memory, so it needs neither the disk nor a server. In a turn with copies, a new copy begins with the step after the
previous copy.

*Start*: the run's folder is deleted, and the same command starts again. It fetches the checkpoint from an S3 server on
loopback (moto, of the extra `dev`), which uses the same cores.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.fs

from pretraining.checkpoint.manifest import MANIFEST
from pretraining.checkpoint.mirror import Mirror
from pretraining.checkpoint.run_folder import CHECKPOINTS, committed_checkpoints
from pretraining.config.training import TrainConfig
from pretraining.launch.layout import free_port
from scripts.benchmark.common import (
    LENGTH,
    PRETRAIN,
    Number,
    Over,
    announce,
    describe,
    flag_parser,
    join,
    parse_with_settings,
    print_table,
    read_settings,
    spread,
    start_run,
    synchronize,
    train_paced,
)
from scripts.benchmark.measure import startup

DEFAULTS = ("use_dummy_dataset=true", "model_variant=125m", "vocab_size=4096", "seq_length=256", "batch_size=1")
QUIET = ("report_interval=0", "progress=plain", "tracker=none")
BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


def main() -> None:
    parser = flag_parser(
        "Cost of copies to an object store.",
        rounds=Number(10, "turns of each kind"),
        steps=Number(10, "optimizer steps per turn"),
        starts=Number(2, "starts from the mirror; 0 = none", 0),
    )
    flags, settings = parse_with_settings(parser, (*LENGTH, "ckpt_mirror_path", "checkpoint_interval"))
    settings = [*DEFAULTS, *QUIET, *settings]
    config = read_settings(settings)
    announce(flags)
    print(f"model     {describe(config, 1)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run = Path(folder, "run")
        own = [*settings, f"ckpt_save_path={run}", "num_steps=1000000"]
        _pretrain("train", *own, "run_steps=1")
        [checkpoint] = committed_checkpoints(run)
        size = sum(file.stat().st_size for file in checkpoint.path.iterdir())
        print(f"a checkpoint has {size / 1e9:.2f} GB", flush=True)
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=_memory()) as store:
            _measure_rate(read_settings([*own, f"ckpt_mirror_path=file://{store}"]), flags.rounds, flags.steps, size)
        if flags.starts:
            with _object_store() as address:
                _pretrain("push", str(run), address)
                starts = []
                for _ in range(flags.starts):
                    shutil.rmtree(run)
                    starts.append(startup.start([*own, f"ckpt_mirror_path={address}"]))
            median, quartiles = spread(starts, ".1f")
            print_table(
                ("seconds from the command to the end of the first step, from the mirror alone", "quartiles", "starts"),
                [(median, quartiles, str(flags.starts))],
            )


def _measure_rate(config: TrainConfig, rounds: int, steps: int, size: int) -> None:
    """Train in turns with and without copies, and print the ratio of the rates."""
    with join() as processes:
        run = start_run(config, processes)
        mirror, [checkpoint] = run.checkpoints._mirror, committed_checkpoints(config.checkpoint.folder)
        assert isinstance(mirror, Mirror)
        turns = _Turns(mirror, checkpoint.path, config.checkpoint.ckpt_mirror_path or "", steps, rounds)
        train_paced(run, turns.before_step)
    beside, alone = turns.seconds[True], turns.seconds[False]
    median, quartiles = spread([b / a for a, b in zip(beside[1:], alone[1:], strict=True)], ".3f")
    seconds = statistics.median(turns.copies) if turns.copies else float("nan")
    print_table(
        ("rate beside copies / alone", "quartiles", "turns", "copies", "seconds of a copy", "MB/s"),
        [(median, quartiles, str(rounds), str(len(turns.copies)), f"{seconds:.2f}", f"{size / seconds / 1e6:,.0f}")],
    )


class _Turns:
    """Turns with copies, each until its last copy is done, and turns of the same number of steps without copies.

    The first turn of each kind is a warm-up.

    Attributes:
        seconds: seconds per turn, by whether it had copies.
        copies: seconds per copy.
    """

    def __init__(self, mirror: Mirror, checkpoint: Path, address: str, steps: int, rounds: int) -> None:
        self._mirror, self._checkpoint = mirror, checkpoint
        self._manifest = Path(address.removeprefix("file://"), CHECKPOINTS, checkpoint.name, MANIFEST)
        self._least_steps, self._rounds = steps, rounds
        self._steps, self._steps_alone, self._began, self._copy_began = 0, 0, 0.0, 0.0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.copies: list[float] = []

    def before_step(self) -> None:
        """Finish a turn if it is over, and start a copy if one is due; called before each step."""
        synchronize()
        is_beside = self._steps_alone == 0
        if is_beside and self._copy_began and not self._mirror.protected:
            self.copies.append(time.perf_counter() - self._copy_began)
            self._copy_began = 0.0
        is_over = (
            self._steps >= self._least_steps and not self._copy_began if is_beside else self._steps == self._steps_alone
        )
        if is_over:
            self.seconds[is_beside].append(time.perf_counter() - self._began)
            self._steps_alone = self._steps if is_beside else 0
            self._steps, is_beside = 0, not is_beside
            if is_beside and len(self.seconds[False]) > self._rounds:
                raise Over
        if self._steps == 0:
            self._began = time.perf_counter()
        if is_beside and not self._copy_began:
            self._manifest.unlink(missing_ok=True)  # otherwise the mirror has the checkpoint, and does not copy it
            self._copy_began = time.perf_counter()
            self._mirror.copy(self._checkpoint)
        self._steps += 1


def _memory() -> str | None:
    """Return a folder in memory; None if there is none, so that the disk is used."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _pretrain(*arguments: str) -> None:
    if subprocess.run([*PRETRAIN, *arguments], stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"`pretrain {arguments[0]}` failed: see its error above")


@contextmanager
def _object_store() -> Iterator[str]:
    """Start an empty S3 server in a new process, and yield an address in it."""
    os.environ.update(CREDENTIALS)
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        else:
            sys.exit("moto's server does not start: bash scripts/setup.sh dev")
        files = pyarrow.fs.S3FileSystem(scheme="http", endpoint_override=endpoint, allow_bucket_creation=True)
        files.create_dir(BUCKET)
        yield f"s3://{BUCKET}/run?scheme=http&endpoint_override={endpoint}"
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
