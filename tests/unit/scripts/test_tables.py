"""Tables for documents are made from files of results, whole or cut off."""

from __future__ import annotations

import json
from typing import Any

from scripts.benchmark.tables import report

RACE = "timeout 90 python -m race"


def row(**cells: str) -> str:
    return json.dumps({"command": "python -m race", "machine": "a GPU; torch 2.13.0", "row": cells})


def ended(**changes: Any) -> str:
    return json.dumps({"command": RACE, "seconds": 61.2, "failure": None, "last": "the end"} | changes)


def test_a_command_has_its_tables_and_how_it_ended() -> None:
    rows = [row(model="tiny", MFU="51.0%"), row(model="1b", MFU="47.5%"), row(ratio="a / b", median="1.02")]
    tables = (
        "| model |   MFU |\n| :---- | ----: |\n| tiny  | 51.0% |\n| 1b    | 47.5% |\n\n"
        "| ratio | median |\n| :---- | -----: |\n| a / b |   1.02 |\n"
    )
    head = "a GPU; torch 2.13.0\n\n    timeout 90 python -m race\n\n"
    assert report([*rows, ended()]) == f"{head}{tables}\n61 s, ended with: the end\n"
    assert report([*rows, ended(failure="no memory")]) == f"{head}{tables}\n61 s, ended early: no memory\n"
    assert report(rows) == tables
