"""Samplers: where the next trial's parameters come from.

A sampler is made again for every trial, from seed and number: a seeded Optuna sampler that is made once repeats its
first draws after every restart.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from hydra_async_sweeper.islands import suggest
from hydra_async_sweeper.population import decide
from hydra_async_sweeper.settings import SweeperSettings
from hydra_async_sweeper.space import Category, Params, Space, with_step
from hydra_async_sweeper.study import Study, values_of, without_experimental_warnings


class ParamChoice(NamedTuple):
    """A trial's parameters, as a sampler that gives them; and the trial whose checkpoint it goes on from."""

    sampler: BaseSampler
    parent: int | None = None


class SearchMethod(NamedTuple):
    """A way to search. `choose` is asked by a trial's number; None: what decides the trial is not known yet.

    With `repeats`, equal parameters may have other values, so no value is copied.
    """

    choose: Callable[[int], ParamChoice | None]
    repeats: bool = False


def search_of(study: Study, chosen: SweeperSettings) -> SearchMethod:
    """The search that the settings ask for."""
    population = chosen.population
    if population is None:
        return SearchMethod(lambda number: ParamChoice(_sampler(study, chosen, number)))

    def choose(number: int) -> ParamChoice | None:
        decision = decide(number, study.losses(), study.space, population)
        return None if decision is None else ParamChoice(_Chosen(study, decision.params), decision.parent)

    return SearchMethod(choose, repeats=True)


@without_experimental_warnings()
def _sampler(study: Study, chosen: SweeperSettings, number: int) -> BaseSampler:
    own = (chosen.seed * 1_000_003 + number) % 2**32  # what numpy takes
    if chosen.sampler == "islands":
        return _Chosen(study, suggest(number, study.losses(), study.space, chosen.islands))
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
    values: list[Sequence[Any]] = [
        dimension.options if isinstance(dimension, Category) else values_of(with_step(dimension))
        for dimension in space.values()
    ]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


class _Chosen(BaseSampler):
    """Hands Optuna parameters that are chosen already, all together."""

    def __init__(self, study: Study, params: Params) -> None:
        self._study, self._params = study, params

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._study.distributions)

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(self._params)

    def sample_independent(self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise AssertionError("all parameters are chosen together")
