"""A run says what memory it will take before it takes any, and one that cannot fit is refused with what would."""

from __future__ import annotations

import logging

import pytest
import torch

from pretraining.config.command_line import load_train_config
from pretraining.config.variants import resolve_shape
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError
from pretraining.launch.machine import MachineMemory
from pretraining.train import memory
from pretraining.train.memory import check_memory

GIB = 2**30


def check(gib: float, *flags: str, processes: int = 1, shard_size: int = 1) -> None:
    """Checks a run in float32 on a machine with so much memory."""
    config = load_train_config(["use_dummy_dataset=true", "mixed_precision=false", *flags])
    here = Processes(0, processes, 0, processes, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        found = MachineMemory(int(gib * GIB), int(2 * gib * GIB), "this machine")
        patch.setattr(memory, "machine_memory", lambda: found)
        check_memory(config, resolve_shape(config.model), shard_size, here)


def test_what_fits_is_told_by_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pretraining")
    check(24, "model_variant=125m", "batch_size=1", "seq_length=512")
    (line,) = caplog.messages
    assert (
        line.startswith("memory      about ") and " of 24.0 GiB available in this machine: parameters 511.6 MiB" in line
    )


def test_an_8b_on_24_gib_is_refused_with_the_numbers_and_what_would_fit() -> None:
    with pytest.raises(ConfigError) as refused:
        check(24, "model_variant=llama3_8b", "batch_size=1", "seq_length=1024", "vocab_size=32000")
    said = str(refused.value)
    assert (
        "the model cannot fit: 7,241,732,096 parameters with --batch_size=1 and --seq_length=1024 take about " in said
    )
    assert (
        "and there are 24.0 GiB available in this machine. What would fit: --model_variant=llama3.2_1b (about " in said
    )
    assert "32 machines with --sharding_strategy=fsdp" in said and "--ignore_memory=true starts all the same" in said


def test_a_batch_that_is_too_large_is_told_what_keeps_the_model() -> None:
    with pytest.raises(ConfigError, match=r"--batch_size=8 \(about 9.0 GiB\); --fsdp_activation_checkpointing=true \("):
        check(15.5, "model_variant=125m", "batch_size=64", "seq_length=1024")
    with pytest.raises(ConfigError, match=r"fit: --batch_size=2 \(about "):
        check(5, "model_variant=125m", "batch_size=64", "seq_length=1024")


def test_processes_of_a_machine_share_its_memory() -> None:
    flags = ("model_variant=125m", "batch_size=1", "seq_length=256", "sharding_strategy=ddp")
    check(8, *flags)
    with pytest.raises(ConfigError, match="available in this machine for each of 8 processes"):
        check(8, *flags, processes=8)


def test_where_nothing_would_fit_that_is_said() -> None:
    with pytest.raises(ConfigError, match="Nothing smaller would fit, either"):
        check(0.1, "model_variant=tiny", "batch_size=1", "seq_length=64")


def test_what_is_within_the_error_of_the_estimate_is_not_refused() -> None:
    flags = ("model_variant=125m", "batch_size=64", "seq_length=1024")  # about 53.3 GiB
    check(50, *flags)
    with pytest.raises(ConfigError, match="cannot fit"):
        check(45, *flags)


def test_who_knows_better_starts_all_the_same() -> None:
    check(1, "model_variant=7b", "ignore_memory=true")
