"""Settings of a sweep, and a sweep of a few trials in real processes, as the tests need them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from optuna.samplers import BaseSampler, RandomSampler

from hydra_async_sweeper.controller import SweepController
from hydra_async_sweeper.settings import SweeperSettings, settings_of
from hydra_async_sweeper.slots import TrialSlots
from hydra_async_sweeper.space import Category, Dimension, Number, Space
from hydra_async_sweeper.study import Search, Study
from hydra_async_sweeper.trials import StartedTrial
from hydra_plugins.async_sweeper import AsyncSweeperConf, PbtSweeperConf

Work = Callable[[int, Sequence[str]], Any]

LINE: Space = {"lr": Number(0.0, 1.0)}


def contains(dimension: Dimension, value: Any) -> bool:
    """Whether a value is one of the dimension's."""
    if isinstance(dimension, Category):
        return value in dimension.options
    return dimension.low <= value <= dimension.high and (isinstance(value, int) or not dimension.whole)


def settings(
    space: Space, objective: str | None = None, maximized: Sequence[str] = (), *, pbt: bool = False, **keys: Any
) -> SweeperSettings:
    """The settings that these keys below `hydra.sweeper` describe."""
    conf = OmegaConf.structured(PbtSweeperConf if pbt else AsyncSweeperConf)
    return settings_of(OmegaConf.merge(conf, keys), space, objective, maximized)  # type: ignore[arg-type]


def completed(number: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    return {"status": "COMPLETED", "value": {"status": "completed", "exit": 0, "val": {"mse": float(number)}}}


def drawn(number: int) -> tuple[BaseSampler, None]:
    return RandomSampler(seed=number), None


@contextmanager
def controller(
    folder: Path,
    work: Work,
    count: int = 3,
    *,
    n_jobs: int = 1,
    max_retries: int = 0,
    choose: Search = drawn,
    overrides_of: Callable[[StartedTrial], list[str]] = lambda trial: [],
    record: Callable[[], None] = lambda: None,
) -> Iterator[tuple[SweepController, Study]]:
    """A sweep of a few trials."""
    slots = TrialSlots(work, folder / "logs")
    study = Study(folder / "study.journal", "s", LINE, ["minimize"], {})
    study.enqueue(count)
    chosen = settings(LINE, n_trials=count, n_jobs=n_jobs, max_retries=max_retries, objective="val.mse")
    try:
        yield SweepController(
            study, slots, chosen, overrides_of=overrides_of, search=choose, watch=None, record=record
        ), study  # fmt: skip
    finally:
        slots.close()
        study.close()
