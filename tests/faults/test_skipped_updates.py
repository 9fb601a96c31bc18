"""A loss or a gradient that must not become an update, on one rank, leaves no trace on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import train_with_faults
from training_runs import reports_of, shards_of, write_two_datasets

FAULTS = ("loss_is_nan", "loss_is_infinite", "gradient_is_infinite")
STRATEGIES = ("fsdp", "ddp")
SPIKES = ["spike_threshold=6", "spike_window=8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skipped")


@pytest.fixture(scope="module")
def endings(place: Path) -> list[dict[str, Any]]:
    """All runs of this module that need two processes, in one job."""
    data = write_two_datasets(place / "data")
    runs = [
        (fault, ["num_steps=4", "checkpoint_interval=1", f"sharding_strategy={strategy}", save(place, fault, strategy)])
        for fault in FAULTS
        for strategy in STRATEGIES
    ]
    runs.append(("loss_stays_nan", ["num_steps=40", "max_skipped_steps=4", save(place, "loss_stays_nan")]))
    runs.append(("loss_is_tenfold", ["num_steps=12", *SPIKES, save(place, "spike")]))
    runs.append(("no_fault", ["num_steps=12", "run_steps=8", *SPIKES, save(place, "resumed")]))
    return train_with_faults(2, data, runs)


def save(place: Path, *names: str) -> str:
    return f"ckpt_save_path={place.joinpath('_'.join(names))}"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys() and len(one) > 20
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    fault: str, strategy: str, place: Path, endings: list[dict[str, Any]]
) -> None:
    assert all("error" not in ending for ending in endings if ending["fault"] == fault)
    run = place / f"{fault}_{strategy}"
    states = [shards_of(run / "checkpoints" / f"step_{step}_ckp") for step in (1, 2, 3, 4)]
    assert not same(states[0], states[1])
    assert same(states[1], states[2])
    assert not same(states[2], states[3])
    assert [report["skipped_updates"] for report in reports_of(run)] == [0, 0, 1, 0]


def test_too_many_skipped_updates_in_a_row_stop_all_ranks_with_a_remedy(
    place: Path, endings: list[dict[str, Any]]
) -> None:
    errors = [ending["error"] for ending in endings if ending["fault"] == "loss_stays_nan"]
    assert len(errors) == 2 and len(set(errors)) == 1
    assert "step 6" in errors[0] and "--skip_samples=8-23" in errors[0]
    assert not (place / "loss_stays_nan" / "checkpoints" / "step_40_ckp").exists()


def test_a_spike_of_the_loss_is_left_out_though_it_is_finite(place: Path, endings: list[dict[str, Any]]) -> None:
    assert all("error" not in ending for ending in endings if ending["fault"] == "loss_is_tenfold")
    reports = reports_of(place / "spike")
    assert [report["step"] for report in reports if report["skipped_updates"]] == [9]
    assert reports[8]["grad_norm"] > 5 * reports[7]["grad_norm"]  # it was there, and finite


def test_the_spike_detectors_state_survives_a_resume_on_another_number_of_processes(
    place: Path, endings: list[dict[str, Any]]
) -> None:
    flags = ["num_steps=12", *SPIKES, save(place, "resumed")]
    train_with_faults(1, place / "data", [("loss_is_tenfold", flags)])
    reports = reports_of(place / "resumed")
    assert [report["step"] for report in reports if report["skipped_updates"]] == [9]
    assert len(reports) == 12
