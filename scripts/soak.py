"""Kills a training run at random moments, again and again, and compares its end with that of an uninterrupted run.

    python -m scripts.soak                                        # 200 kills, 2 processes, a tiny model on the CPU
    python -m scripts.soak --kills=1000 --folder=/shared/scratch  # on the file system that is to be trusted
    python -m scripts.soak --elastic                              # other processes, another strategy at each start

    reference  a run to its end, twice: equal, or nothing below would mean anything
    tortured   start -> kill -> check what is there -> start again -> ... -> the end -> compare; a new run, until N

Whom a kill hits (SIGKILL to a rank, SIGKILL to all, SIGTERM to a rank) and when (in start-up, at a step, as long as a
dice says after a save began or was committed) is drawn at random. After each, every committed checkpoint must be sound,
and the newest no older than before. At the end checkpoints must be equal bit for bit, and every loss be there once and
the same. Runs with asynchronous saves and without come in turn. Any other --name=value is a setting of training; on
GPUs add --deterministic.

A kill takes some 2 seconds on two cores. Exit code 0: all was equal. Otherwise it says what was not, and keeps the
folders, with the output of each start.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.checkpoint.manifest import BEST, CHECKPOINTS, committed_checkpoints
from pretraining.tools.verify import faults_of
from scripts.soak_compare import differences
from scripts.soak_job import Job, Shot, View

# Small enough for many starts, with an interval of every kind.
RUN = (
    *("model_variant=tiny", "hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "vocab_size=256"),
    *("seq_length=64", "mixed_precision=false", "sep_token=0", "logical_shards=8", "held_out_fraction=0.1"),
    *("num_steps=40", "global_batch_size=12", "learning_rate=1e-3", "checkpoint_interval=3", "keep_last=2"),
    *("preempt_interval=7", "eval_interval=5", "eval_batches=2", "report_interval=1", "tracker=none", "progress=plain"),
    "max_starts_without_progress=0",
)
WHOM = {"rank": "SIGKILL to a rank", "all": "SIGKILL to all", "term": "SIGTERM to a rank"}
STRATEGIES = ("fsdp", "ddp", "zero2")
OWN_SETTINGS = ("ckpt_save_path", "index_path", "ckpt_name", "run_steps", "report_interval", "progress")
SHOWN_FAULTS = 20
PREEMPTED = 75  # the exit code of a run that has saved because it was told to end


class Broken(Exception):
    """A promise was broken; the message says which, and where to look."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Kill a training run at random and compare.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--processes", type=int, default=2, help="of the run (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--whom", default=",".join(WHOM), help="kinds of kills, comma list (default rank,all,term)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to make a folder for the runs")
    parser.add_argument("--patience", type=float, default=10, help="seconds for peers of a killed rank to notice")
    parser.add_argument("--elastic", action="store_true", help="change processes and strategy at each start")
    flags, settings = parser.parse_known_args(arguments)
    if not set(flags.whom.split(",")) <= WHOM.keys():
        parser.error(f"--whom={flags.whom}: give any of {', '.join(WHOM)}")
    settings = [setting.lstrip("-") for setting in settings]
    for name in OWN_SETTINGS:
        if any(setting.partition("=")[0].replace("-", "_") == name for setting in settings):
            parser.error(f"--{name} is set here, since what happens is told from it: leave it out")
    root = Path(tempfile.mkdtemp(prefix="soak-", dir=flags.folder))
    soak = Soak(flags, [*RUN, *settings], root)
    try:
        soak.run()
    except Broken as broken:
        sys.exit(f"{soak.summary()}\nBROKEN: {broken}\nThe runs, and what each start printed, are kept in {root}")
    print(soak.summary())
    shutil.rmtree(root)


