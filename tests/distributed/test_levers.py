"""Strategies, checkpointing, accumulation and compilation leave the loss curve alone, in any two of them together."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from training_runs import losses_of, train_runs

PROCESSES = (1, 2, 4)
STRATEGIES = ("ddp", "fsdp", "zero2", "hsdp", "hsdp_zero2")
CHECKPOINTING = ("none", "1", "op", "2", "2/3")
COMMON = ["num_steps=50", "global_batch_size=6", "checkpoint_interval=0"]


def levers(strategy: int, checkpointing: int) -> tuple[int, list[str]]:
    """Return a number of processes and settings: over all arguments, any two values of any two levers meet."""
    number = strategy + checkpointing  # 0 to 8: each remainder of 3, of 2, and of its half meets each other one
    processes = PROCESSES[number % 3]
    settings = [f"sharding_strategy={STRATEGIES[strategy]}", f"batch_size={1 + number % 2}"]
    settings += [f"use_torch_compile={number // 2 % 2 == 1}"]
    if STRATEGIES[strategy].startswith("hsdp"):
        settings += [f"hsdp_group_size={max(1, processes // 2)}"]
    if CHECKPOINTING[checkpointing] != "none":
        settings += ["fsdp_activation_checkpointing=true", f"selective_checkpointing={CHECKPOINTING[checkpointing]}"]
    return processes, settings


@pytest.mark.slow
def test_any_two_levers_keep_the_losses(data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each of the compiler's processes would import torch
    train_runs(1, data_path, [[*COMMON, "batch_size=6", f"ckpt_save_path={tmp_path / 'reference'}"]])
    runs: dict[int, list[list[str]]] = {processes: [] for processes in PROCESSES}
    for number, (strategy, checkpointing) in enumerate(itertools.product(range(5), repeat=2)):
        processes, settings = levers(strategy, checkpointing)
        runs[processes].append([*COMMON, *settings, f"ckpt_save_path={tmp_path / str(number)}"])
    for processes, several in runs.items():
        train_runs(processes, data_path, several)
    reference = losses_of(tmp_path / "reference")
    assert len(reference) == 50 and reference[-1] < reference[0]
    for run in itertools.chain.from_iterable(runs.values()):
        folder = Path(run[-1].partition("=")[2])
        assert losses_of(folder) == pytest.approx(reference, rel=1e-5), run
