"""A start in parts: `complete` and `plan_run` have no effect but their result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_runs import TINY
from unit.train.whole_runs import start

from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.read import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import join_processes
from pretraining.launch.layout import resolve_layout
from pretraining.train.complete import complete
from pretraining.train.job import Job
from pretraining.train.opening import Opened, open_run
from pretraining.train.plan import Plan, plan_run

FLAGS = [*TINY, "use_dummy_dataset=true", "num_steps=4", "held_out_fraction=0.2", "eval_batches=1"]


@pytest.fixture
def resumed(tmp_path: Path) -> Iterator[tuple[TrainConfig, CheckpointRef | None, Job]]:
    """A run of 4 steps that has stopped at step 2, in an open job."""
    start(tmp_path / "run", *FLAGS, "run_steps=2")
    given = load_train_config([*FLAGS, f"ckpt_save_path={tmp_path / 'run'}"])
    with join_processes(resolve_layout({})) as processes:
        yield given, find_start(given.checkpoint), Job(processes)


def decisions(plan: Plan) -> tuple[object, ...]:
    rates = [plan.learning_rate.at(step, 1.0) for step in range(5)]
    evaluation = (plan.evaluation.record, plan.evaluation.loss, plan.evaluation.notes)
    return plan.state, plan.batch, rates, plan.loader.state_dict(), plan.loads_optimizer, *evaluation


def surroundings(folder: Path, opened: Opened) -> tuple[object, ...]:
    files = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}
    activity = vars(opened.processes.activity).copy()
    return files, dict(os.environ), torch.get_num_threads(), torch.get_rng_state().tolist(), activity


def test_a_plan_changes_nothing_so_the_same_start_has_the_same_plan(
    resumed: tuple[TrainConfig, CheckpointRef | None, Job], tmp_path: Path
) -> None:
    given, found, job = resumed
    config = complete(given, found)
    opened = open_run(config, found, job)
    before = surroundings(tmp_path, opened)
    first, second = (decisions(plan_run(found, opened)) for _ in range(2))
    assert first == second
    assert surroundings(tmp_path, opened) == before


def test_complete_settings_stay_as_they_are_and_what_is_open_for_them_serves_again(
    resumed: tuple[TrainConfig, CheckpointRef | None, Job],
) -> None:
    given, found, job = resumed
    config = complete(given, found)
    assert complete(config, found) == config
    opened = open_run(config, found, job)
    assert open_run(complete(given, found), found, job, opened) is opened
