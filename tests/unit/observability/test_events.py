from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.distributed.processes import Processes
from pretraining.observability.environment import record_environment
from pretraining.observability.events import EVENTS_FILE, Events
from pretraining.observability.trackers import ENVIRONMENT_FILE


def opened(run: Path) -> Events:
    events = Events()
    events.open(run)
    return events


def file_of(run: Path) -> Path:
    return run / "logs" / EVENTS_FILE


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file_of(run).read_text().splitlines()]


def test_a_later_start_appends_whatever_step_it_begins_with_and_ends_a_piece_of_a_line(tmp_path: Path) -> None:
    for step in (30, 10, 20):
        events = opened(tmp_path)
        events.add("restart", step, path="a/b")
        line = lines_of(tmp_path)[-1]  # written at once
        assert list(line) == ["step", "time", "event", "path"] and line["time"].endswith("Z")
        assert (line["event"], line["path"]) == ("restart", "a/b")
        events.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [30, 10, 20]
    with file_of(tmp_path).open("a") as file:
        file.write('{"step": 3, "ti')  # an incomplete line after a kill
    opened(tmp_path).add("restart", 2)
    *_, piece, last = file_of(tmp_path).read_text().splitlines()
    assert piece == '{"step": 3, "ti' and json.loads(last)["step"] == 2


def test_row_35_a_flipped_bit_changes_no_start_or_other_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path).add("start", 0)
    content = file_of(tmp_path).read_bytes()
    for at in range(8 * len(content)):
        flipped = content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :]
        file_of(tmp_path).write_bytes(flipped)
        events = opened(tmp_path)
        events.add("restart", 1)
        events.close()
        assert file_of(tmp_path).read_bytes().startswith(flipped)
        assert json.loads(file_of(tmp_path).read_bytes().splitlines()[-1])["event"] == "restart"
    assert caplog.messages == []


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "not writable", "a full disk"])
def test_an_unwritable_place_is_one_warning(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    if kind == "a pipe":
        os.mkfifo(file_of(tmp_path))
    elif kind == "a folder":
        file_of(tmp_path).mkdir()
    else:
        file_of(tmp_path).symlink_to("/dev/full" + "/nothing" * (kind == "not writable"))
    events = opened(tmp_path)
    for step in range(3):
        events.add("start", step)
    assert len(caplog.messages) == 1 and str(file_of(tmp_path)) in caplog.messages[0]
    events.close()


ALONE = Processes(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def records_of(run: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((run / "logs" / ENVIRONMENT_FILE).read_text())
    return records


@pytest.mark.usefixtures("single_process")
def test_each_start_adds_a_record_of_what_it_ran_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["main_training.py", "--api_key=a-secret"])
    record_environment(run, 0, "single", ALONE)
    record_environment(run, 40, "torchrun", ALONE)
    first, second = records_of(run)
    assert (first["step"], second["step"], second["launcher"], second["processes"]) == (0, 40, "torchrun", 1)
    assert first["packages"]["torch"] == torch.__version__ and "numpy" in first["packages"]
    assert [rank["threads"] for rank in first["ranks"]] == [torch.get_num_threads()] and first["time"].endswith("Z")
    assert "a-secret" not in json.dumps(first)


@pytest.mark.usefixtures("single_process")
def test_a_start_needs_no_sound_file(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "gone").mkdir()
    monkeypatch.chdir(run / "gone")
    (run / "gone").rmdir()
    record_environment(run, 3, "single", ALONE)
    assert [record["step"] for record in records_of(run)] == [3]
    path = run / "logs" / ENVIRONMENT_FILE
    for content in (b"[{]", b"3", b"[" * 100_000, b"\xff"):  # a damaged file stays
        path.write_bytes(content)
        record_environment(run, 4, "single", ALONE)
        assert path.read_bytes() == content
    path.unlink()
    os.mkfifo(path)
    record_environment(run, 4, "single", ALONE)
    assert [ENVIRONMENT_FILE in message for message in caplog.messages] == [True] * 5
