from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from pretraining import files
from pretraining.errors import CheckpointError, DataError, PathError
from pretraining.files import (
    DEEPEST_JSON,
    PAUSES_SECONDS,
    check_regular,
    entries_of,
    exists,
    is_file,
    is_folder,
    lfs_pointer_hint,
    link_atomic,
    output_errors,
    parse_json,
    read_file,
    read_json,
    with_retries,
    write_atomic,
)


def test_files_folders_and_missing_paths_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    nowhere = ["gone", "file/below", "circle", "x" * 300, "null\0"]
    names = ["file", "link", "pipe", ".", *nowhere]
    assert [name for name in names if is_file(tmp_path / name)] == ["file", "link"]
    assert [name for name in names if is_folder(tmp_path / name)] == ["."]
    assert [name for name in names if not exists(tmp_path / name)] == nowhere


@pytest.mark.parametrize("question", [is_file, is_folder, exists, entries_of])
def test_a_path_that_may_not_be_examined_is_an_error_for_users(
    question: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", str(tmp_path)))
    for call in ("stat", "listdir", "scandir"):  # the Python version decides which of the last two lists a folder
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(PathError) as refused:
        question(tmp_path)
    assert refused.value.path == tmp_path


def test_only_regular_files_are_read_as_a_whole(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError) as refused:
            read_file(path)
        assert refused.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        check_regular(tmp_path)
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError):
        read_file(tmp_path / "file", 4)


def test_a_git_lfs_pointer_is_named_with_the_command_that_fetches_the_file(tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    assert lfs_pointer_hint(pointer).startswith("it is a Git LFS pointer. Run `git lfs pull`")
    (tmp_path / "other").write_bytes(b"version 2")
    os.mkfifo(tmp_path / "pipe")
    for name in ("other", "pipe", "missing", "."):
        assert lfs_pointer_hint(tmp_path / name) == ""


@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
def test_json_is_read_up_to_a_depth(brackets: Sequence[str], tmp_path: Path) -> None:
    def nested(depth: int) -> str:
        return brackets[0] * depth + "0" * (brackets[0] != "[") + brackets[1] * depth

    parse_json(nested(DEEPEST_JSON))
    for text in (nested(DEEPEST_JSON + 1), nested(100_000), brackets[0] * 100_000):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError):
            read_json(tmp_path / "a.json")


def test_json_is_text_up_to_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")  # a file's checksum, as in the index of a dataset
    assert parse_json(json.dumps({"\U0001f600": name})) == {"\U0001f600": name}
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    monkeypatch.setattr(files, "MOST_IN_JSON", 4)
    assert parse_json('[[], {"a": []}]') == [[], {"a": []}]
    for content in ("[[], [], [], []]", r'["\ud83d"]', b'["\xff"]'):
        with pytest.raises(ValueError):
            parse_json(content)
    monkeypatch.setattr(files, "LARGEST_JSON_BYTES", 4)
    (tmp_path / "a.json").write_text("[1, 2]")
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("failures", "number", "pauses"),
    [(2, errno.EIO, [0.5, 1.0]), (9, errno.ESTALE, list(PAUSES_SECONDS)), (1, errno.ENOSPC, []), (1, errno.EACCES, [])],
)
def test_transient_errors_are_retried_with_longer_pauses_and_others_are_not(
    failures: int, number: int, pauses: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    flaky = Mock(side_effect=[OSError(number, os.strerror(number))] * failures + ["done"])
    try:
        assert with_retries(flaky, "writing a") == "done" and failures == len(pauses)
    except OSError as error:
        assert error.errno == number and failures > len(pauses)
    assert made == pauses and flaky.call_count == len(pauses) + 1
    assert all(line.startswith("writing a failed") for line in caplog.messages)


def test_a_file_is_whole_and_flushed_ahead_of_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    is_renamed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: is_renamed.append(path.exists()))
    write_atomic(path, "first")
    assert is_renamed == [False, True]
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError):
        write_atomic(path, b"second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_flush_folders_is_one_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flush = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    monkeypatch.setattr(files, "_warned_devices", set())
    for name in ("first", "second"):
        write_atomic(tmp_path / name, name)
    assert (tmp_path / "second").read_text() == "second" and len(caplog.messages) == 1
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError):  # a file that cannot be flushed is not written
        write_atomic(tmp_path / "third", "third")


def test_a_link_is_replaced_at_once_also_after_a_kill_in_between(tmp_path: Path) -> None:
    (tmp_path / ".best.tmp").symlink_to("left behind")
    for target in ("first", "second"):
        link_atomic(tmp_path / "best", target)
        assert str((tmp_path / "best").readlink()) == target
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (OSError(28, "No space left on device"), "root"),
        (PermissionError(13, "Permission denied", "root/x"), "root/x"),
        (OSError("the disk is on fire"), "root"),
    ],
)
def test_a_system_error_about_the_output_is_an_error_for_users(error: OSError, path: str) -> None:
    with pytest.raises(DataError) as refused, output_errors(Path("root")):
        raise error
    assert refused.value.path == Path(path) and refused.value.settings == ("output_path",)
    root, too_long = Path("root"), Path("x" * 300)
    with pytest.raises(DataError, match=r"Give a shorter --dataset$"), output_errors(root, name_flag="--dataset"):
        too_long.touch()
    with pytest.raises(CheckpointError, match=r"Give a shorter --ckpt_save_path$"), files.writing_into(root):
        too_long.touch()
    with pytest.raises(BrokenPipeError), output_errors(Path("root")):  # a closed pipe
        raise BrokenPipeError
