"""A run on two disks with a mirror, against the true history of each checkpoint: nothing resumes what was given up.

Starts with and without the mirror, returns, rollbacks, saves, missed copies, kills between disk and store, damage, lost
disks, retention, copies by hand, and returns to what was set aside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from unit.checkpoint.examples import save
from unit.checkpoint.true_history import Identity, TrueHistory

from pretraining.checkpoint.branches import Branches, age_in_place, identity_of, newest, own
from pretraining.checkpoint.manifest import BRANCHES, REQUEST, RUN_ID, Manifest
from pretraining.checkpoint.mirror import Mirror, fetch_start, list_copies
from pretraining.checkpoint.own_checkpoints import (
    NO_COPIES,
    Copies,
    apply_retention,
    best_of,
    branches_of_start,
    list_run,
    return_to,
    saved_by_run,
    set_aside_others,
)
from pretraining.checkpoint.run_folder import checkpoint_at, checkpoints_set_aside
from pretraining.checkpoint.start_point import CheckpointRef, find_start, newest_good
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError
from pretraining.tools.command_settings import PushConfig
from pretraining.tools.push import push

pytestmark = [pytest.mark.usefixtures("single_process"), pytest.mark.thorough]

MACHINES = ("a", "b")
MACHINE = st.sampled_from(MACHINES)
SAVE = st.tuples(st.just("save"), st.booleans())
ACTIONS = st.one_of(  # methods of `TwoMachines` and their arguments
    SAVE,
    SAVE,
    st.tuples(st.just("start"), MACHINE, st.sampled_from((True, True, False))),
    st.tuples(st.just("go_back"), MACHINE, st.integers(0, 4), st.booleans(), st.booleans()),
    st.tuples(st.sampled_from(("lose", "remove_set_aside", "copy_by_hand", "push", "take_back")), MACHINE),
    st.tuples(st.just("damage"), st.sampled_from((*MACHINES, "store")), st.booleans()),
)


class TwoMachines:
    """Two folders and a store, and the true history.

    Attributes:
        newest: newest checkpoint of each machine, as long as only that machine has changed the run since.
    """

    def __init__(self, root: Path, keep_last: int | None) -> None:
        self._root, self._keep_last = root, keep_last
        self._mirror: Mirror | None = None
        self._trains: str | None = None
        self._branches: Branches = ()
        self._number = 0
        self._step = 0
        self._last: Identity | None = None
        self._above = dict.fromkeys(MACHINES, 0)
        self._truth = TrueHistory()
        self.newest: dict[str, Identity] = {}

    # Actions

    def start(self, machine: str, is_mirrored: bool = True, request: str | None = None, dies: bool = False) -> None:
        config = replace(self._config(machine, is_mirrored), resume_from_checkpoint=request)
        self._begin(machine, config, None, dies)

    def go_back(self, machine: str, count: int, rolls_back: bool, dies: bool) -> None:
        """Return, or roll back, to the checkpoint with so many newer ones."""
        config = self._config(machine)
        listed = list_run(config.folder, list_copies(config))
        found, _ = newest_good(listed.saved)
        targets = [] if found is None else own(found.manifest, listed.saved)[::-1][count : count + 1]
        for target in targets:
            if rolls_back:
                self._begin(machine, config, target.step + 1, dies)
            else:
                self.start(machine, request=str(target.path), dies=dies)

    def take_back(self, machine: str) -> None:
        """Return to what was set aside last."""
        aside = [path for path in checkpoints_set_aside(self._root / machine) if checkpoint_at(path).kind is not None]
        if aside:
            self.start(machine, request=str(aside[-1]))

    def save(self, is_copied: bool) -> None:
        if self._trains is None:
            return
        self._number += 1
        self._step += 1
        loss = (self._number * 7 % 11) + self._number / 1000
        run = self._root / self._trains
        path = save(run, self._step, evaluation_loss=loss, branches=self._branches)
        identity = identity_of(checkpoint_at(path))
        self._truth.parent[identity], self._last = self._last, identity
        apply_retention(run, path, self._keep_last)
        if self._mirror is not None and is_copied:
            self._mirror.copy(path)
            assert self._mirror.finish(60.0) is None
        self.newest = {self._trains: identity}

    def lose(self, machine: str) -> None:
        shutil.rmtree(self._root / machine, ignore_errors=True)
        self._above[machine] = 0
        self._stop(machine)

    def remove_set_aside(self, machine: str) -> None:
        for folder in (self._root / machine / "checkpoints").glob("set_aside_*"):
            shutil.rmtree(folder)

    def copy_by_hand(self, machine: str) -> None:
        here = list_run(self._root / machine).saved
        if here and here[-1].kind is not None:
            shutil.copytree(here[-1].path, here[-1].path.with_name("mine"), dirs_exist_ok=True)

    def push(self, machine: str) -> None:
        if machine == self._trains or not (self._root / machine / "checkpoints").is_dir():
            return
        (self._root / machine / "config.yaml").touch()
        try:
            push(PushConfig(paths=(str(self._root / machine), f"file://{self._root / 'store'}")))
        except CheckpointError:
            return
        if self._mirror is not None:  # another writer
            self._stop(self._trains)

    def damage(self, place: str, is_manifest: bool) -> None:
        """Cut a file of the newest checkpoint in a place."""
        saved = [checkpoint_at(path.parent) for path in (self._root / place / "checkpoints").glob("*/manifest.json")]
        readable = [checkpoint for checkpoint in saved if checkpoint.kind is not None]
        if not readable:
            return
        folder = max(readable, key=age_in_place).path
        os.truncate(folder / "manifest.json" if is_manifest else next(folder.glob("*.safetensors")), 9)
        self.newest = {}
        self._stop(place if place in MACHINES else self._trains)

    # Parts of a start, as `train/build.py` does them

    def _begin(self, machine: str, config: CheckpointConfig, before_step: int | None, dies: bool) -> None:
        copies = list_copies(config)
        config.folder.mkdir(exist_ok=True)
        try:
            found = find_start(config, before_step=before_step, copies=copies)
        except CheckpointError as error:  # everything is damaged, or the request names what a copy by hand has
            assert "no good checkpoint" in str(error) or "no complete one" in str(error) or "RESUME" in str(error)
            return
        is_return = before_step is not None or (found is not None and found.is_rewind)
        self._check(machine, copies, None if found is None else found.manifest, is_return)
        if found is not None:
            fetch_start(config, found)
        self._stop(None)
        copies = NO_COPIES
        if config.ckpt_mirror_path is not None:
            expected = None if found is None else found.mirrored
            is_checked = before_step is None
            newest = None if found is None else found.path
            self._mirror = Mirror(config, "a run", newest, expected=expected, is_checked=is_checked)
            copies = self._mirror.copies
        self._record(machine, config, copies, found, is_return)
        self._step = 0 if found is None else found.step
        self._last = None if found is None else identity_of(found.manifest)
        self._trains = machine
        path = None if found is None else found.path
        if found is not None and is_return:
            record = {RUN_ID: "a run", BRANCHES: self._branches, REQUEST: config.resume_from_checkpoint}
            return_to(found.path, found.manifest, record, found.manifest.data)
            identity = identity_of(checkpoint_at(found.path))
            self._truth.parent[identity], self._last = self._last, identity
        elif is_return:  # back to the initial weights
            self._number += 1
            path = save(config.folder, 0, evaluation_loss=float(self._number), branches=self._branches)
            self._last = identity_of(checkpoint_at(path))
            self._truth.parent[self._last] = None
        self.newest = {} if self._last is None else {machine: self._last}
        if path is not None:
            set_aside_others(config.folder, path)
            apply_retention(config.folder, path, self._keep_last)
        if dies:
            self._stop(None)
        elif self._mirror is not None:
            if is_return and found is None and path is not None:
                self._mirror.copy(path)
            self._mirror.start()
            assert self._mirror.finish(60.0) is None

    def _record(
        self, machine: str, config: CheckpointConfig, copies: Copies, found: CheckpointRef | None, is_return: bool
    ) -> None:
        start = None if found is None else found.manifest
        step = 0 if found is None else found.step
        above = self._above[machine]
        self._branches = branches_of_start(config.folder, start, step, copies, above=above, is_plain=not is_return)
        self._above[machine] = self._branches[-1].number
        seen = [each for each in list_run(config.folder, copies).saved if each.kind is not None]
        self._truth.begin(self._branches[-1].id, start, seen, is_return=is_return)

    def _stop(self, machine: str | None) -> None:
        if machine in (None, self._trains):
            self._mirror, self._trains = None, None

    def _config(self, machine: str, is_mirrored: bool = True) -> CheckpointConfig:
        mirror = f"file://{self._root / 'store'}" if is_mirrored else None
        return CheckpointConfig(str(self._root / machine), ckpt_mirror_path=mirror, keep_last=self._keep_last)

    # The truth

    def _check(self, machine: str, copies: Copies, chosen: Manifest | None, is_return: bool) -> None:
        run = self._root / machine
        listed = list_run(run, copies)
        found, _ = newest_good(listed.saved)
        if found is None:
            return
        identity = identity_of(found.manifest)
        line = self._truth.ancestors(identity)
        assert all(identity_of(each) in line for each in own(found.manifest, listed.saved) if each.kind is not None)
        if not is_return:
            assert chosen is not None and identity_of(chosen) == identity
        elif chosen is not None and "set_aside" not in str(chosen):
            assert identity_of(chosen) in line or identity_of(chosen) in map(identity_of, listed.set_aside)
        if machine in self.newest:  # nothing else has happened since it saved
            assert identity == self.newest[machine]
        there = newest([], [copy.manifest for copy in copies.complete.values()])
        here, _ = newest_good(list_run(run).saved)
        assert self._truth.gives_up(identity, there, None if here is None else here.manifest) == []


def best_is_the_best(run: Path) -> bool:
    """Return whether the link points to the best of the run's own checkpoints."""
    found, _ = newest_good(list_run(run).saved)
    if found is None:
        return True
    best = best_of(saved_by_run(checkpoint_at(found.path), list_run(run).saved))
    link = run / "checkpoints" / "best"
    return best is None or checkpoint_at(link.resolve()).cost == best.cost


# Machine b comes back with step 3, which the run gave up, after the store's retention has removed it (row 63).
ABANDONED: list[Any] = [
    *(("save", True), ("start", "b", True), ("save", True), ("save", True), ("go_back", "a", 1, False, False)),
    *(("save", True), ("save", True), ("save", True), ("save", True), ("start", "b", True)),
]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, min_size=4, max_size=20), st.sampled_from((1, 2, None)))
@example(ABANDONED, 2)
def test_no_start_resumes_what_was_given_up(actions: list[Any], keep_last: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = TwoMachines(Path(folder), keep_last)
        run.start("a")
        for action, *details in actions:
            getattr(run, action)(*details)
        for machine in MACHINES:
            run.start(machine)
            assert best_is_the_best(Path(folder) / machine)
