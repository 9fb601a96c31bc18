"""mutate.py changes what a program does, and leaves it a program."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.mutate import changes_of

CODE = """
def first(limit: int = 3, *, strict: Literal[5] = False) -> int:
    \"\"\"Docstring with 7.\"\"\"
    log.info("%d", 9)
    count = 0
    if limit <= 1:
        raise ValueError(f"limit {limit + 1}")
    while count != limit: count += 1
    record(count)
    return count
"""


def test_comparisons_constants_and_statements_change_and_what_only_speaks_does_not(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    changes = changes_of(Path("code.py"), tmp_path)
    made = sorted(change.describe(tmp_path).partition(": ")[2] for change in changes)
    assert made == [
        "0 -> 1",
        "1 -> 2",
        "1 -> 2",
        "3 -> 4",
        "False -> True",
        "count != limit -> (count == limit)",
        "count += 1 -> pass",
        "limit <= 1 -> (limit < 1)",
        'raise ValueError(f"limit {limit + 1}") -> pass',
        "record(count) -> pass",
    ]
    for change in changes:
        ast.parse(change.apply(CODE.encode()))
