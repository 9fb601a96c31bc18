"""Races: contenders, of one process or several, train on the same sequences and come to the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from helpers import ROOT, plain_environment

from pretraining.config.command_line import load_train_config
from scripts.benchmark.compare import against_torchtitan

SMALL = ("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=64")
SMALLER = (*SMALL, "--num_hidden_layers=1", "--vocab_size=64", "--seq_length=32", "--mixed_precision=false")
SHORT = ("--rounds=1", "--steps=2", "--report_interval=2", "--global_batch_size=8", "--learning_rate=0.001")


def race(benchmark: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"scripts.benchmark.{benchmark}", *SMALLER, *SHORT, *flags]
    return subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("benchmark", "processes", "a_step"),
    [
        ("compare.against_ddp", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 1, "4 micro-batches of 2 x 32 tokens"),
        ("measure.host_memory", 1, "4 micro-batches of 2 x 32 tokens"),
    ],
)
@pytest.mark.slow
def test_both_contenders_end_at_the_same_loss(benchmark: str, processes: int, a_step: str) -> None:
    if benchmark == "compare.against_trainer":
        pytest.importorskip("accelerate")
    done = race(benchmark, f"--processes={processes}")
    assert done.returncode == 0, done.stderr
    assert f"a step is {a_step}\n" in done.stdout
    first, second = (line.split("|")[4] for line in done.stdout.splitlines() if re.match(r"\| \w", line))
    assert first == second
    assert re.search(r"^.+ / .+: \d\.\d{3} \(-\), median of 1 rounds", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("interval", ["0", "3"])
def test_a_race_without_a_loss_at_its_end_is_refused_before_it_starts(interval: str) -> None:
    done = race("measure.training_loop", f"--report_interval={interval}")
    assert done.returncode == 1
    assert f"--report_interval={interval} must be 1 to 2, the steps of 1 rounds" in done.stderr


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("tie_word_embeddings=true", "--tie_word_embeddings=false"),
        ("selective_checkpointing=op", "--selective_checkpointing=op is not compared"),
        ("sharding_strategy=hsdp", "--sharding_strategy=hsdp is not compared"),
        ("selective_checkpointing=2", "torchtitan is 0.2.1: pip install torchtitan==0.2.2"),
    ],
)
def test_torchtitan_is_raced_only_on_equal_terms(flag: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["use_dummy_dataset=true", "fsdp_activation_checkpointing=true", flag]
    monkeypatch.setattr(against_torchtitan, "version", lambda package: "0.2.1")
    assert reason in (against_torchtitan.obstacle(load_train_config(settings)) or "")


def test_torchtitan_must_be_there_and_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_train_config(["use_dummy_dataset=true"])

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(against_torchtitan, "version", missing)
    assert "torchtitan is not there" in (against_torchtitan.obstacle(config) or "")
    monkeypatch.setattr(against_torchtitan, "version", lambda package: "0.2.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here" in (against_torchtitan.obstacle(config) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert against_torchtitan.obstacle(config) is None


@pytest.mark.thorough
def test_the_trainer_has_no_checkpointing_of_some_blocks() -> None:
    pytest.importorskip("accelerate")
    done = race("compare.against_trainer", "--fsdp_activation_checkpointing=true", "--selective_checkpointing=op")
    assert done.returncode == 1
    assert "error: the Trainer computes all blocks again or none" in done.stderr


@pytest.mark.slow
def test_a_contender_that_fails_ends_the_race() -> None:
    done = race("measure.training_loop", "--processes=2", "--sharding_strategy=hsdp", "--hsdp_group_size=3")
    assert done.returncode == 1
    assert "needs groups of equal size" in done.stderr
    assert "a contender ended early: project. Its error stands above." in done.stderr
