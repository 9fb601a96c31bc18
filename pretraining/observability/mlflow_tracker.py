"""Reports for MLflow (extra `mlflow`): in a SQLite file of the run's folder, or on the server of MLFLOW_TRACKING_URI.

A report that the store does not take waits, with those behind it, and the next one tries again. All starts of a run are
one run there, by its id. A resume and a rollback report steps again: MLflow keeps both points.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from pretraining.errors import ConfigError
from pretraining.observability.report_file import MOST_WAITING
from pretraining.observability.trackers import TrackedRun, missing_package, plain_settings

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
        ConfigError: the package is missing, or MLflow refuses MLFLOW_TRACKING_URI, such as a folder.
    """

    def __init__(self, run: TrackedRun) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient, entities, exceptions  # only if it is chosen: it takes seconds
        except ImportError as error:
            raise missing_package("mlflow", error) from None
        self._entities, self._exception = entities, exceptions.MlflowException
        self._tracked = run
        self._folder = run.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._server = os.environ.get("MLFLOW_TRACKING_URI")
        try:
            self._client = MlflowClient(tracking_uri=self._server or f"sqlite:///{self._folder / DATABASE}")
        except exceptions.MlflowException as error:
            raise ConfigError(f"--tracker=mlflow: MLFLOW_TRACKING_URI={self._server} is refused: {error}") from None
        self.run_id = run.run_id
        self._is_open = False
        self._waiting: deque[tuple[int, int, dict[str, float]]] = deque(maxlen=MOST_WAITING)
        self._lost = 0
        with suppress(Exception):  # of a server, a proxy, a database; the first report says why
            self._send()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send a report behind those that wait."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._lost += len(self._waiting) == MOST_WAITING
        self._waiting.append((step, round(time.time() * 1000), known))
        self._send()

    def close(self) -> None:
        """Send what waits and end the run: as failed, if an error is ending the training."""
        self._send()
        self._client.set_terminated(self.run_id, "FINISHED" if sys.exception() is None else "FAILED")

    @property
    def lacks(self) -> int:
        """Return how many reports the store does not have."""
        return self._lost + len(self._waiting)

    def _send(self) -> None:
        if not self._is_open:
            self._open_run()
            self._is_open = True
        while self._waiting:
            step, milliseconds, values = self._waiting[0]
            metrics = [self._entities.Metric(name, value, milliseconds, step) for name, value in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._waiting.popleft()

    def _open_run(self) -> None:
        """Continue the run, or make one with the settings as parameters."""
        if self.run_id is not None and self._continues(self.run_id):
            return
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
        except self._exception as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            log.warning("--tracker=mlflow: there is no run %s: a new one begins", run_id)
            return False
        return True
