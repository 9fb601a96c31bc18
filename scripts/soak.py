"""Kill a training run at random moments, and compare its result with that of an uninterrupted run.

    python -m scripts.soak                                        # 200 kills, 2 processes, a tiny model on the CPU
    python -m scripts.soak --kills=1000 --folder=/shared/scratch  # on the file system of your runs
    python -m scripts.soak --elastic                              # new process count and strategy at each start
    python -m scripts.soak --mirror                               # copies in a store; some kills lose the disk

    reference  two complete runs, which must be equal
    killed     start -> kill -> check checkpoints -> start again -> ... -> finish -> compare; repeated until N kills

A kill is SIGKILL to a rank, SIGKILL to all or SIGTERM to a rank. It happens in start-up, at a step, or soon after a
save began or was committed. After each kill, every committed checkpoint must be sound, and the newest may not be older
than before. At the end, checkpoints must be equal bit for bit, and metrics.jsonl must hold each report once, with equal
losses. Times and machine data may differ. Runs alternate between asynchronous and synchronous saves. With --mirror, the
folder of checkpoints is removed after some kills: the next start may not be older than the newest copy, and the last
checkpoint must be in the store. Any other --name=value is a setting of training; on GPUs add --deterministic.

A kill takes about 2 seconds on two cores. The exit code is 0 if everything was equal. Otherwise the script prints the
differences, and keeps the folders with the output of each start.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pretraining.checkpoint.copies import read_copies
from pretraining.checkpoint.manifest import LOSS_STATE, RUN_STATE
from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, UNFINISHED_SUFFIX, committed_checkpoints, read_document
from pretraining.launch.layout import free_port
from pretraining.tools.verify import faults_of

# Small enough for many starts, with an interval of every kind.
RUN = (
    *("model_variant=tiny", "hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "vocab_size=256"),
    *("seq_length=64", "mixed_precision=false", "sep_token=0", "logical_shards=8", "held_out_fraction=0.1"),
    *("num_steps=40", "global_batch_size=12", "learning_rate=1e-3", "checkpoint_interval=3", "keep_last=2"),
    *("preempt_interval=7", "eval_interval=5", "eval_batches=2", "report_interval=1", "tracker=none", "progress=plain"),
    "max_starts_without_progress=0",
)
KINDS = ("SIGKILL to a rank", "SIGKILL to all", "SIGTERM to a rank")
STRATEGIES = ("fsdp", "ddp", "zero2")
DISK_IS_LOST = 1 / 3
PREEMPTED = 75  # exit code of a run that saved and stopped on request
POLL_SECONDS = 0.001
STEP_NAME = re.compile(r"step_(\d+)_ckp")
REPORTED_STEP = re.compile(r"^step (\d+)/", re.MULTILINE)

IN_MANIFESTS = ("step", "tokens_seen", "loss", "evaluation_loss", "best_evaluation_loss", "evaluation_of_step", "data")
IN_METRICS = ("tokens_seen", "loss", "learning_rate", "grad_norm", "skipped_updates", "evaluation_loss")
# Another layout sums in another order, which changes losses by a few 1e-7 after 40 steps in float32.
LOSS_TOLERANCE = 1e-5
TENSOR_TOLERANCE = 1e-4


class Broken(Exception):
    """A check failed; the message names the check and the place."""


@dataclass(frozen=True)
class Kill:
    """A planned kill.

    Attributes:
        kind: one of `KINDS`.
        rank: rank to kill, unless all are killed.
        event: event to wait for: "start-up", a reported "step", the begin of a "save", a "commit".
        count: number of events to wait for in this start.
        delay_seconds: delay after the event.
    """

    kind: str
    rank: int
    event: str
    count: int
    delay_seconds: float


class Job:
    """The processes of one start; `close` kills them.

    The processes are forked from one with all imports done, so a start takes half a second.

    Args:
        run: folder of the run.
        logs: output file per process.
        settings: settings of training, `name=value`.
        limit_seconds: time after which a job counts as hanging and is killed.
    """

    def __init__(self, run: Path, logs: list[Path], settings: list[str], limit_seconds: float = math.inf) -> None:
        self._limit = time.monotonic() + limit_seconds
        self._run, self._log = run, logs[0]
        self._checkpoints_before = set(self._checkpoint_names())
        context = multiprocessing.get_context("forkserver")
        # Every run imports the last module later, and it takes longer than all others.
        context.set_forkserver_preload([__name__, "pretraining.train.run", "pyarrow", "torch._dynamo"])
        port = free_port()
        self._processes: list[BaseProcess] = [
            context.Process(target=_train, args=(rank, len(logs), port, log, settings), daemon=True)
            for rank, log in enumerate(logs)
        ]
        for process in self._processes:
            process.start()

    def reported_steps(self) -> list[int]:
        """Return the steps that this start reported."""
        return [int(step) for step in REPORTED_STEP.findall(self._log.read_text() if self._log.exists() else "")]

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Wait for an event; return False if the processes stop earlier or hang."""
        while any(process.is_alive() for process in self._processes) and time.monotonic() < self._limit:
            if happened():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def kill(self, kill: Kill, last_step: int) -> bool:
        """Wait for the event, then kill; return whether any process was still running."""
        if not self.wait_for(lambda: self._has_happened(kill, last_step)):
            return False
        time.sleep(kill.delay_seconds)
        if not any(process.is_alive() for process in self._processes):
            return False
        for process in self._processes if kill.kind == "SIGKILL to all" else [self._processes[kill.rank]]:
            if kill.kind.startswith("SIGTERM"):
                process.terminate()
            else:
                process.kill()
        return True

    def await_end(self, patience_seconds: float = math.inf) -> list[int]:
        """Wait for the processes and return their exit codes; kill those that run longer than `patience_seconds`."""
        deadline = min(time.monotonic() + patience_seconds, self._limit)
        for process in self._processes:
            process.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        self.close()
        return [process.exitcode or 0 for process in self._processes]

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def _has_happened(self, kill: Kill, last_step: int) -> bool:
        """Return whether a kill's event has happened, or can no longer happen after the save of the last step."""
        if kill.event == "start-up":
            return True
        if kill.event == "step":
            return len(self.reported_steps()) >= kill.count
        new = set(self._checkpoint_names()) - self._checkpoints_before
        steps = {step for name, step in new if kill.event == "save" or not name.endswith(UNFINISHED_SUFFIX)}
        return len(steps) >= kill.count or last_step in steps

    def _checkpoint_names(self) -> list[tuple[str, int]]:
        """Return names and steps of all checkpoints, also of unfinished ones."""
        folder = self._run / CHECKPOINTS
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [(name, int(match[1])) for name in names if (match := STEP_NAME.match(name))]