class Soak:
    """A reference, tortured runs, and what was counted.

    Args:
        flags: of the command line.
        settings: of training, `name=value`.
        root: folder for all of it.
    """

    def __init__(self, flags: argparse.Namespace, settings: Sequence[str], root: Path) -> None:
        self._flags, self._settings, self._root = flags, list(settings), root
        self._random = random.Random(flags.seed)
        self._began = time.monotonic()
        self._kills = self._starts = self._runs = self._last_step = 0
        self._start_up_seconds = self._step_seconds = 0.0
        self._limit_seconds = math.inf
        self._kinds: Counter[str] = Counter()

    def run(self) -> None:
        """All of it.

        Raises:
            Broken: a promise was broken.
        """
        write_dataset(self._root / "data" / "documents")
        reference, again = self._root / "reference", self._root / "again"
        self._run_reference(reference, beside_training=False)
        self._run_reference(again, beside_training=True)  # everything is imported now: times are what they will be
        self._compare(reference, again)
        seconds = f"{self._start_up_seconds:.1f} s to the first"
        print(f"reference: {self._last_step} steps, {seconds}; twice, equal", flush=True)
        while self._kills < self._flags.kills:
            run = self._root / f"run-{self._runs + 1}"
            self._torture(run, beside_training=self._runs % 2 == 0)
            self._compare(reference, run)
            self._runs += 1
            print(f"{self._kills} kills, {self._runs} runs, all equal, {self._seconds():.0f} s", flush=True)

    def summary(self) -> str:
        """What was done, in lines."""
        what = f"{self._kills} kills in {self._starts} starts; {self._runs} runs ended equal, {self._seconds():.0f} s"
        return "\n  ".join([what, *(f"{kind} {count}" for kind, count in self._kinds.most_common())])

    def _compare(self, reference: Path, run: Path) -> None:
        """Makes sure that two runs are equal, and removes the second."""
        faults = differences(reference, run, exact=not self._flags.elastic)
        if faults:
            shown = [*faults[:SHOWN_FAULTS], *(["..."] if len(faults) > SHOWN_FAULTS else [])]
            raise Broken(f"{run} differs from {reference} in {len(faults)} ways:\n  " + "\n  ".join(shown))
        shutil.rmtree(run)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _run_reference(self, run: Path, beside_training: bool) -> None:
        """An uninterrupted run, which tells also how long things take."""
        began = time.monotonic()
        job = self._start(run, self._flags.processes, [_saves(beside_training)])
        try:
            job.wait_for(lambda view: len(view.steps) > 0)
            self._start_up_seconds = time.monotonic() - began
            statuses = job.await_end()
        finally:
            job.close()
        if any(statuses):
            raise Broken(f"{run}, which nothing was done to, ended with {statuses}: see {run / 'starts'}")
        self._limit_seconds = 120 + 20 * (time.monotonic() - began)
        self._last_step = job.look().newest
        self._step_seconds = (time.monotonic() - began - self._start_up_seconds) / self._last_step

    def _torture(self, run: Path, beside_training: bool) -> None:
        """Starts a run again and again until it is done."""
        while True:
            before = View.of(run).newest
            processes, layout = self._flags.processes, []
            if self._flags.elastic:
                processes = self._random.randint(1, processes + 1)
                layout = [f"sharding_strategy={self._random.choice(STRATEGIES)}"]
            job = self._start(run, processes, [_saves(beside_training), *layout])
            try:
                is_done = self._shoot(job, run, processes)
            finally:
                job.close()
            check_checkpoints(run, before)
            if is_done:
                return

    def _shoot(self, job: Job, run: Path, processes: int) -> bool:
        """Kills a job, if there are kills left; returns whether its run came to its end.

        Raises:
            Broken: it failed by itself, or was told to end and has lost a step.
        """
        shot = self._draw(processes) if self._kills < self._flags.kills else None
        is_hit = shot is not None and job.fire(shot, self._last_step)
        statuses = job.await_end(self._flags.patience if is_hit else math.inf)
        if not any(statuses):
            return True  # a shot that came was too late
        if shot is None or not is_hit:
            raise Broken(
                f"start {self._starts} of {run} failed by itself, with {statuses} (-9: it hung): see {run / 'starts'}"
            )
        self._kills += 1
        self._kinds[WHOM[shot.whom]] += 1
        if PREEMPTED in statuses:
            self._kinds["of which it saved and ended with 75"] += 1
            view = job.look()
            if view.newest < max(view.steps, default=0):
                raise Broken(f"{run} was told to end and saved step {view.newest}, though it had reported more")
        return False

    def _draw(self, processes: int) -> Shot:
        """The next shot."""
        draw = self._random
        event = draw.choices(("start-up", "step", "save", "commit"), (2, 3, 4, 2))[0]
        # A save of a small model takes tens of milliseconds; to rename a folder, or remove one, takes a few.
        delay = {
            "start-up": draw.uniform(0, self._start_up_seconds),
            "step": draw.uniform(0, 2 * self._step_seconds),
            "save": 10 ** draw.uniform(-4, -1),
            "commit": 10 ** draw.uniform(-5, -1.5),
        }[event]
        count = draw.randint(1, 12 if event == "step" else 3)
        return Shot(draw.choice(self._flags.whom.split(",")), draw.randrange(processes), event, count, delay)

    def _start(self, run: Path, processes: int, settings: list[str]) -> Job:
        self._starts += 1
        logs = run / "starts"
        logs.mkdir(parents=True, exist_ok=True)
        # Each run makes its own index: a kill may come then, too.
        places = [f"data_path={self._root / 'data'}", f"ckpt_save_path={run}", f"index_path={run / 'index'}"]
        names = [logs / f"{self._starts}-rank-{rank}.log" for rank in range(processes)]
        return Job(run, names, [*places, *settings, *self._settings], self._limit_seconds)


def check_checkpoints(run: Path, before: int) -> None:
    """Whether every committed checkpoint is sound, and the newest one no older than it was.

    Args:
        run: folder of a run.
        before: step of its newest checkpoint before the last start.

    Raises:
        Broken: one is not.
    """
    paths = committed_checkpoints(run)
    faults = [fault for path in paths for fault in faults_of(path, threads=1)]
    best = run / CHECKPOINTS / BEST
    if best.is_symlink() and not (best.is_dir() and best.resolve().name in {path.name for path in paths}):
        faults.append(f"{best} leads to {best.readlink()}, which is no checkpoint")
    if View.of(run).newest < before:
        faults.append(f"the newest checkpoint of {run} was of step {before}, and is now of {View.of(run).newest}")
    if faults:
        raise Broken("\n  ".join(faults))


def _saves(beside_training: bool) -> str:
    return f"async_save={str(beside_training).lower()}"


def write_dataset(folder: Path, documents: int = 2000) -> None:
    """Writes documents whose next token mostly follows from the last one: something to learn."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = []
    for _ in range(documents):
        steps = generator.choice([1, 2, 7], size=generator.integers(5, 120), p=[0.7, 0.2, 0.1])
        rows.append((np.cumsum(steps) % 255 + 1).astype(np.uint16))
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(folder / "part-0.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


if __name__ == "__main__":
    main()
