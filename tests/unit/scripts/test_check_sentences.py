"""Sentences that are hard to read are found in pages and in Python files, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_command

LONG = "The " + " ".join(["word"] * 35) + "."
PYTHON = f'''"""A module.

Args:
    path: {" ".join(["a"] * 20)}
    other: {" ".join(["a"] * 20)}
"""

# Where it is.
text = f"what {{path}} has gone on with"
kept = "anew"
'''


@pytest.mark.parametrize(
    ("name", "content", "flagged"),
    [
        ("a.md", f"# {LONG}\n\nPlain. {LONG}\n\n```\n{LONG}\n```\n", ["36 words"]),
        ("a.md", "What is it? What it is. It takes 3 MB a row.", ['begins with "What"', '"MB a row": write "per"']),
        ("a.py", PYTHON, ['says "gone on"', 'begins with "Where"']),
    ],
)
def test_a_hard_sentence_is_reported_with_its_file(name: str, content: str, flagged: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    done = run_command([sys.executable, ROOT / "scripts" / "check_sentences.py", path], {}, check=False)
    assert [line.removeprefix(f"{path}: ").rsplit(": ", 1)[0] for line in done.stdout.splitlines()] == flagged
    assert done.returncode == 1
