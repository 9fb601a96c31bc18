"""Updates that must not happen, weights that differ, a slow rank: what guards find in one rank, all ranks act on."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from faulty_runs import ALL, Ended, Fault, train, train_each
from tiers import first_quick
from training_runs import reports_of, shards_of, write_two_datasets

NOT_FINITE: dict[str, Fault] = {
    "a loss that is NaN": (1, "spoil_objective", 3, 3, "plus NaN"),
    "an infinite loss": (1, "spoil_objective", 3, 3, "overflow"),
    "an infinite gradient": (1, "in_norm", 3, "overflow"),
}
STRATEGIES = ("fsdp", "ddp")
SPIKES = ["num_steps=12", "spike_threshold=6", "spike_window=8"]
TENFOLD = (ALL, "spoil_objective", 9, 9, "tenfold")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guards")


@pytest.fixture(scope="module")
def ended(place: Path) -> dict[str, list[Ended]]:
    """All runs of two processes, in one job."""
    runs: dict[str, tuple[list[str], list[Fault]]] = {}
    for strategy in STRATEGIES:
        flags = [f"sharding_strategy={strategy}"]
        for name, fault in NOT_FINITE.items():
            runs[f"{name}, {strategy}"] = ([*flags, "num_steps=4", "checkpoint_interval=1"], [fault])
        slow: list[Fault] = [(ALL, "look_for_stragglers_often"), (1, "slow_steps")]
        runs[f"a slow rank, {strategy}"] = ([*flags, "num_steps=12", "report_interval=12"], slow)
    runs["NaN for good"] = (["num_steps=40", "max_skipped_steps=4"], [(1, "spoil_objective", 3, 40, "times NaN")])
    runs["a spike"] = (SPIKES, [TENFOLD])
    runs["resumed"] = ([*SPIKES, "run_steps=8"], [])
    data = on_data(place)
    found = train_each([([*data, *flags, save(place, name)], faults) for name, (flags, faults) in runs.items()])
    return dict(zip(runs, found, strict=True))


def on_data(place: Path) -> list[str]:
    if not (place / "data").exists():
        write_two_datasets(place / "data")
    return [f"data_path={place / 'data'}", "sep_token=0", "logical_shards=8"]


def save(place: Path, name: str) -> str:
    return f"ckpt_save_path={place / name}"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys() and len(one) > 20
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", NOT_FINITE)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    fault: str, strategy: str, place: Path, ended: dict[str, list[Ended]]
) -> None:
    name = f"{fault}, {strategy}"
    assert [each.status for each in ended[name]] == [0, 0]
    states = [shards_of(place / name / "checkpoints" / f"step_{step}_ckp") for step in (1, 2, 3, 4)]
    assert [same(one, other) for one, other in pairwise(states)] == [False, True, False]
    assert [report["skipped_updates"] for report in reports_of(place / name)] == [0, 0, 1, 0]


def test_too_many_skipped_updates_in_a_row_stop_all_ranks_with_a_remedy(
    place: Path, ended: dict[str, list[Ended]]
) -> None:
    first, other = ended["NaN for good"]
    assert (first.status, other.status, other.stderr.count("error")) == (1, 1, 0)
    assert "step 6" in first.stderr and "--skip_samples=8-23" in first.stderr
    assert not (place / "NaN for good" / "checkpoints" / "step_40_ckp").exists()


def test_a_finite_spike_is_skipped_also_after_a_resume_on_another_number_of_processes(
    place: Path, ended: dict[str, list[Ended]]
) -> None:
    train([*on_data(place), *SPIKES, save(place, "resumed")], TENFOLD, processes=1)
    for name in ("a spike", "resumed"):
        reports = reports_of(place / name)
        assert [report["step"] for report in reports if report["skipped_updates"]] == [9]
        assert len(reports) == 12
        assert reports[8]["grad_norm"] > 5 * reports[7]["grad_norm"]  # it was there, and finite


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_slow_rank_is_named_with_its_factor(strategy: str, ended: dict[str, list[Ended]]) -> None:
    (line,) = [line for line in ended[f"a slow rank, {strategy}"][0].output.splitlines() if "straggler" in line]
    match = re.search(r"straggler: rank 1 on \S+: [\d.]+ s of own work per step,.* ([\d.]+) times", line)
    assert match and float(match[1]) >= 1.5, line


@pytest.mark.parametrize(
    ("processes", "strategy", "named"),
    first_quick(
        (3, ["sharding_strategy=ddp"], {1: [0, 2]}),
        (4, ["sharding_strategy=hsdp", "hsdp_group_size=2"], {1: [3], 3: [1]}),
    ),
)
def test_the_rank_whose_weights_differ_is_named(
    processes: int, strategy: list[str], named: dict[int, list[int]], tmp_path: Path
) -> None:
    flags = ["num_steps=6", "replica_check_interval=2", "checkpoint_interval=2", "batch_size=1", *strategy]
    good, bad = train_each(
        [
            ([*flags, save(tmp_path, "good")], []),
            ([*flags, save(tmp_path, "bad")], [(1, "flip_weight_bit", 3)]),
        ],
        processes,
    )
    assert {each.status for each in good} == {0} and {each.status for each in bad} == {1}
    assert "error: step 4" in bad[0].stderr
    lines = [line for line in bad[0].stderr.splitlines() if line.startswith("  rank")]
    for line, (rank, others) in zip(lines, named.items(), strict=True):
        assert line.startswith(f"  rank {rank} on ")
        assert line.endswith(f"differs from rank {', '.join(map(str, others))}")
    # What was found wrong is not saved.
    assert [path.name for path in (tmp_path / "bad" / "checkpoints").iterdir()] == ["step_2_ckp"]