def _train(rank: int, world_size: int, port: int, log: Path, settings: list[str]) -> None:
    """Run a process of the job, with the environment that a launcher sets."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    from pretraining.cli import main

    torch.set_num_threads(1)
    main(["train", *settings])


class Soak:
    """A reference run, runs that are killed, and counts of both."""

    def __init__(self, flags: argparse.Namespace, settings: list[str], root: Path) -> None:
        self._flags, self._settings, self._root = flags, settings, root
        self._random = random.Random(flags.seed)
        self._began = time.monotonic()
        self._starts = self._runs = self._last_step = 0
        self._start_up_seconds = self._step_seconds = 0.0
        self._limit_seconds = math.inf
        self._kinds: Counter[str] = Counter()
        self._preempted = self._lost_disks = 0

    def run(self) -> None:
        """Train the reference, then kill runs until the number of kills is reached.

        Raises:
            Broken: a check failed.
        """
        write_dataset(self._root / "data" / "documents")
        reference, again = self._root / "reference", self._root / "again"
        self._run_reference(reference, asynchronous=False)
        self._run_reference(again, asynchronous=True)  # all imports are done, so its times are those of later starts
        self._compare(reference, again)
        seconds = f"{self._start_up_seconds:.1f} s to the first"
        print(f"reference: {self._last_step} steps, {seconds}; twice, equal", flush=True)
        while self._kinds.total() < self._flags.kills:
            run = self._root / f"run-{self._runs + 1}"
            while not self._start_and_kill(run, asynchronous=self._runs % 2 == 0):
                pass
            self._compare(reference, run)
            self._runs += 1
            print(self.summary(), flush=True)

    def summary(self) -> str:
        """Return a line with the counts."""
        seconds = time.monotonic() - self._began
        done = f"{self._kinds.total()} kills in {self._starts} starts; {self._runs} runs were equal, {seconds:.0f} s"
        kinds = ", ".join(f"{kind} {count}" for kind, count in self._kinds.most_common())
        lost = f"; {self._lost_disks} lost disks" if self._flags.mirror else ""
        return f"{done}; {kinds}; {self._preempted} saved and exited with {PREEMPTED}{lost}"

    def _run_reference(self, run: Path, asynchronous: bool) -> None:
        """Train without a kill, and measure the time of start-up and of a step."""
        began = time.monotonic()
        job = self._start(run, self._flags.processes, [f"async_save={asynchronous}"])
        try:
            job.wait_for(lambda: bool(job.reported_steps()))
            self._start_up_seconds = time.monotonic() - began
            codes = job.await_end()
        finally:
            job.close()
        if any(codes):
            raise Broken(f"{run}, which was not killed, exited with {codes}: see {run / 'starts'}")
        self._limit_seconds = 120 + 20 * (time.monotonic() - began)
        self._last_step = newest_step(run)
        self._step_seconds = (time.monotonic() - began - self._start_up_seconds) / self._last_step

    def _start_and_kill(self, run: Path, asynchronous: bool) -> bool:
        """Start a run, kill it if kills are left, check its checkpoints; return whether the run finished.

        Raises:
            Broken: the run failed by itself, lost a step although it was asked to stop, or has a bad checkpoint.
        """
        before, processes = newest_step(run), self._flags.processes
        if self._flags.mirror:
            before = max(before, newest_copy(self._mirror_of(run)))
        settings = [f"async_save={asynchronous}"]
        if self._flags.elastic:
            processes = self._random.randint(1, processes + 1)
            settings.append(f"sharding_strategy={self._random.choice(STRATEGIES)}")
        kill = self._draw_kill(processes) if self._kinds.total() < self._flags.kills else None
        job = self._start(run, processes, settings)
        try:
            is_hit = kill is not None and job.kill(kill, self._last_step)
            codes = job.await_end(self._flags.patience if is_hit else math.inf)
        finally:
            job.close()
        check_checkpoints(run, before, newest_copy(self._mirror_of(run)) if self._flags.mirror else 0)
        if not any(codes):
            return True  # a kill was too late
        if kill is None or not is_hit:
            raise Broken(
                f"start {self._starts} of {run} failed by itself, with {codes} (-9: it hung): see {run / 'starts'}"
            )
        self._kinds[kill.kind] += 1
        newest = newest_step(run)
        if self._flags.mirror and self._random.random() < DISK_IS_LOST:
            self._lost_disks += 1
            shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
        if PREEMPTED in codes:
            self._preempted += 1
            if newest < max(job.reported_steps(), default=0):
                raise Broken(f"{run} was asked to stop and saved step {newest}, but it had reported more")
        return False

    def _draw_kill(self, processes: int) -> Kill:
        draw = self._random
        event = draw.choices(("start-up", "step", "save", "commit"), (2, 3, 4, 2))[0]
        # A save of a small model takes tens of milliseconds; renaming or removing a folder takes a few.
        delay_seconds = {
            "start-up": draw.uniform(0, self._start_up_seconds),
            "step": draw.uniform(0, 2 * self._step_seconds),
            "save": 10 ** draw.uniform(-4, -1),
            "commit": 10 ** draw.uniform(-5, -1.5),
        }[event]
        count = draw.randint(1, 12 if event == "step" else 3)
        return Kill(draw.choice(KINDS), draw.randrange(processes), event, count, delay_seconds)

    def _start(self, run: Path, processes: int, settings: list[str]) -> Job:
        self._starts += 1
        logs = run / "starts"
        logs.mkdir(parents=True, exist_ok=True)
        # Each run builds its own index, so that a kill may interrupt this, too.
        places = [f"data_path={self._root / 'data'}", f"ckpt_save_path={run}", f"index_path={run / 'index'}"]
        if self._flags.mirror:
            places.append(f"ckpt_mirror_path={self._mirror_of(run)}")
        names = [logs / f"{self._starts}-rank-{rank}.log" for rank in range(processes)]
        return Job(run, names, [*RUN, *settings, *self._settings, *places], self._limit_seconds)

    def _mirror_of(self, run: Path) -> str:
        return f"file://{self._root / 'mirrors' / run.name}"

    def _compare(self, reference: Path, run: Path) -> None:
        """Check that two runs are equal, and delete the second."""
        if self._flags.mirror and newest_copy(self._mirror_of(run)) != newest_step(run):
            raise Broken(f"the last checkpoint of {run} is not in {self._mirror_of(run)}")
        if faults := differences(reference, run, exact=not self._flags.elastic):
            raise Broken(f"{run} differs from {reference} in {len(faults)} ways:\n  " + "\n  ".join(faults[:20]))
        shutil.rmtree(run)


def newest_step(run: Path) -> int:
    """Return the highest committed step of a run; 0 if there is none."""
    return max((each.step for each in committed_checkpoints(run)), default=0)


def newest_copy(address: str) -> int:
    """Return the highest step of the complete copies at an address; 0 if there is none."""
    return max((copy.manifest.step for copy in read_copies(address).complete.values()), default=0)


def check_checkpoints(run: Path, before: int, copied: int = 0) -> None:
    """Raise Broken unless all committed checkpoints are sound and the newest is not older than step `before`.

    Args:
        copied: step of the newest copy in the mirror, which a killed start may not have fetched yet.
    """
    paths = [each.path for each in committed_checkpoints(run)]
    faults = [fault for path in paths for fault in faults_of(path)]
    best = run / CHECKPOINTS / BEST
    if best.is_symlink() and not (best.is_dir() and best.resolve().name in {path.name for path in paths}):
        faults.append(f"{best} points to {best.readlink()}, which is no checkpoint")
    if (newest := max(newest_step(run), copied)) < before:
        faults.append(f"the newest checkpoint of {run} was of step {before}, and is now of {newest}")
    if faults:
        raise Broken("\n  ".join(faults))


def differences(reference: Path, run: Path, exact: bool = True) -> list[str]:
    """Return a line per difference between two finished runs.

    Args:
        exact: compare tensors and losses bit for bit; otherwise up to rounding. The rest is always compared exactly.
    """
    theirs, ours = ({each.step: each.path for each in committed_checkpoints(folder)} for folder in (reference, run))
    if max(theirs) not in ours:
        return [f"there is no checkpoint of the last step, {max(theirs)}"]
    faults = [f"checkpoints of {sorted(ours)} instead of {sorted(theirs)}"] if len(ours) > len(theirs) else []
    both = theirs.keys() & ours.keys()
    expected = _facts(reference, {step: theirs[step] for step in both}, exact)
    found = _facts(run, {step: ours[step] for step in both}, exact)
    for what in sorted(expected.keys() | found.keys()):
        value, other = expected.get(what), found.get(what)
        if not _is_same(what, value, other, exact):
            faults.append(what if isinstance(value, torch.Tensor) else f"{what}: {other} instead of {value}")
    return faults


def _facts(run: Path, checkpoints: dict[int, Path], exact: bool) -> dict[str, Any]:
    """Return every value of a run that does not depend on time or machine, by its description."""
    facts: dict[str, Any] = {"the best": (run / CHECKPOINTS / BEST).resolve().name} if exact else {}
    lines: Counter[str] = Counter()
    for text in (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        where = f"step {line['step']}, {'evaluation' if 'evaluation_loss' in line else 'report'}"
        lines[where] += 1
        facts |= {f"{where} {lines[where]}: {name}": line.get(name) for name in IN_METRICS}
    for step, path in checkpoints.items():
        manifest = read_document(path)
        facts |= {f"checkpoint {step}: {name}": getattr(manifest, name) for name in IN_MANIFESTS}
        # The run has random ids, and the losses are rounded in another layout: they are compared above.
        left_out = (RUN_STATE, LOSS_STATE)
        states = {name: state for name, state in manifest.state.items() if name not in left_out}
        facts[f"checkpoint {step}: state"] = states
        tensors = open_tensors(path, manifest.files)
        facts |= {f"checkpoint {step}: {name}": read_tensor(tensors, name) for name in tensors.chunks}
    return facts | {f"{where}, lines": count for where, count in lines.items()}


def _is_same(what: str, value: Any, other: Any, exact: bool) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if (other.shape, other.dtype) != (value.shape, value.dtype):
            return False
        if exact:  # as bytes: NaN equals itself, and zeros of both signs differ
            return torch.equal(other.flatten().view(torch.uint8), value.flatten().view(torch.uint8))
        norm = value.double().norm().clamp(min=1e-6)
        return bool((other.double() - value.double()).norm() <= TENSOR_TOLERANCE * norm)
    is_rounded = any(name in what for name in ("loss", "grad_norm", "evaluation_of_step"))
    if not exact and is_rounded and isinstance(value, float) and isinstance(other, float):
        return abs(other - value) <= LOSS_TOLERANCE * abs(value)
    return bool(value == other)


def write_dataset(folder: Path, documents: int = 2000) -> None:
    """Write documents whose next token mostly follows from the last one, so that a model can learn."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = []
    for _ in range(documents):
        steps = generator.choice([1, 2, 7], size=generator.integers(5, 120), p=[0.7, 0.2, 0.1])
        rows.append((np.cumsum(steps) % 255 + 1).astype(np.uint16))
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(folder / "part-0.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Kill a training run at random and compare.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default 200)")
    parser.add_argument("--processes", type=int, default=2, help="processes of a run (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills (default 0)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="parent of the folder for the runs")
    parser.add_argument("--patience", type=float, default=10, help="seconds in which peers must notice a killed rank")
    parser.add_argument("--elastic", action="store_true", help="change process count and strategy at each start")
    parser.add_argument("--mirror", action="store_true", help="keep copies in a store, and lose disks")
    flags, settings = parser.parse_known_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="soak-", dir=flags.folder))
    soak = Soak(flags, [setting.lstrip("-") for setting in settings], root)
    try:
        soak.run()
    except Broken as broken:
        sys.exit(f"{soak.summary()}\nBROKEN: {broken}\nThe runs and the output of each start are kept in {root}")
    print(soak.summary())
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
