"""Every optimizer learns the same on any layout, and goes on with another number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from training_runs import losses_of, train_runs

from pretraining.config.plugins import OPTIMIZERS

pytestmark = pytest.mark.thorough

RUN = ["num_steps=6", "global_batch_size=6", "batch_size=2", "warmup_steps=2"]
WHOLE_MATRICES = "muon"
WHOLE_NORM = "normalized_sgdm"
# Those that work on each number by itself need one layout; the others need each kind, and rows that do not divide.
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"fsdp": tuple(OPTIMIZERS), "ddp": (WHOLE_MATRICES, WHOLE_NORM)},
    3: {"fsdp": (WHOLE_MATRICES, WHOLE_NORM)},
    4: {"hsdp": (WHOLE_MATRICES, WHOLE_NORM), "zero2": (WHOLE_MATRICES,)},
}


@pytest.fixture(scope="module")
def on_one(data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of each optimizer on one process."""
    runs = tmp_path_factory.mktemp("one")
    train_runs(1, data_path, [flags(name, runs / name) for name in OPTIMIZERS])
    return {name: losses_of(runs / name) for name in OPTIMIZERS}


def flags(optimizer: str, run: Path, more: Sequence[str] = ()) -> list[str]:
    rate = {"sgd": "0.5", "sgdm": "0.1", "normalized_sgdm": "0.3"}.get(optimizer, "3e-3")
    decay = "0.01" if rate == "3e-3" else "1e-4"
    own = [f"optimizer={optimizer}", f"learning_rate={rate}", f"weight_decay={decay}", f"ckpt_save_path={run}"]
    return [*RUN, *own, *more]


def test_each_learns(on_one: dict[str, list[float]]) -> None:
    assert all(losses[-1] < losses[0] - 0.01 for losses in on_one.values()), on_one
    assert len({losses[-1] for losses in on_one.values()}) == len(OPTIMIZERS)


@pytest.mark.parametrize("processes", LAYOUTS)
def test_the_losses_are_those_of_one_process(
    processes: int, on_one: dict[str, list[float]], data_path: Path, tmp_path: Path
) -> None:
    chosen = [(strategy, name) for strategy, names in LAYOUTS[processes].items() for name in names]
    group = ["hsdp_group_size=2"] if processes == 4 else []
    runs = [
        flags(name, tmp_path / strategy / name, [f"sharding_strategy={strategy}", *(group * (strategy == "hsdp"))])
        for strategy, name in chosen
    ]
    train_runs(processes, data_path, runs)
    for strategy, name in chosen:
        assert losses_of(tmp_path / strategy / name) == pytest.approx(on_one[name], rel=1e-5), (strategy, name)


def test_a_run_resumes_on_other_processes(on_one: dict[str, list[float]], data_path: Path, tmp_path: Path) -> None:
    names = ("muon", "nadam", "sgdm")
    for processes, strategy, steps in ((1, "ddp", 2), (2, "fsdp", 2), (4, "hsdp", 1), (2, "ddp", 1)):
        more = [f"run_steps={steps}", f"sharding_strategy={strategy}"]
        more += ["hsdp_group_size=2"] if strategy == "hsdp" else []
        train_runs(processes, data_path, [flags(name, tmp_path / name, more) for name in names])
    for name in names:
        assert losses_of(tmp_path / name) == pytest.approx(on_one[name], rel=1e-5), name
