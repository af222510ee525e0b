"""The keys below `hydra.sweeper`, checked before anything is made; the plugin's dataclasses check their types."""

import importlib.util
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from hydra_async_sweeper.islands import IslandSettings, topology_of
from hydra_async_sweeper.population import PopulationSettings
from hydra_async_sweeper.space import Space, SpaceError, size
from hydra_async_sweeper.trials import ONE_LANE, Direction, Lanes

CHOICES = {
    "sampler": ("tpe", "islands", "random", "grid", "cmaes", "gp"),
    "pruner": ("none", "median", "hyperband"),
    "direction": ("minimize", "maximize"),
}

RANGES: dict[str, tuple[float, float, float]] = {
    "n_jobs": (1, math.inf, 4), "n_trials": (1, math.inf, 20), "max_retries": (0, math.inf, 2),
    "max_failure_rate": (0, 1, 0.1), "seed": (0, math.inf, 0),
    "members": (2, math.inf, 4), "rounds": (1, math.inf, 5), "quantile": (0, 0.5, 0.25), "resample": (0, 1, 0.25),
    "islands.num_islands": (1, math.inf, 4), "islands.pop_size": (2, math.inf, 8),
    "islands.island_size": (1, math.inf, 1), "islands.migration_probability": (0, 1, 0.9),
    "islands.crossover": (0, 1, 0.7), "islands.mutation": (0, 1, 0.4), "islands.sigma": (0, 1, 0.05),
    "islands.random_init": (0, 1, 0.1),
}  # fmt: skip
"""The least and the most of each number, and one to type."""

PACKAGES = {"cmaes": ("optuna", "cmaes"), "gp": ("optuna", "torch", "scipy")}
"""What these samplers need; the others need optuna."""

PBT = "pbt"  # what stands for the sampler where `hydra/sweeper=pbt` searches
RESULTS, JOURNAL = "optimization_results.yaml", "study.journal"


class SweeperSettings(NamedTuple):
    """How to search. `objective` is None where the task returns the value itself."""

    sampler: str
    n_trials: int | None
    n_jobs: int
    objective: list[str] | None
    directions: list[Direction]
    pruner: str
    seed: int
    study_name: str
    storage: str | None
    max_failure_rate: float
    max_retries: int
    warm: bool
    preload: list[str]
    plots: bool
    islands: IslandSettings
    population: PopulationSettings | None

    @property
    def lanes(self) -> Lanes:
        """How the trials are numbered."""
        if self.population is not None:
            return Lanes("member", self.population.members, by_round=True)
        return Lanes("island", self.islands.num_islands) if self.sampler == "islands" else ONE_LANE


