from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.checkpoint.examples import FIRST, manifest_of, save, tensors

from pretraining.checkpoint.manifest import GUARDS_STATE, MANIFEST, RUN_STATE
from pretraining.checkpoint.own_checkpoints import apply_retention, best_of
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, Checkpoint, checkpoint_path, committed_checkpoints
from pretraining.checkpoint.writer import plan_save, save_checkpoint


def record(step: int, kind: str = "interval", loss: float | None = None) -> Checkpoint:
    return Checkpoint(Path(f"{step}{kind}"), step, kind=kind, cost=loss)


def test_the_best_is_the_first_with_the_lowest_loss_on_the_sets_that_decide_now() -> None:
    assert best_of([record(1), record(2)]) is None
    before = [record(1, loss=2.0), record(2, loss=1.5), record(3, loss=1.5)]
    now = [
        replace(each, decided_by=("loss", "books")) for each in (record(4, loss=3.0), record(5, loss=2.9), record(6))
    ]
    assert best_of([*before, record(4)]) == before[1]
    assert best_of([*before, *now]) == now[1]


@pytest.mark.parametrize(("kind", "name"), [("interval", "step_1_ckp"), ("preempt", "step_1_ckp.preempt")])
def test_the_way_back_of_a_run_that_diverges_stays_until_the_next_update(kind: str, name: str, tmp_path: Path) -> None:
    save(tmp_path, 0, kind)
    save(tmp_path, 1, kind)
    for step in (2, 3):
        record = {"id": "a run", "branches": FIRST}
        skipping = replace(manifest_of(step), state={GUARDS_STATE: {"skipped_in_a_row": step - 1}, RUN_STATE: record})
        save_checkpoint(checkpoint_path(tmp_path, step), plan_save(tensors(float(step))), skipping)
        apply_retention(tmp_path, checkpoint_path(tmp_path, step), 1)
        assert names_in(tmp_path) == [name, f"step_{step}_ckp"]
    apply_retention(tmp_path, save(tmp_path, 4), 1)
    assert names_in(tmp_path) == ["step_4_ckp"]


def names_in(run: Path) -> list[str]:
    return [each.path.name for each in committed_checkpoints(run)]


pytestmark = pytest.mark.usefixtures("single_process")


# step, kind and loss of a save with keep_last=1; then the checkpoints, and the best one
SAVES: list[tuple[int, str, float | None, list[str], str | None]] = [
    (1, "interval", None, ["1"], None),
    (2, "final", None, ["2"], None),
    (3, "best", 2.0, ["2", "3"], "3"),
    (4, "preempt", 2.0, ["2", "3", "4.preempt"], "3"),
    (5, "interval", 2.5, ["2", "3", "5"], "3"),
    (6, "interval", 2.5, ["2", "3", "6"], "3"),
    (7, "interval", 1.0, ["2", "7"], "7"),
]


def test_older_checkpoints_go_and_the_link_follows_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = tmp_path / CHECKPOINTS / BEST
    for step, kind, loss, names, best in SAVES:
        apply_retention(tmp_path, save(tmp_path, step, kind, loss), 1)
        assert [name.removeprefix("step_").replace("_ckp", "") for name in names_in(tmp_path)] == names
        assert (link.readlink().name if link.is_symlink() else None) == (best and f"step_{best}_ckp")
    assert {path.name for path in link.parent.iterdir()} == {"step_2_ckp", "step_7_ckp", "best"}
    assert caplog.messages == []


def test_an_unreadable_new_checkpoint_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 3, "preempt")
    newest = save(tmp_path, 4)
    (newest / MANIFEST).unlink()
    apply_retention(tmp_path, newest, 1)
    assert names_in(tmp_path) == ["step_3_ckp.preempt", "step_4_ckp"]
    assert "step_4_ckp" in caplog.text


def test_newer_damaged_checkpoints_neither_count_nor_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 9, "interval", 0.5)
    (save(tmp_path, 2) / MANIFEST).write_text("{")
    apply_retention(tmp_path, save(tmp_path, 4, "interval", 1.0), 1)
    assert names_in(tmp_path) == ["step_2_ckp", "step_4_ckp", "step_9_ckp"]
    assert (tmp_path / CHECKPOINTS / BEST).readlink() == Path("step_4_ckp")


def test_copies_and_files_of_users_neither_count_nor_are_removed(tmp_path: Path) -> None:
    checkpoints = tmp_path / CHECKPOINTS
    first = save(tmp_path, 1, evaluation_loss=1.0)
    theirs = ["mine", "step_7_ckp", "the_best", "notes.tmp", "step_1_ckp.backup.tmp", "step_2_ckp.tmp.old"]
    for name in theirs:
        shutil.copytree(first, checkpoints / name)
    for step in (2, 3, 4):
        apply_retention(tmp_path, save(tmp_path, step, evaluation_loss=3.0), 2)
    assert all((checkpoints / name / MANIFEST).is_file() for name in theirs)
    assert set(names_in(tmp_path)) - set(theirs) == {"step_1_ckp", "step_3_ckp", "step_4_ckp"}
    assert (checkpoints / BEST).readlink() == Path("step_1_ckp")


@pytest.mark.parametrize("loss", [None, 1.0])
def test_a_file_of_a_user_in_the_place_of_the_link_stays(tmp_path: Path, loss: float | None) -> None:
    folder = save(tmp_path, 1, evaluation_loss=loss)
    theirs = [folder.with_name("best"), folder.with_name("best.tmp")]
    for path in theirs:
        path.write_text("my notes")
    apply_retention(tmp_path, folder, None)
    assert [path.read_text() for path in theirs] == ["my notes"] * 2


def failing(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_failed_removal_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CHECKPOINTS / BEST).mkdir(parents=True)
    save(tmp_path, 1)
    newest = save(tmp_path, 2, "interval", 1.0)
    monkeypatch.setattr(Path, "rename", failing(13))
    apply_retention(tmp_path, newest, 1)
    assert names_in(tmp_path) == ["step_1_ckp", "step_2_ckp"]
    assert "best" in caplog.messages[0] and "step_1_ckp" in caplog.messages[1]


@pytest.mark.usefixtures("single_process")
def test_the_link_follows_the_best_that_is_left_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, loss in ((2, 2.0), (4, 3.0), (6, None)):
        apply_retention(tmp_path, save(tmp_path, step, evaluation_loss=loss), None)
    link = tmp_path / CHECKPOINTS / BEST
    assert link.readlink() == Path("step_2_ckp") and not caplog.messages
    for gone, now in ((2, "best one here is step_4_ckp now"), (4, "no other one here was evaluated")):
        shutil.rmtree(checkpoint_path(tmp_path, gone))
        apply_retention(tmp_path, checkpoint_path(tmp_path, 6), None)
        assert now in caplog.messages[-1] and f"step_{gone}_ckp" in caplog.messages[-1]
    assert not link.is_symlink()
