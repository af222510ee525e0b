"""What Hydra does for a run: it makes the run folder with its `.hydra`, and calls a task for each job of a multirun."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from metalearn.config.compose import CONF
from metalearn.files import writing
from metalearn.program.outcome import OK
from metalearn.runs.signals import STOPPED

_RAISE = "HYDRA_FULL_ERROR"
"""With this variable Hydra raises errors; without it, it prints a traceback and ends the process."""


def show_by_hydra() -> int:
    """Lets Hydra print what `--cfg`, `--info` and the like ask for."""
    _call(lambda config: OK)
    return OK


def run_by_hydra(task: Callable[[DictConfig], int], run_dir: Path) -> int:
    """Lets Hydra make the run folder and its `.hydra`, then call `task`; returns the task's exit code.

    Raises:
        RunError: the folder cannot be written.
    """
    codes: list[int] = []
    with _own_errors(), writing(run_dir):
        _call(lambda config: codes.append(task(config)))
    return max(codes, default=OK)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Lets errors pass through Hydra to whoever called it."""
    before = os.environ.get(_RAISE)
    os.environ[_RAISE] = "1"
    try:
        yield
    finally:
        del os.environ[_RAISE]
        if before is not None:
            os.environ[_RAISE] = before


def run_grid_by_hydra(task: Callable[[DictConfig], int]) -> int:
    """Lets one of Hydra's own sweepers call `task` for each job of a multirun; returns the largest exit code.

    A job that was stopped ends the multirun.
    """
    codes: list[int] = []

    def job(config: DictConfig) -> None:
        codes.append(task(config))
        if codes[-1] in STOPPED:
            raise SystemExit(codes[-1])  # ends the sweep, where an Exception would only fail this job
        if codes[-1] != OK:
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")

    _call(job)
    return max(codes, default=OK)


def run_trials_by_hydra(task: Callable[[DictConfig], dict[str, Any]], attributes: Mapping[str, Any]) -> None:
    """Lets the sweeper `async` call `task` for each trial; `attributes` are those that `sweeps.plan.Task` reads."""

    def trial(config: DictConfig) -> dict[str, Any]:
        return task(config)

    for name, value in attributes.items():
        setattr(trial, name, value)
    _call(trial)


def _call(task: Callable[[DictConfig], Any]) -> None:
    import hydra

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
