"""Optimizers of users and of libraries over several processes: they resume bit for bit, or are refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tiers import first_quick
from training_runs import assert_same_tensors, losses_of, train_runs

OWN = "unit.train.own_optimizers"
LARGE = ["hidden_size=64", "intermediate_size=128", "num_steps=4", "batch_size=2", "global_batch_size=4"]
NAMES = [
    *(f"{OWN}:LowBit", f"{OWN}:TwoWeights"),
    *("torchao.optim:AdamW8bit", "schedulefree:AdamWScheduleFree", "lion_pytorch:Lion"),
]


def missing(name: str) -> bool:
    return find_spec(name.partition(":")[0].partition(".")[0]) is None


def flags(optimizer: str, run: Path, *more: str) -> list[str]:
    return [*LARGE, f"optimizer={optimizer}", f"ckpt_save_path={run}", "held_out_fraction=0.1", "eval_batches=2", *more]


@pytest.mark.parametrize("optimizers", first_quick(NAMES[:2], NAMES[2:]), ids=["of the tests", "of libraries"])
def test_two_shards_resume_bit_for_bit(optimizers: list[str], data_path: Path, tmp_path: Path) -> None:
    found = [name for name in optimizers if name.startswith(OWN) or not missing(name)]
    if not found:
        pytest.skip("not installed")
    often = ["eval_interval=2", "checkpoint_interval=2"]
    parts: tuple[tuple[str, list[str]], ...] = (("whole", []), ("parts", ["run_steps=2"]), ("parts", []))
    train_runs(
        2, data_path, [flags(name, tmp_path / name / run, *often, *more) for name in found for run, more in parts]
    )
    for name in found:
        whole, resumed = tmp_path / name / "whole", tmp_path / name / "parts"
        assert losses_of(resumed) == losses_of(whole), name
        assert_same_tensors(*(each / "checkpoints" / "step_4_ckp" for each in (whole, resumed)))


def test_low_bit_state_of_another_number_of_shards_is_refused_with_the_way_on(data_path: Path, tmp_path: Path) -> None:
    optimizer, run = f"{OWN}:LowBit", tmp_path / "run"
    train_runs(2, data_path, [flags(optimizer, run, "run_steps=2")])
    with pytest.raises(AssertionError, match="is in blocks of 2 shards, and this run has 1"):
        train_runs(1, data_path, [flags(optimizer, run)])
    train_runs(1, data_path, [flags(optimizer, run, "load_optimizer=false")])
    assert len(losses_of(run)) == 4


def test_low_bit_state_of_uneven_shards_is_refused_at_the_start(data_path: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"65 rows of model\.embed_tokens.weight do not divide by 2"):
        train_runs(2, data_path, [flags(f"{OWN}:LowBit", tmp_path / "run", "vocab_size=65")])
