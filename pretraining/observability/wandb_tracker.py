"""Reports for Weights & Biases (extra `wandb`), whose own process sends them.

All starts of a run are one run there, by its id. W&B drops what comes with a smaller step than it has seen; but a
resume and a rollback report steps again. So `step` is a value like others, the axis of all curves, and what comes later
is drawn over what came before.

If its server does not answer at the start, or nobody is logged in, the run is kept in a folder, which `wandb sync`
sends later; WANDB_MODE=offline asks for the same.
"""

from __future__ import annotations

import logging
import secrets
import sys
from functools import partial
from typing import Any

from pretraining.observability.report_file import describe_failure
from pretraining.observability.trackers import TrackedRun, plain_settings

log = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
"""How long to wait for the server at the start: less than the run waits for a tracker."""
SEND_SECONDS = 50.0
"""How long to wait at the end until all is sent; the rest stays in the folder."""


class Wandb:
    """A run of Weights & Biases.

    Raises:
        UsageError: W&B refuses a name.
        ConnectionError: its process cannot be started.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # only if it is chosen: it takes a second

        self.run_id = run.run_id or secrets.token_hex(8)
        run.folder.mkdir(parents=True, exist_ok=True)
        package: Any = wandb  # mypy says the same with and without it
        init = partial(
            package.init,
            project=run.project,
            name=run.name,
            id=self.run_id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=plain_settings(run.config),
            allow_val_change=True,  # a resumed run may have other settings
            # Output stays as it is (console): it would be passed through W&B, and is in the run's own log anyway.
            settings=package.Settings(init_timeout=ANSWER_SECONDS, finish_timeout=SEND_SECONDS, console="off"),
        )
        try:
            self._run = init()
        except Exception as reason:  # of the network, of logging in, of its process: many kinds, none a reason to stop
            package.teardown()  # its process holds the id for the start that has failed
            try:
                self._run = init(mode="offline")
            except package.errors.UsageError:
                raise
            except Exception as error:
                raise ConnectionError(describe_failure(error)) from error
            why, folder = describe_failure(reason), run.folder / "wandb"
            log.warning("--tracker=wandb: no answer (%s): `wandb sync` sends the run from %s", why, folder)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add a row."""
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def close(self) -> None:
        """Wait until all is sent, for a while, and end the run: as failed, if an error is ending the training."""
        self._run.finish(exit_code=0 if sys.exception() is None else 1)
