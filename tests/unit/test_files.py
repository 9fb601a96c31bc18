from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from pretraining.errors import DataError
from pretraining.files import PAUSES_SECONDS, link_atomic, output_errors, with_retries, write_atomic


class Flaky:
    """Fails a number of times, then works."""

    def __init__(self, times: int, number: int) -> None:
        self.left, self.number, self.calls = times, number, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise OSError(self.number, os.strerror(self.number))
        return "done"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, without waiting for them."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


def test_what_passes_is_tried_again_with_longer_pauses(pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(2, errno.EIO)
    assert with_retries(flaky, "writing a") == "done"
    assert flaky.calls == 3 and pauses == [0.5, 1.0]
    assert caplog.messages[0] == "writing a failed (Input/output error): try 2 of 5 in 0.5 s"


def test_it_ends_with_the_error(pauses: list[float]) -> None:
    flaky = Flaky(9, errno.ESTALE)
    with pytest.raises(OSError, match="Stale"):
        with_retries(flaky, "")
    assert flaky.calls == 5 and pauses == list(PAUSES_SECONDS)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_what_does_not_pass_is_not_tried_again(number: int) -> None:
    flaky = Flaky(9, number)
    with pytest.raises(OSError):
        with_retries(flaky, "")
    assert flaky.calls == 1


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "first")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_flushed_ahead_of_its_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flush(descriptor: int) -> None:
        events.append("fsync")
        fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    write_atomic(tmp_path / "a", "content")
    assert events == ["fsync", "rename", "fsync"]


def test_a_link_is_replaced_at_once_also_after_a_kill_in_between(tmp_path: Path) -> None:
    (tmp_path / ".best.tmp").symlink_to("left behind")
    for target in ("first", "second"):
        link_atomic(tmp_path / "best", target)
        assert str((tmp_path / "best").readlink()) == target
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "^root cannot be written: No space left on device. Make room"),
        (PermissionError(13, "Permission denied", "root/x"), "^root/x cannot be written: Permission denied"),
        (OSError("the disk is on fire"), "^root cannot be written: the disk is on fire.*--output_path"),
    ],
)
def test_what_the_system_says_about_the_output_is_an_error_for_users(error: OSError, message: str) -> None:
    with pytest.raises(DataError, match=message), output_errors(Path("root")):
        raise error


def test_a_reader_of_the_messages_that_is_gone_is_no_error_of_the_output() -> None:
    with pytest.raises(BrokenPipeError), output_errors(Path("root")):
        raise BrokenPipeError
