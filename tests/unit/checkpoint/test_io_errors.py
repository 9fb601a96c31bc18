"""An I/O error at any read, write, flush or rename: the call is repeated, and a lasting error loses no checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.checkpoint.examples import load, save, tensors

from pretraining import files
from pretraining.checkpoint.run_folder import CHECKPOINTS, committed_checkpoints
from pretraining.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("single_process")

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
