"""Memory that a step gives back is there for the next one. Each case has a process of its own: it cannot be undone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from pretraining.parallel.host_memory import keep_freed_memory

def pages_taken_from_the_system():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(64 * 2**20, dtype=torch.uint8) for _ in range(2)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
pages = [pages_taken_from_the_system() for _ in range(6)]
print(kept, pages[-1] < 100)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({}, "True True"),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, "False False"),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_data_cache_size=32768"}, "True True"),
    ],
)
def test_freed_blocks_are_taken_again_without_asking_the_system_unless_the_user_chose_otherwise(
    choice: dict[str, str], said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **choice}, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == said


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretraining.parallel import host_memory

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert not host_memory.keep_freed_memory()
