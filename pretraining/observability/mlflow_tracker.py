"""Reports for MLflow (extra `mlflow`): in a SQLite file of the run's folder, or on the server of MLFLOW_TRACKING_URI.

All starts of a run are one run there, by its id. A resume and a rollback report steps again: MLflow keeps both points.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pretraining.observability.trackers import TrackedRun, plain_settings

log = logging.getLogger(__name__)

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
MOST_PARAMETERS = 100
"""In one request, and..."""
LONGEST_PARAMETER = 6000
"""...characters of each, as MLflow allows."""
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Unless the environment says otherwise: a server that is away is tried again anyway, and nobody else is called."""


class MLflow:
    """A run of MLflow.

    Raises:
        MlflowException: MLflow refuses MLFLOW_TRACKING_URI, such as a folder.
    """

    def __init__(self, run: TrackedRun) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient, entities, exceptions  # only if it is chosen: it takes seconds

        self._entities, self._error = entities, exceptions.MlflowException
        self._tracked = run
        self._folder = run.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=self._server or f"sqlite:///{self._folder / DATABASE}")
        self.run_id = run.run_id
        self._is_open = False
        with suppress(Exception):  # of a server, a proxy, a database; the first report says why
            self._open_run()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send a report; a ConnectionError if the store does not take it."""
        now = round(time.time() * 1000)
        known = [(name, float(value)) for name, value in values.items() if value is not None]
        with self._retried():
            self._open_run()
            metrics = [self._entities.Metric(name, value, now, step) for name, value in known]
            self._client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """End the run: as failed, if an error is ending the training."""
        with self._retried():
            self._open_run()
            self._client.set_terminated(self.run_id, "FINISHED" if sys.exception() is None else "FAILED")

    @contextmanager
    def _retried(self) -> Iterator[None]:
        """Turn what MLflow raises into a ConnectionError, after which a report waits and is sent again."""
        try:
            yield
        except self._error as error:
            raise ConnectionError(f"MLflow: {error}") from error

    def _open_run(self) -> None:
        """Continue the run, or make one with the settings as parameters; do nothing the next time."""
        if self._is_open:
            return
        if self.run_id is None or not self._continues(self.run_id):
            self._make_run()
        self._is_open = True

    def _make_run(self) -> None:
        experiment = self._client.get_experiment_by_name(self._tracked.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            place = None if self._server else (self._folder / ARTIFACTS).as_uri()
            experiment_id = self._client.create_experiment(self._tracked.project, artifact_location=place)
        self.run_id = self._client.create_run(experiment_id, run_name=self._tracked.name).info.run_id
        settings = plain_settings(self._tracked.config)
        parameters = [self._entities.Param(name, str(value)[:LONGEST_PARAMETER]) for name, value in settings.items()]
        for begin in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[begin : begin + MOST_PARAMETERS])

    def _continues(self, run_id: str) -> bool:
        """Resume a run; False if the store does not know it."""
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._error as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            log.warning("--tracker=mlflow: there is no run %s: a new one begins", run_id)
            return False
        return True
