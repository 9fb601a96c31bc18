"""The quick tier tests every fault that docs/reliability.md promises to survive."""

from __future__ import annotations

import re
import subprocess
import sys

from helpers import ROOT, plain_environment

ROW = re.compile(r"^\| (\d[\d, ]*) \|", re.MULTILINE)
FAULTS = {
    "test_damage.py": (13, 14, 15, 16, 37),
    "test_data_faults.py": (25, 26, 47),
    "test_data_threads.py": (23,),
    "test_foreign_files.py": (36, 38, 41),
    "test_hangs.py": (2, 24),
    "test_killed.py": (1, 7),
    "test_mirror.py": (48, 49, 50),
    "test_out_of_memory.py": (51,),
    "test_replicas.py": (21,),
    "test_resuming.py": (27, 28, 29, 30),
    "test_rollback.py": (20, 46, 54),
    "test_saving.py": (8, 9, 10, 11, 12),
    "test_settings.py": (45,),
    "test_shared_cpu.py": (42,),
    "test_signals.py": (3, 4, 5, 6),
    "test_skipped_updates.py": (17, 18, 19),
    "test_stragglers.py": (22,),
    "test_streams.py": (34,),
    "test_two_machines.py": (43, 44),
}
"""The rows of the table that a file of tests/faults is about."""
ELSEWHERE = {
    "tests/distributed/test_train_script.py": (52,),
    "tests/unit/checkpoint/test_lease.py": (31,),
    "tests/unit/checkpoint/test_retention.py": (39,),
    "tests/unit/distributed/test_rendezvous.py": (32,),
    "tests/unit/observability": (35,),
    "tests/unit/train/test_evaluation.py": (56,),
    "tests/unit/train/test_memory_check.py": (40,),
    "tests/unit/train/test_run.py": (33, 53),
    "tests/unit/train/test_two_places.py": (55, 57, 58),
}


def test_every_row_of_the_faults_has_a_quick_test() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/faults"]
    listed = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True).stdout
    quick = set(re.findall(r"^tests/faults/(\w+\.py)::", listed, re.MULTILINE))
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [int(number) for row in ROW.findall(page.partition("## Faults")[2]) for number in row.split(", ")]
    assert len(rows) >= 44 and FAULTS.keys() <= quick
    assert sorted(rows) == sorted(sum((*FAULTS.values(), *ELSEWHERE.values()), ()))
    assert [path for path in ELSEWHERE if not (ROOT / path).exists()] == []
