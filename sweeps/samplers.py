"""Samplers: where the next trial's parameters come from.

A sampler is made again for every trial, from seed and number: a seeded Optuna sampler that is made once repeats its
first draws after every restart.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from sweeps.islands import Islands, suggest
from sweeps.space import Category, Number, Params, Space
from sweeps.study import Study, values_of

SamplerOf = Callable[[int], BaseSampler]


def sampler_of(name: str, seed: int, study: Study, islands: Islands) -> SamplerOf:
    """From a trial's number to its sampler."""

    def make(number: int) -> BaseSampler:
        own = seed * 1_000_003 + number
        if name == "islands":
            return _IslandsSampler(study, islands)
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=own, constant_liar=True, n_startup_trials=10)
        if name == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=own)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=own)
        return optuna.samplers.RandomSampler(seed=own)

    return make


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


class _IslandsSampler(BaseSampler):
    """Hands Optuna the parameters that `sweeps.islands` breeds for a trial's number."""

    def __init__(self, study: Study, settings: Islands) -> None:
        self._study, self._settings = study, settings

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._study.distributions)

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(suggest(trial.number, self._study.losses(), self._study.space, self._settings))

    def sample_independent(self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise AssertionError("islands breed all parameters together")
