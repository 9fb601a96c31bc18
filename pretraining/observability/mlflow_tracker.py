"""Reports for MLflow (extra `mlflow`): in a SQLite file of the run's folder, or on the server of MLFLOW_TRACKING_URI.

    log --> waiting reports --> a thread --> store: experiment, run, metrics; settings as parameters when the run is new

A server may take minutes to fail, so only the thread talks to the store. A report that the store does not take waits,
with those behind it, and is tried again; meanwhile `log` raises why. All starts of a run are one run there, by its id.
A resume and a rollback report steps again: MLflow keeps both points.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlparse

from pretraining.errors import ConfigError
from pretraining.observability.report_file import MOST_WAITING
from pretraining.observability.trackers import TrackedRun, missing_package, plain_settings
from pretraining.text import count_of

log = logging.getLogger(__name__)

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"

FIRST_ANSWER_SECONDS = 20.0
"""How long to wait for the store at the start, so that the first checkpoint knows the run's id."""
PAUSE_SECONDS = 30.0
"""Between two tries where the store is away."""
FINISH_SECONDS = 60.0
"""How long to wait at the end until all is written."""
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
        ConfigError: the package is missing, or MLFLOW_TRACKING_URI is a folder and MLflow takes none.
    """

    def __init__(self, run: TrackedRun) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient, entities, exceptions  # only where it is chosen: it takes seconds
        except ImportError as error:
            raise missing_package("mlflow", error) from None
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        if server and urlparse(server).scheme in ("", "file"):  # a folder, which MLflow takes at once or never
            try:
                MlflowClient(tracking_uri=server)
            except exceptions.MlflowException as error:
                raise ConfigError(f"--tracker=mlflow: MLFLOW_TRACKING_URI={server} is refused: {error}") from None
        self._make_client, self._entities, self._exception = MlflowClient, entities, exceptions.MlflowException
        self._about = run
        self.run_id = run.run_id
        self._client: Any = None  # once the run is open
        self._waiting: deque[tuple[int, int, dict[str, float]]] = deque(maxlen=MOST_WAITING)
        self._failure: str | None = None
        self._failed = False  # the training
        self._changed = threading.Condition()
        self._closing = False
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        self._answered.wait(FIRST_ANSWER_SECONDS)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hands a report to the thread; a ConnectionError where the last try has failed."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        with self._changed:
            self._waiting.append((step, round(time.time() * 1000), known))
            self._changed.notify()
        if self._failure is not None:
            raise ConnectionError(self._failure)

    def close(self) -> None:
        """Waits until all is written, for a while, and ends the run: as failed, where an error is ending the training.

        Raises:
            ConnectionError: reports are lost.
        """
        with self._changed:
            self._failed = sys.exception() is not None
            self._closing = True
            self._changed.notify()
        self._thread.join(FINISH_SECONDS)
        if self._failure is not None or self._thread.is_alive():
            raise ConnectionError(
                f"{self._failure or 'MLflow is slow'}; it lacks {count_of(len(self._waiting), 'report')}"
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._client is None)
                closing = self._closing
            try:
                self._send()
                self._failure = None
                if closing and not self._waiting:
                    self._client.set_terminated(self.run_id, "FAILED" if self._failed else "FINISHED")
                    return
            except Exception as error:  # of a server, a proxy, a database: many kinds, none a reason to stop
                self._failure = str(error).partition("\n")[0] or type(error).__name__
                if closing:  # that was the last try
                    return
            finally:
                self._answered.set()
            if self._failure is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, PAUSE_SECONDS)

    def _send(self) -> None:
        if self._client is None:
            self._client = self._open_run()
        while self._waiting:
            report = self._waiting[0]
            step, milliseconds, values = report
            metrics = [self._entities.Metric(name, value, milliseconds, step) for name, value in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)
            with self._changed:
                if self._waiting[0] is report:  # else it was too old to wait any longer
                    self._waiting.popleft()

    def _open_run(self) -> Any:
        """Continues the run, or makes one with the settings as parameters; returns the client."""
        folder = self._about.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        client = self._make_client(tracking_uri=server or f"sqlite:///{folder / DATABASE}")
        if self.run_id is not None and self._continues(client, self.run_id):
            return client
        experiment = client.get_experiment_by_name(self._about.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            place = None if server else (folder / ARTIFACTS).as_uri()
            experiment_id = client.create_experiment(self._about.project, artifact_location=place)
        self.run_id = client.create_run(experiment_id, run_name=self._about.name).info.run_id
        settings = plain_settings(self._about.config)
        parameters = [self._entities.Param(name, str(value)[:LONGEST_PARAMETER]) for name, value in settings.items()]
        for begin in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(self.run_id, params=parameters[begin : begin + MOST_PARAMETERS])
        return client

    def _continues(self, client: Any, run_id: str) -> bool:
        """Goes on with a run; False where the store does not know it."""
        try:
            client.update_run(run_id, status="RUNNING")
        except self._exception as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            log.warning("--tracker=mlflow: there is no run %s: a new one begins", run_id)
            return False
        return True
