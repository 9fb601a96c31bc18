"""Tables for documents are made from files of results, whole or cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark.tables import main, report

RACE = "timeout 90 python -m race"


def row(**cells: str) -> str:
    return json.dumps({"command": "python -m race", "machine": "a GPU; torch 2.13.0", "row": cells})


def ended(command: str = RACE, **changes: Any) -> str:
    outcome = {"command": command, "seconds": 61.2, "failure": None, "said": "the end", "column": None, "goal": None}
    return json.dumps(outcome | changes)


def test_a_command_has_its_tables_and_how_it_ended() -> None:
    lines = [row(model="tiny", MFU="51.0%"), row(model="1b", MFU="47.5%"), row(ratio="a / b", median="1.02"), ended()]
    assert report(lines) == (
        "a GPU; torch 2.13.0\n\n"
        "    timeout 90 python -m race\n\n"
        "| model |   MFU |\n| :---- | ----: |\n| tiny  | 51.0% |\n| 1b    | 47.5% |\n\n"
        "| ratio | median |\n| :---- | -----: |\n| a / b |   1.02 |\n\n"
        "61 s. It ended with: the end\n"
    )


def test_the_machine_is_named_once() -> None:
    text = report([row(model="tiny"), ended(), row(model="1b"), ended("python -m other")])
    assert text.count("a GPU") == 1 and text.index("    timeout 90 python") < text.index("    python -m other")


def test_what_was_measured_is_kept_where_a_command_failed() -> None:
    text = report([row(model="tiny"), ended(failure="it ran past its 90 s"), ended("other", failure="no torchtitan")])
    assert "| tiny  |" in text and "**Ended early** after 61 s: it ran past its 90 s" in text
    assert "**Ended early** after 61 s: no torchtitan" in text


def test_rows_of_a_command_that_was_cut_off_with_everything_are_there_too() -> None:
    text = report([row(model="tiny"), ended(), row(model="1b")])
    assert "| 1b    |" in text and text.endswith("it was cut off, and what had started it, too\n")


@pytest.mark.parametrize(
    ("cells", "goal", "verdict"),
    [
        (["44.1%", "50.3%"], 0.5, "Goal: MFU of at least 0.5: reached, 0.503."),
        (["44.1%"], 0.5, "Goal: MFU of at least 0.5: missed, 0.441."),
        (["1.312 (1.300 to 1.320)"], 1.3, "Goal: MFU of at least 1.3: reached, 1.312."),
        (["1,024"], 1000, "Goal: MFU of at least 1000: reached, 1024."),
        (["", "-"], 0.5, "Goal: MFU of at least 0.5: not measured."),
        ([], 0.5, "Goal: MFU of at least 0.5: not measured."),
    ],
)
def test_a_goal_is_compared_with_the_largest_number_of_its_column(cells: list[str], goal: float, verdict: str) -> None:
    assert verdict in report([*(row(model="1b", MFU=cell) for cell in cells), ended(column="MFU", goal=goal)])


def test_all_files_of_a_folder_are_shown_and_an_empty_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="error: there are no results in"):
        main([str(tmp_path)])
    for part in ("races", "float8"):
        (tmp_path / f"{part}.jsonl").write_text(row(model=part) + "\n" + ended() + "\n")
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert out.index("## float8") < out.index("## races") and "| races |" in out
