"""A run on two machines with a mirror, against a list: starts, returns, saves, missed copies and lost disks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.checkpoint.examples import save

from pretraining.checkpoint.mirror import Mirror, fetch_start, list_copies
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.checkpoint.start_point import find_start
from pretraining.config.training import CheckpointConfig

pytestmark = [pytest.mark.usefixtures("single_process"), pytest.mark.thorough]

MACHINES = ("a", "b")
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(("start", "lose the disk")), st.sampled_from(MACHINES)),
    st.tuples(st.just("return"), st.sampled_from(MACHINES), st.integers(1, 4)),
    st.tuples(st.just("save"), st.booleans()),
)


class TwoMachines:
    """Two folders and a store, and what they should hold.

    Attributes:
        branch: (step, number) of the checkpoints that the run now consists of; a number is given once.
        trains: machine of the newest start.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mirror: Mirror | None = None
        self._number = 0
        self._is_copied = True
        self.branch: list[tuple[int, int]] = []
        self.trains = ""

    def start(self, machine: str, request: int | None = None) -> None:
        if machine != self.trains and not self._is_copied:
            return  # the other machine cannot know of the newest checkpoint
        folder = self._root / machine
        config = CheckpointConfig(str(folder), ckpt_mirror_path=f"file://{self._root / 'store'}")
        config = replace(config, resume_from_checkpoint=None if request is None else str(request))
        folder.mkdir(exist_ok=True)
        found = find_start(config, copies=list_copies(config))
        if found is None:
            assert self.branch == []
        else:
            fetch_start(config, found)
            chosen = (found.step, round(found.manifest.evaluation_loss or 0))
            assert chosen == (self.branch[-1] if request is None else next(e for e in self.branch if e[0] == request))
            assert [each.path for each in committed_checkpoints(folder) if each.step == found.step] == [found.path]
            self.branch = self.branch[: self.branch.index(chosen) + 1]
        self._mirror = Mirror(config, 0 if found is None else found.step, None if found is None else found.path)
        self._mirror.start()
        assert self._mirror.finish(60.0) is None
        if found is not None:
            set_aside(folder, found.newer) if found.newer else None
        self.trains, self._is_copied = machine, True

    def save(self, is_copied: bool) -> None:
        if self._mirror is None:
            return
        step, self._number = (self.branch[-1][0] if self.branch else 0) + 1, self._number + 1
        path = save(self._root / self.trains, step, evaluation_loss=float(self._number))
        self.branch.append((step, self._number))
        self._is_copied = is_copied
        if is_copied:
            self._mirror.copy(path)
            assert self._mirror.finish(60.0) is None

    def lose(self, machine: str) -> None:
        if machine == self.trains and not self._is_copied:
            return
        shutil.rmtree(self._root / machine, ignore_errors=True)
        if machine == self.trains:
            self._mirror = None

    def go_back(self, machine: str, count: int) -> None:
        if len(self.branch) > count and self._is_copied:
            # A step of which the mirror has missed the copy is only on the machine that saved it.
            self.start(machine)
            held = {each.manifest.step for each in list_copies(self._config(machine)).complete.values()}
            step = self.branch[-1 - count][0]
            if step in held:
                self.start(machine, step)

    def _config(self, machine: str) -> CheckpointConfig:
        return CheckpointConfig(str(self._root / machine), ckpt_mirror_path=f"file://{self._root / 'store'}")


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    with tempfile.TemporaryDirectory() as folder:
        yield TwoMachines(Path(folder))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, min_size=4, max_size=16))
def test_every_start_continues_the_run_wherever_it_went_back(actions: list[tuple[str, ...]]) -> None:
    with two_machines() as run:
        run.start("a")
        for action, *details in actions:
            if action == "start":
                run.start(str(details[0]))
            elif action == "lose the disk":
                run.lose(str(details[0]))
            elif action == "return":
                run.go_back(str(details[0]), int(details[1]))
            else:
                run.save(bool(details[0]))
        for machine in MACHINES:
            run.start(machine)
