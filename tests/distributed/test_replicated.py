"""Gradients that several devices sum in buckets are those of one device that sees all of their batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_forked
from tiers import first_quick

WORKER = Path(__file__).with_name("replicated_worker.py")


@pytest.mark.parametrize("processes", first_quick(2, 3))
def test_devices_sum_what_one_device_would_compute(processes: int) -> None:
    assert "the same everywhere" in run_forked(WORKER, processes).stdout
