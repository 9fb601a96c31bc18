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


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))


@contextmanager
def failing(first: int, times: float) -> Iterator[list[str]]:
    """Fail this many calls of the file system, from call `first` on; yield the failed ones."""
    failed: list[str] = []
    calls = count(1)

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            if next(calls) >= first and len(failed) < times:
                failed.append(name)
                path = [str(args[0])] if isinstance(args[0], Path) else []  # not of a descriptor
                raise OSError(errno.EIO, os.strerror(errno.EIO), *path)
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


def test_a_save_that_fails_at_any_point_leaves_the_checkpoint_before_it_and_the_next_save_works(tmp_path: Path) -> None:
    met = set()
    for number in count(1):
        run = tmp_path / str(number)
        save(run, 1)
        with failing(number, times=float("inf")) as failed:
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
    for number in count(1):
        with failing(number, times=1) as failed:
            save(tmp_path / str(number), 2)
            assert holds(tmp_path / str(number), 2)
        if not failed:
            break
    assert number > 10


def test_a_load_that_fails_at_any_point_is_an_error_and_changes_no_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for number in count(1):
        with failing(number, times=float("inf")) as failed:
            try:
                load(folder, tensors(0.0))
            except CheckpointError as error:
                assert str(folder) in str(error)
        if not failed:
            break
        assert {path: path.read_bytes() for path in folder.iterdir()} == before and holds(tmp_path, 1)
    assert number > 3
