"""Optimizers of users and of libraries: they begin without an update, and resume bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.train import own_optimizers
from unit.train.whole_runs import checkpoint, diverging_after, equal, manifest_of, start, tensors_of

from pretraining.config.training import OptimizerConfig
from pretraining.errors import ConfigError
from pretraining.optim.optimizer import update
from pretraining.optim.registry import build_optimizer, measure_state, try_optimizer
from pretraining.optim.state import begin_training, state_tensors

OWN = [f"unit.train.own_optimizers:{name}" for name in ("Counting", "CountingInGroup", "TwoWeights", "LowBit")]
OF_TORCH = [f"torch.optim:{name}" for name in ("Adafactor", "NAdam", "RAdam", "Adamax", "ASGD")]
OF_LIBRARIES = [
    *("lion_pytorch:Lion", "pytorch_optimizer:Adan", "pytorch_optimizer:AdEMAMix"),
    *("schedulefree:AdamWScheduleFree", "schedulefree:RAdamScheduleFree"),
    *("torchao.optim:AdamW8bit", "torchao.optim:AdamW4bit", "torchao.optim:AdamWFp8", "torchao.optim:_AdamW"),
]
LARGE = ["hidden_size=64", "intermediate_size=128"]  # low-bit states begin with 4096 values


def thorough(path: str) -> object:
    name = path.partition(":")[0].partition(".")[0]
    missing = pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    return pytest.param(path, marks=[missing, pytest.mark.thorough])


EACH = [*OWN, *map(thorough, [*OF_TORCH, *OF_LIBRARIES])]


def flags(optimizer: str) -> list[str]:
    return [f"optimizer={optimizer}", "checkpoint_interval=1", "warmup_steps=1", *LARGE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a run of four steps with an optimizer, which is trained once."""
    folder = tmp_path_factory.mktemp("whole")

    def train(optimizer: str) -> Path:
        run = folder / optimizer
        if not run.exists():
            start(run, *flags(optimizer))
        return run

    return train


@pytest.mark.parametrize("optimizer", EACH)
def test_a_resumed_run_repeats_the_run_without_a_stop_bit_for_bit(
    optimizer: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    for _ in range(2):
        start(tmp_path, *flags(optimizer), "run_steps=2")
    assert equal(checkpoint(whole(optimizer), 4), checkpoint(tmp_path, 4))


@pytest.mark.parametrize(
    ("optimizer", "record"),
    [
        (OWN[1], {"groups": [{"count": 4}] * 2, "has_tensors": False}),
        (OWN[2], {"groups": [{"count": 4}] * 2}),
        (OWN[3], {"groups": [{"count": 4}] * 2, "shards": 1}),
    ],
)
def test_the_manifest_has_the_counters_in_parameter_groups(
    optimizer: str, record: dict[str, Any], whole: Callable[[str], Path]
) -> None:
    assert manifest_of(whole(optimizer), 4)["state"]["optimizer"] == record


def test_weights_of_evaluation_and_low_bit_state_are_saved_as_they_are(whole: Callable[[str], Path]) -> None:
    """`TwoWeights` raises when a step is made in evaluation mode."""
    two, low = (tensors_of(whole(optimizer)) for optimizer in OWN[2:])
    assert not torch.equal(two["model.norm.weight"], two["optimizer.base.model.norm.weight"])
    codes = low["optimizer.momentum:codes.model.layers.0.mlp.up_proj.weight"]
    assert codes.dtype == torch.int8 and codes.shape == (1, 128, 64)


@pytest.mark.parametrize("optimizer", [OWN[0], *map(thorough, [*OWN[1:], *OF_TORCH, *OF_LIBRARIES])])
def test_the_first_update_after_a_rollback_to_the_start_is_that_of_a_new_optimizer(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "new", *flags(optimizer), "skip_samples=0-3")
    diverging_after(0, monkeypatch)
    start(tmp_path / "back", *flags(optimizer), "max_skipped_steps=2", "max_rollbacks=1")
    assert equal(checkpoint(tmp_path / "new", 4), checkpoint(tmp_path / "back", 4))
    again = shutil.copytree(tmp_path / "back", tmp_path / "again", symlinks=True)
    for step in range(1, 5):  # as after a kill right after the rollback: the next start loads the save of step 0
        shutil.rmtree(checkpoint(again, step))
    start(again, *flags(optimizer))
    assert equal(checkpoint(tmp_path / "new", 4), checkpoint(again, 4))


@pytest.mark.parametrize("optimizer", EACH)
def test_a_step_with_a_nan_gradient_changes_nothing(optimizer: str) -> None:
    layer = nn.Linear(64, 64)
    parameters = dict(layer.named_parameters())
    made = build_optimizer(parameters, OptimizerConfig(optimizer=optimizer))
    begin_training(made)
    kept: list[list[torch.Tensor]] = []
    for gradient, skipped in ((1.0, False), (torch.nan, True)):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, gradient)
        update(made, torch.tensor(skipped))
        states = [tensor for each in parameters.values() for tensor in state_tensors(made, each).values()]
        kept.append(
            [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in (*parameters.values(), *states)]
        )
    assert all(map(torch.equal, *kept))


@pytest.mark.parametrize("name", ["CountingInObject", "CountingInTensorOfGroup"])
def test_a_class_that_counts_where_no_checkpoint_looks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not continue after a resume"):
        try_optimizer(OptimizerConfig(optimizer=f"{own_optimizers.__name__}:{name}"))


@pytest.mark.parametrize(("name", "size"), [("Counting", 8 / 256**2), ("TwoWeights", 4.0), ("LowBit", 1 + 4 / 256**2)])
def test_the_state_of_a_users_optimizer_is_measured(name: str, size: float) -> None:
    config = OptimizerConfig(optimizer=f"{own_optimizers.__name__}:{name}")
    try_optimizer(config)
    found = measure_state(config)
    assert (
        found is not None
        and found.bytes_per_parameter == pytest.approx(size)
        and found.is_wrapped == (size < 1.1 and size > 1)
    )
