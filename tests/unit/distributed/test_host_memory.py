"""Freed memory is kept for the next step. Code that changes the allocator runs in a separate process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from pretraining.distributed.processes import keep_freed_memory

# Blocks of more than 2 GiB are not written, so the system allocates no pages for them.
PROGRAM = """
import resource, torch
from pathlib import Path
from pretraining.distributed.processes import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def pages_taken_from_the_system():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(64 * 2**20, dtype=torch.uint8) for _ in range(2)]
    del blocks
    torch.empty(2**31 + 2**20, dtype=torch.uint8)[: 2**26].zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, kept = resident(), keep_freed_memory()
pages = [pages_taken_from_the_system() for _ in range(12)]
held = resident() - before
return_freed_memory()
print(kept, pages[-1] < 100, held > 2**26, resident() - before < 2**26)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_freed_memory_is_reused_without_system_calls_and_returned_at_the_end() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "True True True True\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"), ("MALLOC_MMAP_THRESHOLD_", "131072")],
)
def test_a_users_allocator_settings_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
