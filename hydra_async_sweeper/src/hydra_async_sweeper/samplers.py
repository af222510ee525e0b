"""Samplers: where the next trial's parameters come from.

A sampler is made again for every trial, from seed and number: a seeded Optuna sampler that is made once repeats its
first draws after every restart.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from hydra_async_sweeper.islands import fold, offspring
from hydra_async_sweeper.population import decide
from hydra_async_sweeper.settings import SweeperSettings
from hydra_async_sweeper.space import Params
from hydra_async_sweeper.study import Study, without_experimental_warnings

PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner | None]] = {
    "none": lambda: None, "median": optuna.pruners.MedianPruner, "hyperband": optuna.pruners.HyperbandPruner,
}  # fmt: skip


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

    def decided(number: int) -> ParamChoice | None:
        assert population is not None
        decision = decide(number, study.losses(), study.space, population)
        return None if decision is None else ParamChoice(_Chosen(study, decision.params), decision.parent)

    @without_experimental_warnings()
    def sampled(number: int) -> ParamChoice:
        seed = (chosen.seed * 1_000_003 + number) % 2**32  # what numpy takes
        if chosen.sampler == "islands":
            populations = fold(study.losses(), chosen.islands)
            return ParamChoice(_Chosen(study, offspring(number, populations, study.space, chosen.islands)))
        if chosen.sampler == "tpe":
            return ParamChoice(optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=10))
        samplers: dict[str, Callable[..., BaseSampler]] = {
            "cmaes": optuna.samplers.CmaEsSampler,
            "gp": optuna.samplers.GPSampler,
        }
        return ParamChoice(samplers.get(chosen.sampler, optuna.samplers.RandomSampler)(seed=seed))

    return SearchMethod(sampled) if population is None else SearchMethod(decided, repeats=True)


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
