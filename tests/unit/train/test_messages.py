"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.training import OptimizerConfig
from pretraining.progress import Progress, TrainState
from pretraining.train.loop import Run
from pretraining.train.messages import _describe_optimizer, conclude

RUN = "/data/my runs/a"


@pytest.mark.parametrize("early_end", ["", "the loss has not fallen"])
def test_commands_to_copy_are_quoted_as_a_shell_wants_it(early_end: str) -> None:
    config = load_train_config(["use_dummy_dataset=true", f"ckpt_save_path={RUN}", "tracker=tensorboard"])
    state = TrainState(5, 5, 10, Progress(5, 50))
    state.end_early(early_end)
    run = SimpleNamespace(
        state=state,
        stopwatch=SimpleNamespace(elapsed=1.0),
        checkpoints=SimpleNamespace(newest=Path(RUN)),
        observer=SimpleNamespace(newest={"loss": 1.0}),
    )
    said = conclude(config, cast(Run, run))
    changed = "--early_stopping_evaluations=0" if early_end else "--num_steps=10"
    assert said.endswith(f"the same command with {changed} '--ckpt_save_path={RUN}'")
    assert f"tensorboard --logdir '{RUN}/logs'" in said


def test_the_start_shows_what_an_optimizer_of_the_users_own_is_called_with() -> None:
    config = OptimizerConfig(optimizer="torch.optim:SGD", momentum=0.5, optimizer_options=("dampening=0.1",))
    assert _describe_optimizer(config).startswith("torch.optim:SGD(lr=0.0003, momentum=0.5, dampening=0.1)")
