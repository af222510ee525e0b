"""Hydra's side of the sweepers `async` and `pbt`: configs, and the calls that Hydra makes. The work is in
`hydra_async_sweeper`. Hydra finds this file below `hydra_plugins`, which must have no __init__.py."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class _Common:
    """The keys of both sweepers below `hydra.sweeper`; the README explains them."""

    n_jobs: int = 1
    objective: Any = None
    direction: Any = None
    seed: int = 0
    study_name: str = "sweep"
    storage: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    max_failure_rate: float = 0.0
    max_retries: int = 2
    warm: bool = True
    preload: list[str] = field(default_factory=list)
    plots: bool = True


@dataclass
class IslandsConf:
    """The keys below `hydra.sweeper.islands`. What is null has its default."""

    num_islands: int | None = None
    pop_size: int | None = None
    island_size: int | None = None
    migration_probability: float | None = None
    pollination: bool | None = None
    topology: list[list[int]] | None = None
    crossover: float | None = None
    mutation: float | None = None
    sigma: float | None = None
    random_init: float | None = None


@dataclass
class AsyncSweeperConf(_Common):
    """The keys of `hydra/sweeper=async`."""

    _target_: str = "hydra_plugins.async_sweeper.AsyncSweeper"
    sampler: str | None = None
    n_trials: int | None = None
    pruner: str = "none"
    islands: IslandsConf = field(default_factory=IslandsConf)


@dataclass
class PbtSweeperConf(_Common):
    """The keys of `hydra/sweeper=pbt`."""

    _target_: str = "hydra_plugins.async_sweeper.PbtSweeper"
    study_name: str = "pbt"
    members: int = 4
    rounds: int = 5
    quantile: float = 0.25
    factors: list[float] = field(default_factory=lambda: [0.8, 1.2])
    resample: float = 0.25


for name, node in (("async", AsyncSweeperConf), ("pbt", PbtSweeperConf)):
    ConfigStore.instance().store(group="hydra/sweeper", name=name, node=node, provider="async_sweeper")


class AsyncSweeper(Sweeper):
    """Starts a trial whenever a slot is free, wherever `hydra/launcher` says."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._task_function, self._config = hydra_context.config_loader, task_function, config
        HydraConfig.instance().set_config(config)  # the sweep's folder may be made of `${hydra:…}`
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from hydra_async_sweeper.sweep import sweep

        return sweep(self._settings, arguments, self._config, self._launcher, self._loader, self._task_function)


class PbtSweeper(AsyncSweeper):
    """Trains a population in rounds: the worst members take over from the best."""
