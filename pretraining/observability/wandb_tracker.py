"""The Weights & Biases tracker (extra `wandb`), which sends reports through W&B's own process.

All starts of a run share one W&B run. W&B drops values of a smaller step than the last one, but a resume or rollback
reports steps again. So `step` is an ordinary value and the axis of all curves, and later points are drawn over earlier
ones.

If the server does not answer at the start, or the user is not logged in, the run stays in a folder for `wandb sync`.
WANDB_MODE=offline has the same effect. A server that refuses the user is an error.

W&B's own environment and settings files (`wandb/settings`) come before this project's defaults, which are passed on
only where W&B knows nothing else.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretraining.errors import ConfigError
from pretraining.observability.report_file import describe_failure
from pretraining.observability.trackers import TrackedRun, plain_settings

log = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
"""Maximum wait for the server at the start, below `START_SECONDS`."""
SEND_SECONDS = 50.0
"""Maximum wait at the end for reports to be sent; unsent reports stay in the folder."""


REFUSED = re.compile(r"\b40[13]\b|permission", re.IGNORECASE)
"""Words of W&B when its server refuses the user."""
OWN_SETTINGS = ("project", "run_name", "run_id")
"""W&B's settings of a run's names."""


class Wandb:
    """A run of Weights & Biases.

    Raises:
        ConfigError: the server refuses the user.
        UsageError: W&B refuses a name.
        ConnectionError: W&B's process cannot be started.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # here: the import takes a second

        own_folder = os.environ.get("WANDB_DIR") if run.config.report.tracker_dir is None else None
        folder = Path(own_folder or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        package: Any = wandb  # mypy gives the same result without the package
        own = _own_settings(package)
        self.run_id = run.run_id or own.get("run_id") or secrets.token_hex(8)
        # console="off": W&B does not capture the output, which the run's own log has.
        settings = {"init_timeout": ANSWER_SECONDS, "finish_timeout": SEND_SECONDS, "console": "off"}
        init = partial(
            package.init,
            **_names(run, own, self.run_id),
            reinit="create_new",
            dir=str(folder),
            config=plain_settings(run.config),
            allow_val_change=True,  # a resumed run may have other settings
            settings=package.Settings(
                **{name: value for name, value in settings.items() if f"WANDB_{name.upper()}" not in os.environ}
            ),
        )
        try:
            self._run = init()
        except Exception as reason:  # network, login or process errors of many types, none of which stops the run
            package.teardown()  # otherwise W&B's process keeps the id of the failed start
            if REFUSED.search(str(reason)):
                raise ConfigError(
                    f"--tracker=wandb: the server refuses this user ({describe_failure(reason)}). Log in as one who "
                    "may write there (`wandb login`, WANDB_API_KEY), name another project (--tracker_project_name, "
                    "WANDB_ENTITY), or set WANDB_MODE=offline"
                ) from reason
            try:
                self._run = init(mode="offline")
            except package.errors.UsageError:
                raise
            except Exception as error:
                raise ConnectionError(describe_failure(error)) from error
            why, place = describe_failure(reason), folder / "wandb"
            log.warning("--tracker=wandb: offline (%s). `wandb sync` sends the run from %s", why, place)
        places = {name: getattr(self._run, name, None) for name in ("project", "entity")}
        self.places = {name: text for name, text in places.items() if isinstance(text, str) and text}
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log a row of values."""
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def close(self) -> None:
        """Wait up to `SEND_SECONDS` and finish the run, as failed if an exception is being handled."""
        self._run.finish(exit_code=0 if sys.exception() is None else 1)


def _own_settings(package: Any) -> dict[str, str]:
    """Return project, name and id of a run in W&B's environment and settings files."""
    with suppress(Exception):  # settings that W&B does not accept: its start says so
        read = package.setup().settings
        return {name: text for name in OWN_SETTINGS if isinstance(text := getattr(read, name, None), str) and text}
    return {}


def _names(run: TrackedRun, own: dict[str, str], run_id: str) -> dict[str, str]:
    """Return the arguments of W&B's `init` that name the run; W&B itself reads its own settings."""
    names = dict(run.given)
    if run.run_id is not None or "run_id" not in own:
        names["id"] = run_id
    if run.is_resumed or "WANDB_RESUME" not in os.environ:
        names["resume"] = "allow"
    if "project" not in own:
        names.setdefault("project", run.project)
    if "run_name" not in own and not run.is_resumed:  # a resumed run keeps its name
        names.setdefault("name", run.name)
    return names
