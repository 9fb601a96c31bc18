"""The Weights & Biases tracker (extra `wandb`), which sends reports through W&B's own process.

All starts of a run share one W&B run. W&B drops values of a smaller step than the last one, but a resume or rollback
reports steps again. So `step` is an ordinary value and the axis of all curves, and later points are drawn over earlier
ones.

If the server does not answer at the start, or the user is not logged in, the run stays in a folder for `wandb sync`.
WANDB_MODE=offline has the same effect.
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
"""Maximum wait for the server at the start, below `START_SECONDS`."""
SEND_SECONDS = 50.0
"""Maximum wait at the end for reports to be sent; unsent reports stay in the folder."""


class Wandb:
    """A run of Weights & Biases.

    Raises:
        UsageError: W&B refuses a name.
        ConnectionError: W&B's process cannot be started.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # here: the import takes a second

        self.run_id = run.run_id or secrets.token_hex(8)
        run.folder.mkdir(parents=True, exist_ok=True)
        package: Any = wandb  # mypy gives the same result without the package
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
            # console="off": W&B does not capture the output, which the run's own log has.
            settings=package.Settings(init_timeout=ANSWER_SECONDS, finish_timeout=SEND_SECONDS, console="off"),
        )
        try:
            self._run = init()
        except Exception as reason:  # network, login or process errors of many types, none of which stops the run
            package.teardown()  # otherwise W&B's process keeps the id of the failed start
            try:
                self._run = init(mode="offline")
            except package.errors.UsageError:
                raise
            except Exception as error:
                raise ConnectionError(describe_failure(error)) from error
            why, folder = describe_failure(reason), run.folder / "wandb"
            log.warning("--tracker=wandb: offline (%s). `wandb sync` sends the run from %s", why, folder)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log a row of values."""
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def close(self) -> None:
        """Wait up to `SEND_SECONDS` and finish the run, as failed if an exception is being handled."""
        self._run.finish(exit_code=0 if sys.exception() is None else 1)
