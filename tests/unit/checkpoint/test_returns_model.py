"""A run on two machines with a mirror, against a list: starts, returns, rollbacks, saves, missed copies, lost disks.

Retention keeps little, steps are saved again, and the user may remove what is set aside on a machine.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from unit.checkpoint.examples import save

from pretraining.checkpoint.branches import Branches, Point, branches_from
from pretraining.checkpoint.forms import read_document
from pretraining.checkpoint.mirror import Mirror, fetch_start, list_copies
from pretraining.checkpoint.own_checkpoints import own_checkpoints
from pretraining.checkpoint.retention import apply_retention, set_aside_newer
from pretraining.checkpoint.run_folder import checkpoint_at, checkpoints_set_aside, committed_checkpoints
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig

pytestmark = [pytest.mark.usefixtures("single_process"), pytest.mark.thorough]

MACHINES = ("a", "b")
SAVE = st.tuples(st.just("save"), st.booleans())
ACTIONS = st.one_of(  # methods of `TwoMachines` and their arguments
    st.tuples(st.sampled_from(("start", "lose", "remove_set_aside")), st.sampled_from(MACHINES)),
    st.tuples(st.just("go_back"), st.sampled_from(MACHINES), st.integers(1, 4), st.booleans()),
    *(SAVE, SAVE),
)


class TwoMachines:
    """Two folders and a store, and what they should hold.

    Attributes:
        branch: (step, loss) of the checkpoints that the run now consists of; a loss is given once.
        trains: machine of the newest start.
    """

    def __init__(self, root: Path, keep_last: int | None) -> None:
        self._root, self._keep_last = root, keep_last
        self._mirror: Mirror | None = None
        self._branches: Branches = ()
        self._number = 0
        self._is_copied = True
        self._has_rolled_back = False
        self.branch: list[tuple[int, float]] = []
        self.trains = ""

    def start(self, machine: str, request: int | None = None, before_step: int | None = None) -> None:
        if machine != self.trains and not self._is_copied:
            return  # the other machine cannot know of the newest checkpoint
        config = self._config(machine)
        config = replace(config, resume_from_checkpoint=None if request is None else str(request))
        config.folder.mkdir(exist_ok=True)
        is_return = request is not None or before_step is not None
        self._check(machine)
        found = find_start(config, before_step=before_step, copies=list_copies(config))
        if found is not None:
            fetch_start(config, found)
            chosen = _facts(found.manifest.step, found.manifest.evaluation_loss)
            assert chosen in self.branch if is_return else chosen == self.branch[-1]
            assert [each.path for each in committed_checkpoints(config.folder) if each.step == found.step] == [
                found.path
            ]
            self.branch = self.branch[: self.branch.index(chosen) + 1]
        else:
            assert self.branch == [] or before_step is not None
            self.branch = []
        self._train_from(config, found, before_step)
        self.trains, self._is_copied, self._has_rolled_back = machine, True, before_step is not None
        self._check(machine)

    def _train_from(self, config: CheckpointConfig, found: CheckpointRef | None, before_step: int | None) -> None:
        """Do what a start does after its checkpoint is chosen."""
        step, newest = (0, None) if found is None else (found.step, found.path)
        is_return = before_step is not None or (found is not None and found.is_rewind)
        self._mirror = Mirror(
            config,
            step,
            newest,
            given_up=() if found is None else found.run.given_up_copies,
            listed=None if found is None or is_return else found.run.copies,
        )
        here = [each for each in committed_checkpoints(config.folder) if is_return or each.step <= step]
        known: list[Point] = [*here, *map(checkpoint_at, checkpoints_set_aside(config.folder)), *self._mirror.known]
        first_step = step + (found is not None and before_step is None)
        start = None if found is None else found.manifest
        self._branches = branches_from(start, known, first_step, is_return=is_return)
        self._mirror.start()
        if found is not None and found.is_rewind:
            set_aside_newer(config.folder, step + 1)
        if newest is not None:
            apply_retention(config.folder, newest, self._keep_last)
        if before_step is not None:
            self._save_again(config, step)
        assert self._mirror.finish(60.0) is None

    def _save_again(self, config: CheckpointConfig, step: int) -> None:
        """Save the target of a rollback again, and set what is newer aside."""
        if self.branch:
            self.branch.pop()
        path = self._save(config.folder.name, step)
        set_aside_newer(config.folder, step, path)
        self._copy(path)

    def save(self, is_copied: bool) -> None:
        if self._mirror is None:
            return
        path = self._save(self.trains, (self.branch[-1][0] if self.branch else 0) + 1)
        self._is_copied = is_copied
        if is_copied:
            self._copy(path)

    def _save(self, machine: str, step: int) -> Path:
        self._number += 1
        loss = (self._number * 7 % 11) + self._number / 1000
        path = save(self._root / machine, step, evaluation_loss=loss, branches=self._branches)
        self.branch.append(_facts(step, loss))
        apply_retention(self._root / machine, path, self._keep_last)
        return path

    def _copy(self, path: Path) -> None:
        assert self._mirror is not None
        self._mirror.copy(path)
        assert self._mirror.finish(60.0) is None

    def lose(self, machine: str) -> None:
        if machine == self.trains and not self._is_copied:
            return
        shutil.rmtree(self._root / machine, ignore_errors=True)
        if machine == self.trains:
            self._mirror = None

    def remove_set_aside(self, machine: str) -> None:
        for folder in (self._root / machine / "checkpoints").glob("set_aside_*"):
            shutil.rmtree(folder)

    def go_back(self, machine: str, count: int, rolls_back: bool) -> None:
        if len(self.branch) > count and self._is_copied:
            # A step of which the mirror has missed the copy is only on the machine that saved it.
            self.start(machine)
            held = {each.manifest.step for each in list_copies(self._config(machine)).complete.values()}
            step = self.branch[-1 - count][0]
            if step in held:
                self.start(machine, before_step=step + 1) if rolls_back else self.start(machine, step)

    def _check(self, machine: str) -> None:
        """Check that every checkpoint which a machine might use is of the run, and that its best one is the best."""
        config = self._config(machine)
        own = own_checkpoints(config.folder, list_copies(config)).current
        for each in own:
            place = each.places[0]
            manifest = read_document(place) if isinstance(place, Path) else place.manifest
            assert _facts(manifest.step, manifest.evaluation_loss) in self.branch
        best = config.folder / "checkpoints" / "best"
        if machine == self.trains and self._mirror is not None and self._is_copied and own:
            # A real rollback saves its target with the same loss; here it gets another one, after the best was fetched.
            usable = [each for each in own if each.is_here or not self._has_rolled_back]
            losses = [each.cost for each in usable if each.cost is not None]
            assert checkpoint_at(best.resolve()).cost == min(losses)

    def _config(self, machine: str) -> CheckpointConfig:
        mirror = f"file://{self._root / 'store'}"
        return CheckpointConfig(str(self._root / machine), ckpt_mirror_path=mirror, keep_last=self._keep_last)


def _facts(step: int, loss: float | None) -> tuple[int, float]:
    return step, round(loss or 0.0, 3)


# Machine b comes back with step 3, which the run gave up, after the store's retention has removed it (row 63).
ABANDONED: list[Any] = [
    *(("save", True), ("start", "b"), ("save", True), ("save", True), ("go_back", "a", 1, False)),
    *(("save", True), ("save", True), ("save", True), ("save", True), ("start", "b")),
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, min_size=4, max_size=20), st.sampled_from((1, 2, None)))
@example(ABANDONED, 2)
def test_every_start_continues_the_run_wherever_it_went_back(actions: list[Any], keep_last: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = TwoMachines(Path(folder), keep_last)
        run.start("a")
        for action, *details in actions:
            getattr(run, action)(*details)
        for machine in MACHINES:
            run.start(machine)
