"""Memory that a step gives back is there for the next one. What changes the allocator has a process of its own."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from pretraining.distributed.processes import keep_freed_memory, return_freed_memory

# Blocks of more than 2 GiB are not written: the system hands out pages when they are.
PROGRAM = """
import resource
import torch
from pretraining.distributed.processes import keep_freed_memory

def pages_taken_from_the_system():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(64 * 2**20, dtype=torch.uint8) for _ in range(2)]
    del blocks
    torch.empty(2**31 + 2**20, dtype=torch.uint8)[: 2**26].zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
pages = [pages_taken_from_the_system() for _ in range(12)]
print(kept, pages[-1] < 100)
"""


def printed_by(program: str, choice: dict[str, str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment | choice, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({}, "True True"),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_data_cache_size=32768"}, "True True"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, "False False"),
    ],
)
def test_freed_blocks_are_taken_again_without_asking_the_system_unless_the_user_chose_otherwise(
    choice: dict[str, str], said: str
) -> None:
    assert printed_by(PROGRAM, choice) == said


RETURNING = """
import resource, torch
from pathlib import Path
from pretraining.distributed.processes import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

assert keep_freed_memory()
before = resident()
block = torch.ones(2**28, dtype=torch.uint8)
del block
kept = resident() - before
return_freed_memory()
print(kept > 2**27, resident() - before < 2**27)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_a_process_that_goes_on_returns_what_was_kept() -> None:
    assert printed_by(RETURNING, {}) == "True True"


@pytest.mark.parametrize("name", ["TRIM_THRESHOLD", "MMAP_THRESHOLD", "TOP_PAD", "MMAP_MAX"])
def test_an_allocator_that_the_user_has_set_up_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MALLOC_{name}_", "131072")
    monkeypatch.setattr(ctypes, "CDLL", lambda library: pytest.fail("it was asked"))
    assert not keep_freed_memory()


def test_a_system_without_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda library: object())
    assert not keep_freed_memory()
    return_freed_memory()
