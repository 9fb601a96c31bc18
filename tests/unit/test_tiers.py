"""The quick tier has a test of every fault that docs/reliability.md promises to survive."""

from __future__ import annotations

import re
import subprocess
import sys

from helpers import ROOT, plain_environment

ROW = re.compile(r"^\| (\d+) \|.*\| ([^|]+) \|$", re.MULTILINE)


def test_every_row_of_the_faults_has_a_quick_test() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/faults"]
    listed = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True).stdout
    quick = set(re.findall(r"^tests/faults/(\w+\.py)::", listed, re.MULTILINE))
    rows = ROW.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(rows) >= 44 and quick
    without = [row for row, where in rows if "tests/" not in where and quick.isdisjoint(re.findall(r"\w+\.py", where))]
    assert without == []