def settings_of(
    values: Mapping[str, Any], space: Space, objective: str | None = None, maximized: Collection[str] = ()
) -> SweeperSettings:
    """The settings that the keys below `hydra.sweeper` describe, with the `objective` of the program if there is no
    such key. Without the key `direction`, accuracies and fields that end in a name of `maximized` are maximised,
    everything else is minimised. Raises SpaceError for a value that is not allowed, or a package that is missing; the
    message names the key."""
    keys: dict[str, Any] = {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in values.items()
    }
    of_islands = {key: value for key, value in keys.get("islands", {}).items() if value is not None}
    numbers = keys | {f"islands.{key}": value for key, value in of_islands.items()}
    for key, (least, most, usual) in RANGES.items():
        if numbers.get(key) is not None and not least <= numbers[key] <= most:
            allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise _refused(key, numbers[key], f"must be {allowed}", usual)
    for name in keys["preload"]:  # it is imported elsewhere
        _needs(f"hydra.sweeper.preload={name}", [name.partition(".")[0]])
    if keys["storage"] is not None and "://" in keys["storage"]:
        must = "must be a file, the journal of the study, and no database"
        raise _refused("storage", keys["storage"], must, "study.journal")
    objectives = objective if keys["objective"] is None else keys["objective"]
    objectives = objectives if objectives is None or isinstance(objectives, list) else [str(objectives)]
    directions = _directions(keys["direction"], objectives, maximized)
    population = None
    if "members" in keys:  # hydra/sweeper=pbt
        if not space:
            example = "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
            raise SpaceError(f"hydra/sweeper=pbt: no key has several values; type one, such as {example}")
        if not keys["factors"] or min(keys["factors"]) <= 0:
            raise _refused("factors", keys["factors"], "must be numbers above 0", "[0.8,1.2]")
        population = PopulationSettings(**{name: keys[name] for name in PopulationSettings._fields})
        sampler, n_trials, pruner = PBT, population.members * population.rounds, "none"
    else:
        n_trials, pruner = keys["n_trials"], keys["pruner"]
        _one_of("pruner", pruner)
        sampler = _sampler(keys["sampler"], n_trials, space)
    _needs(f"hydra.sweeper.sampler={sampler}", PACKAGES.get(sampler, ("optuna",)))
    if len(directions) > 1 and (sampler in ("islands", "cmaes", PBT) or pruner != "none"):
        what = f"pruner={pruner}" if pruner != "none" else f"sampler={sampler}"
        raise SpaceError(f"hydra.sweeper.{what}: searches for one objective, and there are {len(directions)}")
    return SweeperSettings(
        sampler, n_trials, keys["n_jobs"], objectives, directions, pruner, keys["seed"], keys["study_name"],
        keys["storage"], keys["max_failure_rate"], keys["max_retries"], keys["warm"], keys["preload"], keys["plots"],
        _islands(of_islands, keys["seed"], keys["n_jobs"]), population,
    )  # fmt: skip


def _sampler(name: str | None, n_trials: int | None, space: Space) -> str:
    countable = size(space) is not None
    sampler = name or ("grid" if countable and n_trials is None else "tpe")
    _one_of("sampler", sampler)
    if sampler == "grid" and not countable:
        raise SpaceError(
            "hydra.sweeper.sampler=grid: an interval has no last value; type range(start,stop,step) in its place, or "
            "hydra.sweeper.sampler=tpe hydra.sweeper.n_trials=20"
        )
    if sampler != "grid" and n_trials is None:
        raise _refused("n_trials", "null", f"sampler={sampler} needs a number of trials", 20)
    return sampler


def _directions(value: Any, objectives: list[str] | None, maximized: Collection[str]) -> list[Direction]:
    usual: list[Direction] = [
        "maximize" if "accuracy" in name or name.rpartition(".")[2] in maximized else "minimize"
        for name in objectives or ()
    ]
    if value is None:
        return usual or ["minimize"]
    directions: list[Any] = value if isinstance(value, list) else [value]
    for direction in directions:
        _one_of("direction", direction)
    if objectives and len(directions) != len(objectives):
        must = f"{len(objectives)} objectives need as many directions"
        raise _refused("direction", value, must, f"[{','.join(usual)}]")
    return directions


def _islands(values: Mapping[str, Any], seed: int, n_jobs: int) -> IslandSettings:
    keys = {"seed": seed, **values}
    count = keys.get("num_islands", 1)
    keys.setdefault("island_size", max(1, n_jobs // count))
    topology = keys.get("topology", topology_of(count))
    square = [len(row) for row in topology] == [count] * count
    if not square or min(map(min, topology)) < 0 or any(topology[island][island] for island in range(count)):
        must = (
            f"must have {count} rows of {count} numbers of at least 0, for num_islands={count}, with 0 where an island "
            "would send to itself"
        )
        raise _refused("islands.topology", topology, must, str(topology_of(count)).replace(" ", ""))
    return IslandSettings(**keys)


def _needs(what: str, packages: Sequence[str]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SpaceError(f"{what}: needs the package {package}; type pip install {package}")


def _one_of(key: str, value: object) -> None:
    if value not in CHOICES[key]:
        raise _refused(key, value, f"must be one of {', '.join(CHOICES[key])}", CHOICES[key][0])


def _refused(key: str, value: object, must: str, example: object) -> SpaceError:
    return SpaceError(f"hydra.sweeper.{key}={value}: {must}; type hydra.sweeper.{key}={example}")
