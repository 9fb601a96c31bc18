from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.examples import load, manifest_of, save, tensors

from pretraining import files
from pretraining.checkpoint import writer
from pretraining.checkpoint.manifest import EVALUATION_STATE, MANIFEST
from pretraining.checkpoint.run_folder import (
    BEST,
    CHECKPOINTS,
    checkpoint_name,
    checkpoint_path,
    committed_checkpoints,
    find_run_folder,
    folders_of,
    make_run_path,
    newest_run_path,
    read_manifest,
    unfinished_saves,
)
from pretraining.checkpoint.writer import plan_save, save_checkpoint
from pretraining.config.read import load_train_config
from pretraining.config.recipe_files import dump_config
from pretraining.config.training import TrainConfig
from pretraining.errors import CheckpointError
from pretraining.progress import PENDING_EVALUATION

pytestmark = pytest.mark.usefixtures("single_process")


def steps_in(run: Path) -> list[int]:
    return [each.step for each in committed_checkpoints(run)]


def test_a_checkpoint_is_found_by_its_manifest_under_any_name(tmp_path: Path) -> None:
    for step in (100, 10):
        save(tmp_path, step)
    os.utime(save(tmp_path, 9))  # the order is by step, not by time
    checkpoint_path(tmp_path, 9).rename(tmp_path / CHECKPOINTS / "the one before")
    (tmp_path / CHECKPOINTS / BEST).symlink_to("the one before")
    (tmp_path / CHECKPOINTS / "notes").mkdir()
    assert steps_in(tmp_path) == [9, 10, 100] and unfinished_saves(tmp_path) == []
    (tmp_path / CHECKPOINTS / "the one before" / MANIFEST).write_text("{")
    assert steps_in(tmp_path) == [-1, 10, 100]  # without a manifest, the name tells the step
    for name, step in (("step_9_ckp", 9), ("tokens(1.00e0)_ckpt.step_3", 3)):
        (checkpoint_path(tmp_path, 10) / MANIFEST).unlink(missing_ok=True)
        checkpoint_path(tmp_path, 10).rename(tmp_path / CHECKPOINTS / name)
        assert steps_in(tmp_path) == [-1, step, 100]
        (tmp_path / CHECKPOINTS / name).rename(checkpoint_path(tmp_path, 10))


def test_names_tell_the_step_or_the_story() -> None:
    manifest = manifest_of(1040, kind="preempt", evaluation_loss=10.9244)
    assert checkpoint_name("step", manifest) == "step_1040_ckp.preempt"
    assert checkpoint_name("tokens", manifest) == "tokens(1.04e4)_vloss(10.924)_ckpt.preempt"
    assert checkpoint_name("step", manifest_of(1)) == "step_1_ckp"
    assert checkpoint_name("tokens", manifest_of(0)) == "tokens(0.00e0)_ckpt"


def test_the_next_save_removes_nothing_that_no_save_has_made(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoints = tmp_path / CHECKPOINTS
    left = ["step_6_ckp.01ab.tmp", "step_6_ckp.preempt.ffff.tmp", "tokens(1.04e4)_vloss(10.924)_ckpt.step_3.ffff.tmp"]
    theirs = ["notes.tmp", "step_6.tmp", "step_6_ckp_old.tmp", "step_6_ckp.xyz.tmp", "tokens(mine)_ckpt.tmp"]
    theirs += ["step_6_ckp.tmp", "step_5_ckp.preempt.tmp"]
    for name in [*left, *theirs]:
        (checkpoints / name).mkdir()
    assert [path.name for path in unfinished_saves(tmp_path)] == sorted(left)
    save(tmp_path, 6)
    assert {path.name for path in checkpoints.iterdir()} == {"step_5_ckp", "step_6_ckp", *theirs}


def test_of_one_step_a_checkpoint_for_preemption_and_a_replaced_one_come_first(tmp_path: Path) -> None:
    """Retention and starts use the last checkpoint of a step."""
    preempt, folder = save(tmp_path, 5, kind="preempt"), save(tmp_path, 5)
    replaced = shutil.copytree(folder, folder.with_name("step_5_ckp.step_5"))  # by a kill between its two renames
    assert {each.path for each in committed_checkpoints(tmp_path)[:2]} == {preempt, replaced}
    assert committed_checkpoints(tmp_path)[2].path == folder


def test_a_link_in_place_of_a_checkpoint_is_replaced_or_removed_and_its_target_stays(tmp_path: Path) -> None:
    elsewhere, path = save(tmp_path, 5).rename(tmp_path / "large_disk"), checkpoint_path(tmp_path, 5)
    for remove in (False, True):
        path.symlink_to(elsewhere)
        assert steps_in(tmp_path) == [5]
        if not remove:
            save(tmp_path, 5)
            assert not path.is_symlink()
        writer.remove_checkpoint(path)
        assert steps_in(tmp_path) == [] and (elsewhere / MANIFEST).is_file()


def test_a_kill_while_a_step_is_saved_again_leaves_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    rename = Path.rename
    for last in range(1, 9):
        calls = count(1)

        def rename_or_die(path: Path, target: Path, calls: Iterator[int] = calls, last: int = last) -> Path:
            if next(calls) == last:
                raise Died
            return rename(path, target)

        run = tmp_path / str(last)
        save(run, 5)
        with monkeypatch.context() as patch, suppress(Died):
            patch.setattr(Path, "rename", rename_or_die)
            save(run, 5)
        newest = committed_checkpoints(run)[-1]
        assert read_manifest(newest.path).step == 5 and newest.has_save_name
        save(run, 5)
        assert unfinished_saves(run) == [] and steps_in(run)[-1] == 5


def test_a_failed_removal_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5)
    left = tmp_path / CHECKPOINTS / "step_4_ckp.01ab.tmp"
    left.mkdir()

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        save(tmp_path, 5)
        save(tmp_path, 6)
    assert steps_in(tmp_path) == [5, 6] and str(left) in caplog.text
    save(tmp_path, 7)
    assert steps_in(tmp_path) == [5, 6, 7] and unfinished_saves(tmp_path) == []


