"""Every fault that docs/reliability.md promises to survive has a quick test: here is where."""

from __future__ import annotations

import re

from helpers import ROOT

# File under tests/: the faults that its tests inject, in the words of the page.
FAULTS = {
    "faults/test_matrix.py": [
        "a rank is killed, or its machine is lost",
        "a rank or a read hangs",
        "SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU or a time limit, at any moment",
        "more signals during the save",
        "killed after the grace time, in the save",
        "killed at any moment of a save",
        "a short file system error",
        "a data thread dies",
        "out of memory",
    ],
    "unit/launch/test_signals.py": ["a signal that is ignored at the start, as SIGHUP under `nohup`"],
    "faults/test_saving.py": ["disk full, quota"],
    "faults/test_damage.py": [
        "a truncated, changed or missing file in a checkpoint",
        "a pickle in place of a file",
        "a lost manifest, or a forged manifest with a correct checksum",
    ],
    "faults/test_guards.py": [
        "a loss or gradient that is not finite on one rank",
        "a finite spike of the loss",
        "a replica's weights differ",
        "a slow rank",
    ],
    "faults/test_rollback.py": [
        "lasting divergence",
        "killed in or after a rollback",
        "a rollback, or skipped samples, at the border of two phases",
    ],
    "faults/test_data_faults.py": [
        "a negative token, or one beyond the vocabulary; a short or foreign token file",
        "a dataset changed between starts, also if names, sizes and times stay",
    ],
    "faults/test_resuming.py": [
        "another number of processes, data threads or batches read ahead",
        "other settings at a resume",
        "nodes with different settings",
    ],
    "faults/test_streams.py": ["the reader of stdout exits; the disk of a log is full"],
    "faults/test_foreign_files.py": [
        "deep or huge JSON and YAML; absurd sizes in a Hugging Face folder",
        "paths that cannot be read or written",
    ],
    "faults/test_shared_cpu.py": ["a CPU quota; other busy programs"],
    "faults/test_two_machines.py": ["host names that resolve to loopback", "a machine dies, a link is cut"],
    "faults/test_mirror.py": [
        "killed in an upload to a mirror, all disks lost",
        "a store that is away, refuses, throttles or cuts",
        "two machines write to one mirror",
    ],
    "distributed/test_train_script.py": ["the script of the job is killed"],
    "unit/checkpoint/test_lease.py": ["a lease with a wrong clock, or of another boot"],
    "unit/checkpoint/test_retention.py": ["files and copies of the user among checkpoints, and beside their files"],
    "unit/checkpoint/test_own_checkpoints.py": ["the same, and the mirror no longer holds what the run gave up"],
    "unit/data/storage/test_dataset_files.py": ["files under two names in one run"],
    "unit/data/storage/test_stored_data.py": [
        "a store with the data fails, is slow or cuts; an object is replaced; the disk of its cache is full or damaged"
    ],
    "unit/distributed/test_rendezvous.py": ["a process never joins"],
    "unit/observability/test_events.py": ["a flipped bit in logs, run_status.json, lease.json, an index"],
    "unit/train/test_evaluation.py": ["the evaluation sets change at a resume"],
    "unit/train/test_memory_check.py": ["a model that cannot fit"],
    "unit/train/test_no_labels.py": ["no token to predict in three reports in a row"],
    "unit/train/test_returns.py": [
        "another machine copies a checkpoint during a start",
        "the best checkpoint is deleted by hand",
    ],
    "unit/train/test_rollback.py": ["a divergence after the loss of a disk, or with a damaged checkpoint before it"],
    "unit/train/test_run.py": [
        "a crash loop; a time limit shorter than a start; two runs on one folder",
        "weights that are not finite at the end",
    ],
    "unit/train/test_two_places.py": [
        "the best checkpoint is only in the mirror",
        "an old disk of a run that returned to an older checkpoint on another machine",
        "killed in a return, before the mirror has the manifest of its target",
    ],
}


def test_every_fault_of_the_page_has_a_quick_test() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").partition("## Faults")[2]
    promised = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)[1:]
    assert len(promised) >= 44 and sorted(promised) == sorted(fault for faults in FAULTS.values() for fault in faults)
    for name in FAULTS:
        text = (ROOT / "tests" / name).read_text(encoding="utf-8")
        tests, others = (
            re.findall(each, text, re.MULTILINE) for each in (r"^def test_", r"^(@|pytestmark =).*mark.(thorough|slow)")
        )
        assert len(tests) > len(others) and not any(start != "@" for start, _ in others), name
