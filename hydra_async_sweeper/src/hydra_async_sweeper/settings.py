"""The keys below `hydra.sweeper`, checked before anything is made."""

import importlib.util
import reprlib
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from hydra_async_sweeper import islands as evolution
from hydra_async_sweeper.islands import IslandSettings
from hydra_async_sweeper.outcome import direction_of
from hydra_async_sweeper.population import PopulationSettings, population
from hydra_async_sweeper.space import Params, Space, SpaceError, contains, size
from hydra_async_sweeper.terms import ONE_LANE, Direction, Lanes

SAMPLERS = ("tpe", "islands", "random", "grid", "cmaes", "gp")
PRUNERS = ("none", "median", "hyperband")
DIRECTIONS = ("minimize", "maximize")

PACKAGES = {"cmaes": ("optuna", "cmaes"), "gp": ("optuna", "torch", "scipy")}
"""What these samplers need; the others need optuna."""

PBT = "pbt"
"""What stands for the sampler where `hydra/sweeper=pbt` searches."""

RESULTS, JOURNAL = "optimization_results.yaml", "study.journal"

_DEEPEST = 32
_LARGEST = 2**22
"""Bytes of a YAML file that is read."""

POPULATION = 10
"""Parents of an island where `hydra.sweeper.islands.pop_size` is not given."""


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
    given: Mapping[str, Any], space: Space, objective: str | None = None, maximized: Collection[str] = ()
) -> SweeperSettings:
    """The settings that the keys below `hydra.sweeper` describe.

    Args:
        given: the keys with their values.
        space: what is searched.
        objective: what is searched for where the key `objective` is not given.
        maximized: as for `direction_of`, where the key `direction` is not given.

    Raises:
        SpaceError: a value that is not allowed, or a package that is missing; the message names the key.
    """
    keys: dict[str, Any] = {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in given.items()
    }
    for key, least in (("n_jobs", 1), ("max_retries", 0), ("seed", 0)):
        _at_least(key, keys[key], least)
    rate = keys["max_failure_rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise SpaceError(f"hydra.sweeper.max_failure_rate={rate!r}: must be from 0 to 1; type 0.1")
    for key in ("warm", "plots"):
        _one_of(key, keys[key], (True, False))
    _preloadable(keys["preload"])
    if keys["storage"] is not None and "://" in keys["storage"]:
        raise SpaceError(
            f"hydra.sweeper.storage={keys['storage']}: must be a file, the journal of the study, and no database; type "
            "hydra.sweeper.storage=study.journal"
        )
    objectives = _objectives(keys["objective"], objective)
    directions = _directions(keys["direction"], objectives, maximized)
    population = _population(keys, space, directions) if "members" in keys else None
    if population is None:
        sampler, n_trials, pruner = _way(keys, space, directions)
    else:
        sampler, n_trials, pruner = PBT, population.members * population.rounds, "none"
    return SweeperSettings(
        sampler, n_trials, keys["n_jobs"], objectives, directions, pruner, keys["seed"],
        str(keys["study_name"]), keys["storage"], float(rate), keys["max_retries"], keys["warm"],
        list(keys["preload"]), keys["plots"], _islands(keys.get("islands", {}), keys["seed"], keys["n_jobs"]),
        population,
    )  # fmt: skip


def _way(keys: Mapping[str, Any], space: Space, directions: Sequence[Direction]) -> tuple[str, int | None, str]:
    """Sampler, number of trials and pruner of `hydra/sweeper=async`."""
    n_trials, pruner = keys["n_trials"], keys["pruner"]
    if n_trials is not None:
        _at_least("n_trials", n_trials, 1)
    _one_of("pruner", pruner, PRUNERS)
    sampler = _sampler(keys["sampler"], n_trials, space)
    if len(directions) > 1 and (sampler in ("islands", "cmaes") or pruner != "none"):
        what = f"pruner={pruner}" if pruner != "none" else f"sampler={sampler}"
        raise SpaceError(f"hydra.sweeper.{what}: searches for one objective, and there are {len(directions)}")
    return sampler, n_trials, pruner


def _population(keys: Mapping[str, Any], space: Space, directions: Sequence[Direction]) -> PopulationSettings:
    """What `hydra/sweeper=pbt` does."""
    _needs("hydra/sweeper=pbt", ("optuna",))
    if len(directions) > 1:
        raise SpaceError(f"hydra/sweeper=pbt: searches for one objective, and there are {len(directions)}")
    if not space:
        raise SpaceError(
            "hydra/sweeper=pbt: no key has several values; type one, such as "
            "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
        )
    schedule = None if keys["replay"] is None else _recorded(Path(str(keys["replay"])), space)
    try:
        return population(
            seed=keys["seed"], members=keys["members"], rounds=keys["rounds"], quantile=keys["quantile"],
            factors=keys["factors"], resample=keys["resample"], schedule=schedule,
        )  # fmt: skip
    except ValueError as error:
        raise SpaceError(f"hydra.sweeper.{error}") from error


def _recorded(folder: Path, space: Space) -> list[Params]:
    """The parameters of each round of the winner of a sweep that has ended.

    Raises:
        SpaceError: the folder holds no such sweep, or one of another space.
    """
    try:
        results = read_yaml(folder / RESULTS)
        rounds: list[Params] = [dict(entry["params"]) for entry in results["lineage"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpaceError(
            f"hydra.sweeper.replay={folder}: has no {RESULTS} with a lineage; type the folder of a sweep by "
            "hydra/sweeper=pbt that has ended"
        ) from error
    for params in rounds:
        outside = {key: value for key, value in params.items() if key not in space or not contains(space[key], value)}
        if outside or params.keys() != space.keys():
            trained = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in params.items())
            raise SpaceError(
                f"hydra.sweeper.replay={folder}: its winner has trained with {trained}, which the space of this "
                "command does not hold; type the command of that sweep, with the same space"
            )
    return rounds


def _needs(what: str, packages: Sequence[str]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SpaceError(f"{what}: needs the package {package}; type pip install {package}")


def _preloadable(names: Sequence[str]) -> None:
    """Raises SpaceError for a module of a package that is not there. It is imported elsewhere."""
    for name in names:
        package = name.partition(".")[0]
        if not package or importlib.util.find_spec(package) is None:
            raise SpaceError(
                f"hydra.sweeper.preload={name}: there is no package {package!r}; type the name of a module that can be "
                "imported, or leave it out"
            )


def _sampler(given: str | None, n_trials: int | None, space: Space) -> str:
    countable = size(space) is not None
    sampler = given or ("grid" if countable and n_trials is None else "tpe")
    _one_of("sampler", sampler, SAMPLERS)
    if sampler == "grid" and not countable:
        raise SpaceError(
            "hydra.sweeper.sampler=grid: an interval has no last value; type range(start,stop,step) in its place, or "
            "hydra.sweeper.sampler=tpe hydra.sweeper.n_trials=20"
        )
    if sampler != "grid" and n_trials is None:
        raise SpaceError(
            f"hydra.sweeper.n_trials=null: sampler={sampler} needs a number of trials; type hydra.sweeper.n_trials=20"
        )
    _needs(f"hydra.sweeper.sampler={sampler}", PACKAGES.get(sampler, ("optuna",)))
    return sampler


def _objectives(given: Any, default: str | None) -> list[str] | None:
    if given is None:
        return None if default is None else [default]
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise SpaceError(f"hydra.sweeper.objective={given!r}: must be a field of the result, or a list of fields; "
                         "type hydra.sweeper.objective=val.accuracy")  # fmt: skip
    return names


def _directions(given: Any, objectives: list[str] | None, maximized: Collection[str]) -> list[Direction]:
    usual = [direction_of(name, maximized) for name in objectives or ()]
    if given is None:
        return usual or ["minimize"]
    directions: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for direction in directions:
        _one_of("direction", direction, DIRECTIONS)
    if objectives and len(directions) != len(objectives):
        raise SpaceError(
            f"hydra.sweeper.direction={given}: {len(objectives)} objectives need as many directions; type "
            f"hydra.sweeper.direction=[{','.join(usual)}]"
        )
    return directions


def _islands(given: Mapping[str, Any], seed: int, n_jobs: int) -> IslandSettings:
    keys = {"seed": seed, "pop_size": POPULATION, **{key: value for key, value in given.items() if value is not None}}
    islands = keys.get("num_islands", 1)
    if not isinstance(islands, int) or islands < 1:
        raise SpaceError(f"hydra.sweeper.islands.num_islands={islands}: must be a whole number of at least 1; type 1")
    keys.setdefault("island_size", evolution.slots_per_island(n_jobs, islands))
    try:
        return evolution.islands(**keys)
    except (TypeError, ValueError) as error:
        raise SpaceError(f"hydra.sweeper.islands.{error}") from error


def _one_of(key: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise SpaceError(
            f"hydra.sweeper.{key}={value}: must be one of {names}; type hydra.sweeper.{key}={next(iter(allowed))}"
        )


def _at_least(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        example = f"type hydra.sweeper.{key}={max(least, 1)}"
        raise SpaceError(f"hydra.sweeper.{key}={value!r}: must be a whole number of at least {least}; {example}")


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, which somebody else may have written, as plain values.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: it is no regular file, has more than 4 MiB, is nested too deeply, or holds no YAML.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        raise ValueError(f"{path}: is no regular file of at most {_LARGEST:,} bytes")
    text = path.read_text(encoding="utf-8")
    depth = 0
    try:
        # Before yaml builds anything: it recurses a level of nesting, and looks through all open levels at each one.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"{path}: is nested more than {_DEEPEST} deep")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: holds no YAML ({type(error).__name__})") from error
