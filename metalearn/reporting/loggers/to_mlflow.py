"""MLflow: by default a database in the run folder; elsewhere only where the config or MLFLOW_TRACKING_URI says so."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metalearn.config.values import Config
from metalearn.reporting.loggers.protocol import (
    OpenLogger,
    Picture,
    Sent,
    Values,
    Window,
    as_yaml,
    flat,
    opened,
    run_name,
)

DATABASE = "mlflow.db"

_LONGEST_PARAM = 500
"""The most characters of a parameter's value that every store of MLflow takes."""
_MOST_PARAMS = 100
"""The most parameters in one call."""


def mlflow_logger(experiment: str, uri: str | None) -> OpenLogger:
    """A run of the experiment.

    Args:
        experiment: its name.
        uri: of the tracking server or database; None: what MLFLOW_TRACKING_URI says, else `mlflow.db` in the run
            folder. MLflow has given up its stores of plain files.
    """

    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI")
    return lambda folder, window: opened("mlflow", lambda: _MlflowRun(folder, window, experiment, chosen))


class _MlflowRun:
    def __init__(self, folder: Path, window: Window, experiment: str, uri: str | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient, entities  # takes seconds

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._entities: Any = entities
        home = folder.resolve()
        self._client: Any = MlflowClient(tracking_uri=uri or f"sqlite:///{home / DATABASE}")
        self._status, self._steps = "KILLED", window.steps  # killed, unless a result comes
        self._sent = Sent(folder / "mlflow.json")
        self._is_new = self._sent.id is None
        if self._sent.id is None:
            artifacts = None if uri else (home / "mlartifacts").as_uri()
            old = self._client.get_experiment_by_name(experiment)
            number = old.experiment_id if old else self._client.create_experiment(experiment, artifacts)
            self._sent.keep(self._client.create_run(number, run_name=run_name(folder)).info.run_id)
        else:
            self._client.update_run(self._sent.id, status="RUNNING")

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        if not self._is_new:
            return  # the parameters of a run cannot be changed
        texts = [(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(config).items()]
        params = [self._entities.Param(name, text) for name, text in texts]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._sent.id, params=params[first : first + _MOST_PARAMS])
        self._client.log_text(self._sent.id, as_yaml(config), "config.yaml")
        for name, picture in pictures.items():
            self._client.log_image(self._sent.id, picture, f"episodes/{name}.png")

    def scalars(self, step: int, split: str, values: Values) -> None:
        if self._sent.claim(split, step):
            self._log({f"{split}/{name}": value for name, value in values.items()}, step)

    def result(self, config: Config, figures: Values) -> None:
        if self._sent.claim("result", self._steps):
            self._log(figures, self._steps)
        self._status = "FINISHED"

    def close(self) -> None:
        self._client.set_terminated(self._sent.id, self._status)

    def _log(self, values: Values, step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._sent.id, metrics=metrics)
