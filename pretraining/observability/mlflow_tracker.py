"""The MLflow tracker (extra `mlflow`), with a SQLite file in the run's folder or the server of MLFLOW_TRACKING_URI.

Experiment and run are those of the flags, of an earlier start, or of MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID and
MLFLOW_RUN_ID. All starts of a run share one MLflow run. After a resume or rollback, MLflow keeps old and new points of
a step.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pretraining.errors import ConfigError
from pretraining.observability.report_file import describe_failure
from pretraining.observability.trackers import TrackedRun, plain_settings

log = logging.getLogger(__name__)

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
MAX_NAME = 250
"""MLflow's limit of a name's length."""
REFUSED = "INVALID_PARAMETER_VALUE"
"""MLflow's error code for names and values that it does not take."""
FINAL = {
    REFUSED,
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "ENDPOINT_NOT_FOUND",
    "BAD_REQUEST",
    "FEATURE_DISABLED",
}
"""Error codes of a start that would come again at each report."""
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults of environment variables: few retries, because the tracker's queue retries too, and no telemetry."""


def allowed_names(names: Iterable[str]) -> list[str]:
    """Return names that MLflow takes: other characters become underscores, and equal results get an ending.

    MLflow takes letters, digits and `/ _ - . :` and blanks, and slashes as in a plain relative path.
    """
    taken: list[str] = []
    for name in names:
        allowed = re.sub(r"[^/\w.\- :]", "_", name)[: MAX_NAME - 8]
        if posixpath.normpath(allowed) != allowed or allowed.startswith(("..", "/")) or allowed == ".":
            allowed = re.sub(r"^\.+$|/", "_", allowed)
        while allowed in taken:
            allowed += "_2"
        taken.append(allowed)
    return taken


class MLflow:
    """A run of MLflow.

    Raises:
        MlflowException: MLflow refuses MLFLOW_TRACKING_URI, such as a folder.
        ConfigError: the experiment is deleted, the server refuses the user, or the file of the run is damaged.
    """

    def __init__(self, run: TrackedRun) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient, entities, exceptions  # here: the import takes seconds

        self._entities, self._error = entities, exceptions.MlflowException
        self._tracked = run
        self._folder = run.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=self._server or f"sqlite:///{self._folder / DATABASE}")
        self.run_id = run.run_id or os.environ.get("MLFLOW_RUN_ID") or None
        self._is_open = False
        self._left_out: set[str] = set()
        try:
            self._open_run()
        except Exception as error:  # unless it is final, the first report tries again and warns
            if getattr(error, "error_code", "") in FINAL or (self._server is None and "locked" not in str(error)):
                raise ConfigError(
                    f"--tracker=mlflow cannot write to {self._server or self._folder / DATABASE}: "
                    f"{describe_failure(error)}. Give its user the right, set another MLFLOW_TRACKING_URI or "
                    "--tracker_project_name, or leave mlflow out of --tracker"
                ) from error

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send a report; raise a ConnectionError if MLflow fails, unless it refuses this report."""
        now = round(time.time() * 1000)
        known = {name: float(value) for name, value in values.items() if value is not None}
        with self._connection_errors():
            self._open_run()
            named = zip(allowed_names(known), known.values(), strict=True)
            metrics = [self._entities.Metric(name, value, now, step) for name, value in named]
            self._send([metric for metric in metrics if metric.key not in self._left_out])

    def _send(self, metrics: list[Any]) -> None:
        """Send metrics; leave those out from now on that MLflow does not take while it takes others.

        A store of files takes no `loss/web` after `loss`, and would hold back all later reports.
        """
        try:
            self._client.log_batch(self.run_id, metrics=metrics)
        except self._error as error:
            if error.error_code == REFUSED:
                raise
            self._client.get_run(self.run_id)  # fails if the service is away
            failed: dict[str, str] = {}
            for metric in metrics:
                try:
                    self._client.log_batch(self.run_id, metrics=[metric])
                except self._error as reason:
                    failed[metric.key] = describe_failure(reason)
            if len(failed) == len(metrics):
                raise
            self._left_out |= failed.keys()
            for name, failure in failed.items():
                log.warning("--tracker=mlflow leaves out %s: %s", name, failure)

    def close(self) -> None:
        """Finish the run, as failed if an exception is being handled."""
        with self._connection_errors():
            self._open_run()
            self._client.set_terminated(self.run_id, "FINISHED" if sys.exception() is None else "FAILED")

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Turn MLflow's errors into ConnectionErrors, after which the queue sends the report again."""
        try:
            yield
        except self._error as error:
            if error.error_code == REFUSED:
                raise
            raise ConnectionError(f"MLflow: {error}") from error

    def _open_run(self) -> None:
        """Resume the run, or make one with the settings as parameters, if this has not succeeded yet."""
        if self._is_open:
            return
        if self.run_id is None or not self._resume_run(self.run_id):
            made = self._client.create_run(self._experiment(), run_name=self._tracked.name)
            self.run_id = made.info.run_id
            settings = plain_settings(self._tracked.config)
            parameters = [self._entities.Param(name, str(value)) for name, value in settings.items()]
            self._client.log_batch(self.run_id, params=parameters)
        self._is_open = True

    def _experiment(self) -> str:
        """Return the id of the experiment, which is made if there is none of its name."""
        name = self._tracked.given.get("project") or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name = name or self._tracked.project
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            location = None if self._server else (self._folder / ARTIFACTS).as_uri()
            return str(self._client.create_experiment(name, artifact_location=location))
        return str(experiment.experiment_id)

    def _resume_run(self, run_id: str) -> bool:
        """Resume a run; return False if MLflow does not know it."""
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._error as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", REFUSED):
                raise
            log.warning("--tracker=mlflow: run %s does not exist: starting a new MLflow run", run_id)
            return False
        return True
