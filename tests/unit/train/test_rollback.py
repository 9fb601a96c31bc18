"""Rollbacks after a divergence, as whole runs in this process: to where, killed at any stage, with a mirror."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiers import first_quick
from training_runs import checkpoints_of, events_of
from unit.train.whole_runs import (
    checkpoint,
    damage,
    diverging_after,
    equal,
    manifest_of,
    numbers,
    refusal,
    start,
    started_at,
)

from pretraining.checkpoint import manager
from pretraining.object_store import Store, StoreError
from pretraining.train import build as build_module
from pretraining.train import run as run_module

GUARDS = ("max_skipped_steps=2", "max_rollbacks=1")
LIMIT = ("num_steps=6", "checkpoint_interval=1", *GUARDS)
SMALLER = "learning_rate=1e-4"


def skipped(run: Path, *steps: int) -> list[list[list[int]]]:
    """Return the samples of the only dataset that the run skips, as its checkpoints record them."""
    return [next(iter(manifest_of(run, step)["data"]["skipped"].values()), []) for step in steps]


def test_a_run_that_diverges_before_its_first_checkpoint_starts_again_without_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    diverging_after(0, monkeypatch)
    start(whole, "checkpoint_interval=1", *GUARDS, f"ckpt_load_path={whole}")
    assert skipped(whole, 0, 4) == [[[0, 4]]] * 2
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    for step in range(1, 5):  # the state after a kill right after the rollback
        shutil.rmtree(checkpoint(again, step))
    start(again)
    assert started_at(again) == 0 and equal(checkpoint(again, 4), checkpoint(whole, 4))


def test_a_rollback_passes_over_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diverging_after(2, monkeypatch, then=lambda: damage(checkpoint(tmp_path, 2)))
    start(tmp_path, "checkpoint_interval=1", *GUARDS)
    assert skipped(tmp_path, 1, 2, 3, 4) == [[[4, 8]]] * 4


def test_a_rollback_to_a_preemption_checkpoint_keeps_its_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    diverging_after(2, monkeypatch)
    start(run, *GUARDS, "preempt_interval=2", f"ckpt_mirror_path=file://{store}")
    saved = [event for event in events_of(run) if event["event"] == "checkpoint"]
    assert [(each["step"], each["kind"]) for each in saved][:2] == [(2, "preempt"), (2, "preempt")]
    assert manifest_of(run, 4) == manifest_of(store, 4) and skipped(run, 4) != [[]]


@pytest.fixture(scope="module")
def not_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("not_killed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        diverging_after(2, patch)
        start(run, *LIMIT)
    return run


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without rollbacks that has diverged after step 2."""
    run = tmp_path_factory.mktemp("lost") / "run"
    with pytest.MonkeyPatch.context() as patch:
        diverging_after(2, patch)
        refusal(run, *LIMIT, "max_rollbacks=0")
    return run


class KilledError(Exception):
    """A kill."""


STAGES = {
    "before a target is found": (run_module, "_rollback_from"),
    "before the target gets its manifest": (manager, "return_to"),
    "before newer checkpoints are set aside": (manager, "set_aside_others"),
    "before training continues": (build_module, "_write_records"),
}


@pytest.mark.parametrize(
    "stage", first_quick("before newer checkpoints are set aside", *[each for each in STAGES if "newer" not in each])
)
def test_a_kill_within_a_rollback_loses_nothing_although_the_count_was_saved_at_its_limit(
    stage: str, not_killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numbers(not_killed, 2) == numbers(not_killed, 6) == [(1, 0), (2, 2)]

    def kill(*arguments: object, **__: object) -> None:
        if stage != "before training continues" or any(getattr(each, "rollback", None) for each in arguments):
            raise KilledError

    with monkeypatch.context() as patch:
        diverging_after(2, patch)
        patch.setattr(*STAGES[stage], kill)
        with pytest.raises(KilledError):
            start(tmp_path, *LIMIT)
    torch.distributed.destroy_process_group()  # which only the end of a process does after such an error
    if stage != "before training continues":
        assert manifest_of(tmp_path, 4)["state"]["guards"] == {"skipped_in_a_row": 2}
    start(tmp_path, *LIMIT)
    assert skipped(tmp_path, 6) == [[[4, 8]]] and equal(checkpoint(tmp_path, 6), checkpoint(not_killed, 6))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_diverged_resumes_with_a_smaller_rate_and_another_run_starts_from_it(
    is_new: bool, lost: Path, tmp_path: Path
) -> None:
    assert manifest_of(lost, 4)["state"]["guards"] == {"skipped_in_a_row": 2}
    if is_new:  # its own rollbacks do not count what it has loaded
        start(tmp_path, *LIMIT, f"ckpt_load_path={lost}", SMALLER)
    else:
        shutil.copytree(lost, tmp_path, symlinks=True, dirs_exist_ok=True)
        start(tmp_path, *LIMIT, "max_rollbacks=0", SMALLER)
    assert started_at(tmp_path) == 4 and skipped(tmp_path, 6) == [[]]


def train(folder: Path, *flags: str) -> None:
    """Train 6 steps in a folder with a mirror, and save every second step."""
    start(folder / "run", f"ckpt_mirror_path=file://{folder}/store", "num_steps=6", "checkpoint_interval=2", *flags)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a run with a mirror that holds both checkpoints."""
    folder = tmp_path_factory.mktemp("mirrored")
    for _ in range(2):  # an earlier copy may be skipped for a newer one
        train(folder, "run_steps=2")
    return folder


@pytest.fixture
def copied(mirrored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(mirrored, tmp_path / "copied", symlinks=True)


def test_row_55_a_rollback_after_the_loss_of_a_disk_goes_back_to_the_mirrors_checkpoint(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging_after(5, monkeypatch, runs=2)
    train(copied, *GUARDS)  # step 6 is saved after a skipped update
    shutil.rmtree(copied / "run")
    train(copied, *GUARDS, "num_steps=10")  # the update of step 7 is skipped, too
    assert checkpoints_of(copied / "run") >= {f"step_{step}_ckp" for step in (4, 6, 8, 10)}
    assert skipped(copied / "run", 4, 6, 8) == [[[10, 14]]] * 3
    assert {path.parent.name for path in (copied / "store").rglob("manifest.json")} >= {"step_4_ckp", "step_10_ckp"}


@pytest.mark.parametrize("fault", ["the target is damaged on disk", "the store fails once"])
def test_row_55_a_rollback_takes_the_copy_of_a_damaged_target_and_waits_for_the_store(
    fault: str, copied: Path, mirrored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, faults = Store.sizes, list[StoreError]()

    def fail_once(self: Store) -> dict[str, int]:
        if faults:
            raise faults.pop()
        return sizes(self)

    def break_something() -> None:
        damage(checkpoint(copied / "run", 4)) if "damaged" in fault else faults.append(StoreError("throttled"))

    monkeypatch.setattr(Store, "sizes", fail_once)
    diverging_after(4, monkeypatch, then=break_something)
    train(copied, *GUARDS)
    assert skipped(copied / "run", 2, 4, 6) == [[], *[[[8, 12]]] * 2]
    assert equal(checkpoint(copied / "store", 4), checkpoint(mirrored / "run", 4)) and not faults
