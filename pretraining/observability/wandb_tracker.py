"""Reports for Weights & Biases (extra `wandb`).

All starts of a run are one run there, by its id. W&B drops what comes with a smaller step than it has seen; but a
resume and a rollback report steps again. So `step` is a value like others, the axis of all curves, and what comes later
is drawn over what came before.

Sending is the work of W&B's own process. Where its server does not answer at the start, or nobody is logged in, the run
is kept in a folder, which `wandb sync` sends later; so it is with WANDB_MODE=offline.
"""

from __future__ import annotations

import logging
import secrets
import sys
from typing import Any

from pretraining.errors import ConfigError
from pretraining.observability.trackers import TrackedRun, missing_package, plain_settings

log = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
"""How long to wait for the server at the start."""
FINISH_SECONDS = 60.0
"""How long to wait at the end until all is sent; the rest stays in the folder."""


class Wandb:
    """A run of Weights & Biases.

    Raises:
        ConfigError: the package is missing, or refuses a name.
    """

    def __init__(self, run: TrackedRun) -> None:
        try:
            import wandb  # only where it is chosen: it takes a second
        except ImportError as error:
            raise missing_package("wandb", error) from None
        self._wandb: Any = wandb  # mypy says the same with and without it
        self.run_id = run.run_id or secrets.token_hex(8)
        self._run = self._start(run)
        if self._run is not None:
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def _start(self, run: TrackedRun) -> Any:
        """Starts or continues the run; None where nothing helps."""
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            return self._init(run)
        except Exception as error:  # of the network, of logging in, of its process: many kinds, none a reason to stop
            reason = error
        try:
            self._wandb.teardown()  # its process holds the id for the start that has failed
            started = self._init(run, mode="offline")
        except self._wandb.errors.UsageError as error:
            raise ConfigError(f"--tracker=wandb: {error}") from None
        except Exception as error:
            log.warning(
                "--tracker=wandb cannot be started (%s; %s): training goes on without it",
                *(_first_line(reason), _first_line(error)),
            )
            return None
        log.warning(
            "--tracker=wandb: W&B cannot be reached (%s): the run is kept in %s, and `wandb sync` sends it from there",
            *(_first_line(reason), run.folder / "wandb"),
        )
        return started

    def _init(self, run: TrackedRun, **how: str) -> Any:
        # Output stays as it is (console): it would be passed through W&B, and is in the run's own log anyway.
        settings = self._wandb.Settings(init_timeout=ANSWER_SECONDS, finish_timeout=FINISH_SECONDS, console="off")
        return self._wandb.init(
            project=run.project,
            name=run.name,
            id=self.run_id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=plain_settings(run.config),
            allow_val_change=True,  # a resumed run may have other settings
            settings=settings,
            **how,
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Adds a row; a ConnectionError where W&B does not take it."""
        if self._run is None:
            return
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._run.log({"step": step, **known})
        except Exception as error:
            raise ConnectionError(_first_line(error)) from error

    def close(self) -> None:
        """Waits until all is sent, for a while, and ends the run: as failed, where an error is ending the training."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if sys.exception() is None else 1)
        except Exception as error:
            raise ConnectionError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
