"""The quick tier tests every fault that docs/reliability.md promises to survive."""

from __future__ import annotations

import ast
import re

from helpers import ROOT

FAULTS = {
    "faults/test_killed.py": (
        "a rank is killed, or its machine is lost",
        "killed after the grace time, in the save",
    ),
    "faults/test_hangs.py": ("a rank or a read hangs",),
    "faults/test_signals.py": (
        "SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU or a time limit, at any moment",
        "a signal that is ignored at the start, as SIGHUP under `nohup`",
        "more signals during the save",
    ),
    "faults/test_saving.py": (
        "killed at any moment of a save",
        "disk full, quota",
        "a short file system error",
    ),
    "faults/test_damage.py": (
        "a truncated, changed or missing file in a checkpoint",
        "a pickle in place of a file",
        "a lost manifest, or a forged manifest with a correct checksum",
    ),
    "faults/test_skipped_updates.py": (
        "a loss or gradient that is not finite on one rank",
        "a finite spike of the loss",
    ),
    "faults/test_rollback.py": (
        "lasting divergence",
        "killed in or after a rollback, also if the newest checkpoint has the count of skipped steps at its limit",
        "a rollback, or skipped samples, at the border of two phases",
    ),
    "faults/test_replicas.py": ("a replica's weights differ",),
    "faults/test_stragglers.py": ("a slow rank",),
    "faults/test_data_threads.py": ("a data thread dies",),
    "faults/test_data_faults.py": (
        "a negative token, or one beyond the vocabulary; a short or foreign token file",
        "a dataset changed between starts, also if names, sizes and times stay",
    ),
    "faults/test_resuming.py": (
        "another number of processes, data threads or batches read ahead",
        "other settings at a resume",
        "a crash loop; a time limit shorter than a start; two runs on one folder",
    ),
    "unit/train/test_run.py": (
        "a crash loop; a time limit shorter than a start; two runs on one folder",
        "weights that are not finite at the end",
    ),
    "unit/checkpoint/test_lease.py": ("a lease with a wrong clock, or of another boot",),
    "unit/distributed/test_rendezvous.py": ("a process never joins",),
    "faults/test_streams.py": ("the reader of stdout exits; the disk of a log is full",),
    "unit/observability/test_events.py": ("a flipped bit in logs, run_status.json, lease.json, an index",),
    "faults/test_foreign_files.py": (
        "deep or huge JSON and YAML; absurd sizes in a Hugging Face folder",
        "paths that cannot be read or written",
    ),
    "unit/checkpoint/test_retention.py": ("files and copies of the user among checkpoints",),
    "unit/train/test_memory_check.py": ("a model that cannot fit",),
    "faults/test_shared_cpu.py": ("a CPU quota; other busy programs",),
    "faults/test_two_machines.py": (
        "host names that resolve to loopback",
        "a machine dies, a link is cut",
    ),
    "faults/test_settings.py": ("nodes with different settings",),
    "faults/test_mirror.py": (
        "killed in an upload to a mirror, all disks lost",
        "a store that is away, refuses, throttles or cuts",
        "two machines write to one mirror",
    ),
    "faults/test_out_of_memory.py": ("out of memory",),
    "distributed/test_train_script.py": ("the script of the job is killed",),
    "unit/train/test_rollback.py": ("a divergence after the loss of a disk, or with a damaged checkpoint before it",),
    "unit/checkpoint/test_own_checkpoints.py": (
        "the same, and retention has removed from the mirror what the run returned from",
    ),
    "unit/train/test_two_places.py": (
        "the best checkpoint is only in the mirror",
        "an old disk of a run that returned to an older checkpoint on another machine",
    ),
    "unit/train/test_returns.py": (
        "another machine copies a checkpoint during a start",
        "the best checkpoint is deleted by hand",
    ),
    "unit/train/test_no_labels.py": ("no token to predict in three reports in a row",),
    "unit/train/test_evaluation.py": ("the evaluation sets change at a resume",),
}
"""The faults that the tests of a file inject, in the words of docs/reliability.md."""


def test_every_fault_has_a_quick_test() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").partition("## Faults")[2]
    promised = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)[1:]
    assert len(promised) >= 44 and set(promised) == {fault for faults in FAULTS.values() for fault in faults}
    assert [path for path in FAULTS if not has_quick_test(path)] == []


def has_quick_test(path: str) -> bool:
    """Return whether a file has a test, without a mark of another tier on the test or on the file."""
    statements = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8")).body
    marks = [ast.unparse(each) for each in statements if isinstance(each, ast.Assign)]
    tests = [each for each in statements if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    quick = [each for each in tests if not any(is_slow(ast.unparse(decorator)) for decorator in each.decorator_list)]
    return bool(quick) and not any(text.startswith("pytestmark") and is_slow(text) for text in marks)


def is_slow(mark: str) -> bool:
    return re.search(r"\bmark\.(thorough|slow)\b", mark) is not None
