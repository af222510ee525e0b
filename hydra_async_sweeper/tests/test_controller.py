"""The controller with real processes as trials: what it does when a signal stops one of them, or the sweep."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import RandomSampler

from hydra_async_sweeper.controller import SweepController, TrialLimits
from hydra_async_sweeper.report import SweepView
from hydra_async_sweeper.samplers import ParamChoice, SearchMethod
from hydra_async_sweeper.slots import TrialSlots
from hydra_async_sweeper.space import Number, Space
from hydra_async_sweeper.study import Study
from hydra_async_sweeper.terms import StartedTrial

SPACE: Space = {"lr": Number(0.0, 1.0)}


@contextmanager
def controller(
    folder: Path,
    work: Callable[[int, Sequence[str]], Any],
    *,
    choose: Callable[[int], ParamChoice] = lambda number: ParamChoice(RandomSampler(seed=number)),
    overrides_of: Callable[[StartedTrial], list[str]] = lambda trial: [],
) -> Iterator[tuple[SweepController, Study]]:
    """A sweep of two trials, one at a time."""
    slots = TrialSlots(work, folder / "logs")
    study = Study(folder / "study.journal", "s", SPACE, ["minimize"], {})
    study.enqueue(2)
    try:
        yield SweepController(
            study, slots, overrides_of=overrides_of, search=SearchMethod(choose), objective=["val.mse"],
            limits=TrialLimits(1, 1, True), watch=None, view=SweepView(2, ["val.mse"], ["minimize"], 1),
            record=lambda: None,
        ), study  # fmt: skip
    finally:
        slots.close()
        study.close()


def completed(number: int) -> dict[str, Any]:
    return {"status": "COMPLETED", "value": {"status": "completed", "exit": 0, "val": {"mse": float(number)}}}


def test_a_trial_that_a_signal_has_stopped_alone_is_run_again(tmp_path: Path) -> None:
    def work(number: int, overrides: Sequence[str]) -> Any:
        first = tmp_path / f"first{number}"
        if number == 1 and not first.exists():
            first.touch()
            return {"status": "COMPLETED", "value": {"status": "stopped", "exit": 143}}
        return completed(number)

    with controller(tmp_path, work) as (sweep, study):
        assert sweep.run() == 0
        assert [(trial.number, trial.values) for trial in study.finished()] == [(0, (0.0,)), (1, (1.0,))]


def test_a_stop_while_parameters_are_drawn_starts_no_trial(tmp_path: Path) -> None:
    def choose(number: int) -> ParamChoice:
        os.kill(os.getpid(), signal.SIGTERM)
        return ParamChoice(RandomSampler(seed=number))

    with controller(tmp_path, lambda number, overrides: completed(number), choose=choose) as (sweep, study):
        assert sweep.run() == signal.SIGTERM
        assert study.interrupted() == [0] and study.waiting() == [1]
        assert not list((tmp_path / "logs").iterdir())


def test_a_stop_while_a_trial_starts_stops_it(tmp_path: Path) -> None:
    def overrides_of(trial: StartedTrial) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    def work(number: int, overrides: Sequence[str]) -> Any:
        time.sleep(60)
        return completed(number)

    with controller(tmp_path, work, overrides_of=overrides_of) as (sweep, study):
        began = time.monotonic()
        assert sweep.run() == signal.SIGTERM
        assert time.monotonic() - began < 30 and study.interrupted() == [0]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A controller gives the signals back to whoever had them."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
