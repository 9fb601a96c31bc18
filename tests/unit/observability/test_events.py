from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pretraining.observability.events import EVENTS_FILE, Events


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