CALLS = [(os, "write"), (os, "preadv"), (os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "open")]
LASTING = float("inf")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))


@contextmanager
def failing(first: int, times: float, code: int = errno.EIO) -> Iterator[list[str]]:
    """Fail this many calls of the file system, from call `first` on; yield the failed ones."""
    failed: list[str] = []
    calls = count(1)

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            if next(calls) >= first and len(failed) < times:
                failed.append(name)
                path = [str(args[0])] if isinstance(args[0], Path) else []  # not of a descriptor
                raise OSError(code, os.strerror(code), *path)
            return call(*args, **more)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        yield failed


def holds(run: Path, step: int) -> bool:
    """Return whether the newest checkpoint of a run is that of a step, bit for bit."""
    found = tensors(0.0)
    newest = committed_checkpoints(run)[-1].path
    load(newest, found)
    expected = tensors(float(step))
    return newest.name == f"step_{step}_ckp" and all(torch.equal(found[name], expected[name]) for name in expected)


def points_of_failure(times: float) -> Iterator[tuple[int, list[str]]]:
    """Let the first call fail, then the second and so on, until one is never made; yield numbers and failed calls."""
    for number in count(1):
        with failing(number, times) as failed:
            yield number, failed
        if not failed:
            assert number > 3
            return


def test_a_save_that_fails_at_any_point_leaves_the_checkpoint_before_it_and_the_next_save_works(tmp_path: Path) -> None:
    met = set()
    for number in count(1):
        run = tmp_path / str(number)
        save(run, 1)
        with failing(number, LASTING) as failed:
            try:
                save(run, 2)
            except CheckpointError as error:
                assert str(run) in str(error)
        if not failed:
            break
        met.add(failed[0])
        is_committed = len(committed_checkpoints(run)) == 2  # if the error came after the rename
        assert holds(run, 2 if is_committed else 1)
        save(run, 2)
        assert holds(run, 2)
        assert {path.name for path in (run / CHECKPOINTS).iterdir()} == {"step_1_ckp", "step_2_ckp"}
    assert met == {"write", "fsync", "open", "rename"}


def test_an_error_that_passes_costs_nothing_at_any_point_of_a_save_and_a_load(tmp_path: Path) -> None:
    for number, _ in points_of_failure(times=1):
        save(tmp_path / str(number), 2)
        assert holds(tmp_path / str(number), 2)
    assert number > 10


