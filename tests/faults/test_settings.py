"""Recipes on the nodes' own disks that differ: row 45 of docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.forked_job import Ended, run_job
from tiers import first_quick

FLAGS = ["recipe=recipe.yaml", "num_steps=2", "checkpoint_interval=0"]


def run_with_recipes(tmp_path: Path, recipes: list[str]) -> list[Ended]:
    """Trains with a recipe for each rank, in the working folder of the rank."""
    for rank, recipe in enumerate(recipes):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "recipe.yaml").write_text(recipe)
    flags = [*FLAGS, f"ckpt_save_path={tmp_path / 'run'}"]
    return run_job([flags], fault=("work_in_own_folder", str(tmp_path)), check=False)


@pytest.mark.parametrize(
    ("name", "values"),
    first_quick(
        ("adam_beta2", ("0.95", "0.999")),  # these would train on
        ("skip_samples", ("[]", "[0-3]")),
        ("sharding_strategy", ("fsdp", "ddp")),  # this would hang
        ("tokenizer_path", ("null", "tokenizer.json")),  # paths may differ, but not whether there is one
    ),
)
def test_different_settings_are_one_error_that_names_ranks_and_values(
    name: str, values: tuple[str, str], tmp_path: Path
) -> None:
    ended = run_with_recipes(tmp_path, [f"{name}: {value}" for value in values])
    assert [process.status for process in ended] == [1, 1]
    said = "".join(process.output for process in ended)
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert name in error and "ranks [0]" in error and "ranks [1]" in error
    assert "learning_rate" not in error and not (tmp_path / "run").exists()


def test_paths_and_threads_may_differ(tmp_path: Path) -> None:
    own = [f"index_path: {tmp_path}/{rank}\ncpu_threads: {rank}" for rank in (1, 2)]
    ended = run_with_recipes(tmp_path, own)
    assert [process.status for process in ended] == [0, 0]
