"""Tables for documents are made from files of results, whole or cut off."""

from __future__ import annotations

import json
from typing import Any

from scripts.benchmark.tables import report

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