def test_a_load_that_fails_at_any_point_is_an_error_and_changes_no_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for _, failed in points_of_failure(LASTING):
        try:
            load(folder, tensors(0.0))
        except CheckpointError as error:
            assert failed and str(folder) in str(error)
        else:
            assert not failed
    assert {path: path.read_bytes() for path in folder.iterdir()} == before and holds(tmp_path, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_the_bytes_needed_and_the_older_checkpoint_stays(tmp_path: Path, code: int) -> None:
    save(tmp_path, 1)
    with failing(3, LASTING, code), pytest.raises(CheckpointError, match="takes 44 bytes") as raised:
        save(tmp_path, 2)
    assert (raised.value.path or tmp_path).is_relative_to(tmp_path / CHECKPOINTS)
    assert raised.value.settings == ("ckpt_save_path",)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step_1_ckp"]  # no leftovers use disk space


NOW = datetime(2026, 11, 21, 14, 30, 5, tzinfo=UTC)


def config_of(path: Path, *flags: str) -> TrainConfig:
    return load_train_config([f"ckpt_save_path={path}", "use_dummy_dataset=true", "model_variant=7b", *flags])


def start(path: Path, *flags: str, now: datetime = NOW) -> Path:
    """Find or make the folder as a start does, and write the settings there."""
    config = config_of(path, *flags)
    found = find_run_folder(config)
    if found != str(path):
        return Path(str(found))
    made = make_run_path(str(path), now)
    assert made is not None
    (Path(made) / "config.yaml").write_text(dump_config(config))
    return Path(made)


def later(minutes: int) -> datetime:
    return NOW.replace(minute=30 + minutes)


def test_a_restart_with_the_same_settings_finds_its_folder_with_or_without_a_checkpoint(tmp_path: Path) -> None:
    pattern = tmp_path / "[try].{timestamp}"
    first = start(pattern, "seed=1")
    assert first == tmp_path / "[try].20261121-143005" and start(pattern, "seed=1", now=later(1)) == first
    for flag in (
        "run_steps=5",
        "max_starts_without_progress=0",
        "time_limit=30min",
    ):  # the last two are remedies of a crash loop
        assert start(pattern, "seed=1", flag, now=later(2)) == first
    (first / "checkpoints" / "step_5_ckp").mkdir(parents=True)
    assert start(pattern, "seed=1", now=later(3)) == first


@pytest.mark.usefixtures("single_process")
def test_runs_with_other_settings_do_not_meet_and_each_finds_its_own(tmp_path: Path) -> None:
    pattern = tmp_path / "{timestamp}" / "run"
    first, second = start(pattern, "seed=1"), start(pattern, "seed=2")
    assert second.parent.name == "20261121-143006"  # not in the same second
    save(first, 5)
    save(second, 7)
    assert start(pattern, "seed=1", now=later(1)) == first
    assert start(pattern, "seed=2", now=later(1)) == second
    assert start(pattern, "seed=3", now=later(1)).parent.name == "20261121-143105"


def test_a_dimension_that_is_left_open_is_not_that_of_another_run(tmp_path: Path) -> None:
    pattern = tmp_path / "try.{timestamp}"
    first = start(pattern, "model_variant=tiny", "num_hidden_layers=2")
    assert start(pattern, "model_variant=tiny", now=later(1)) != first
    assert start(pattern, "model_variant=tiny", "num_hidden_layers=2", now=later(2)) == first


@pytest.mark.usefixtures("single_process")
def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    pattern = tmp_path / "try.{timestamp}"
    first = start(pattern)
    save(first, 5)
    manifest = replace(manifest_of(9, kind="final"), state={EVALUATION_STATE: {PENDING_EVALUATION: True}})
    save_checkpoint(checkpoint_path(first, 9), plan_save(tensors(9.0)), manifest)
    assert start(pattern, now=later(1)) == first  # it was stopped before its last evaluation
    save(first, 9, kind="final")
    second = start(pattern, now=later(1))
    assert second != first
    assert newest_run_path(str(pattern)) == str(second)
    (save(first, 9) / MANIFEST).write_text("{")  # the damaged one is skipped, so the run is not finished
    (second / "config.yaml").unlink()
    assert start(pattern, now=later(2)) == first


def test_a_path_without_timestamp_is_unchanged_and_other_folders_match_no_pattern(tmp_path: Path) -> None:
    assert make_run_path(str(tmp_path / "run")) == str(tmp_path / "run") and not (tmp_path / "run").exists()
    assert newest_run_path("runs/a") == "runs/a"
    for name in ("try.20261121-14300", "try.20261121-143005.old", "try.latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "try.20261121-143006").touch()
    assert folders_of(str(tmp_path / "try.{timestamp}")) == []
    assert newest_run_path(str(tmp_path / "try.{timestamp}")) == str(tmp_path / "try.{timestamp}")


def test_a_relative_path_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = start(Path("./runs/../runs/try.{timestamp}"))
    assert start(Path("./runs/../runs/try.{timestamp}"), now=later(1)) == first


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as refused:
        make_run_path(str(tmp_path / "file" / "{timestamp}"), NOW)
    assert refused.value.path == tmp_path / "file" / "20261121-143005"
