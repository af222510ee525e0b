"""Samplers: where the next trial's parameters come from.

A sampler is made again for every trial, from seed and number: a seeded Optuna sampler that is made once repeats its
first draws after every restart.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from sweeps.islands import suggest
from sweeps.population import Decision, Population, decide
from sweeps.settings import Settings
from sweeps.space import Category, Number, Params, Space
from sweeps.study import Study, values_of


class Search(NamedTuple):
    """What the controller asks of a way to search, by the number of a trial.

    `is_ready` tells whether a trial can start yet; `sampler_of` gives its parameters; `parent_of` is the trial whose
    checkpoint it goes on from. With `repeats`, equal parameters may have other values, so no value is copied.
    """

    sampler_of: Callable[[int], BaseSampler]
    is_ready: Callable[[int], bool] = lambda number: True
    parent_of: Callable[[int], int | None] = lambda number: None
    repeats: bool = False


def search_of(study: Study, chosen: Settings) -> Search:
    """The search that the settings ask for."""
    if chosen.population is not None:
        return _population_search(study, chosen.population)
    return Search(partial(_sampler, study, chosen))


def _population_search(study: Study, settings: Population) -> Search:
    def decision(number: int) -> Decision | None:
        return decide(number, study.losses(), study.space, settings)

    def parent_of(number: int) -> int | None:
        found = decision(number)
        return None if found is None else found.parent

    def params_of(number: int) -> Params:
        found = decision(number)
        assert found is not None
        return found.params

    return Search(
        lambda number: _Chosen(study, params_of), lambda number: decision(number) is not None, parent_of, repeats=True
    )


def _sampler(study: Study, chosen: Settings, number: int) -> BaseSampler:
    own = chosen.seed * 1_000_003 + number
    if chosen.sampler == "islands":
        return _Chosen(study, lambda number: suggest(number, study.losses(), study.space, chosen.islands))
    if chosen.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=own, constant_liar=True, n_startup_trials=10)
    if chosen.sampler == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=own)
    if chosen.sampler == "gp":
        return optuna.samplers.GPSampler(seed=own)
    return optuna.samplers.RandomSampler(seed=own)


def pruner_of(name: str) -> optuna.pruners.BasePruner | None:
    """The pruner of that name; None for `none`."""
    if name == "median":
        return optuna.pruners.MedianPruner()
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner()
    return None


def combinations(space: Space) -> list[Params]:
    """Every combination of a space whose values can be counted, the last dimension changing fastest."""
    values: list[Sequence[Any]] = []
    for dimension in space.values():
        if isinstance(dimension, Category):
            values.append(dimension.options)
        elif dimension.step is not None:
            values.append(values_of(dimension))
        else:
            values.append(values_of(Number(dimension.low, dimension.high, step=1, whole=True)))
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


class _Chosen(BaseSampler):
    """Hands Optuna the parameters that a function chooses for a trial's number, all together."""

    def __init__(self, study: Study, params_of: Callable[[int], Params]) -> None:
        self._study, self._params_of = study, params_of

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._study.distributions)

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(self._params_of(trial.number))

    def sample_independent(self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise AssertionError("all parameters are chosen together")
