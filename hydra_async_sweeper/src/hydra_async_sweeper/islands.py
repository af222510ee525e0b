"""Evolution on islands: the operators of Propulate 1.2.2 as pure functions, in the same order of random draws.

Taubert et al. 2023, "Massively Parallel Genetic Optimization Through Asynchronous Propagation of Populations"
(doi 10.1007/978-3-031-32041-5_6). Trial n belongs to island n mod `num_islands`. Every trial, and every exchange
between islands, has random numbers of its own, seeded by its number. The populations are a fold over the finished
trials in the order in which they were told. So a search that resumes, with any number of slots, needs no other state.

Three things differ from Propulate: numbers may have a logarithmic scale or a step; a trial without a finite loss is
never a parent and never leaves its island; in pollination a target drops one individual for each that arrives.
"""

import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydra_async_sweeper.space import Number, Params, Space, uniform, uniform_params


class IslandSettings(NamedTuple):
    """Settings of the search."""

    seed: int  # of all random numbers
    pop_size: int = 10  # parents are two of an island's best `pop_size`; until it has as many, trials are random
    num_islands: int = 1  # how many populations evolve side by side
    # Slots that work for an island, `n_jobs // num_islands` when the study is made. It must not change when the study
    # resumes with other slots: exchanges would become more or less frequent.
    island_size: int = 1
    migration_probability: float = 0.9  # an exchange follows a result with `migration_probability / island_size`
    pollination: bool = True  # True sends copies, and the target drops its worst. False lets the individuals leave.
    # How many individuals island i sends to island j at an exchange. By default 1 to every other island.
    topology: Sequence[Sequence[int]] | None = None
    crossover: float = 0.7  # the share of the first parent: each parameter comes from it with this probability
    mutation: float = 0.4  # the probability that one parameter is drawn afresh
    sigma: float = 0.05  # the standard deviation of the move of one number that is not whole, as a part of its interval
    random_init: float = 0.1  # the probability that all parameters are drawn afresh


class ScoredTrial(NamedTuple):
    """A trial that has ended: its place in the order of results, its number, and its loss (lower is better), None if it
    has failed."""

    told: int
    number: int
    params: Params
    loss: float | None


Populations = list[list[ScoredTrial]]  # the active individuals of each island, all with a finite loss


def topology_of(count: int) -> list[list[int]]:
    """Every island sends one individual to every other."""
    return [[int(row != column) for column in range(count)] for row in range(count)]


def offspring(number: int, populations: Populations, space: Space, settings: IslandSettings) -> Params:
    """The parameters of trial `number`, from the populations that are there when it starts."""
    rng = random.Random(f"{settings.seed}-{number}")
    return breed(rng, populations[number % settings.num_islands], space, settings)


def breed(rng: random.Random, active: Sequence[ScoredTrial], space: Space, settings: IslandSettings) -> Params:
    """A child of two of the island's best `pop_size`, or random parameters while the island has fewer. `rng` is
    advanced as Propulate's default operators advance it; a draw that decides nothing is made for that alone."""
    if len(active) < settings.pop_size:
        rng.random()
        return uniform_params(rng, space)
    first, second = rng.sample(sorted(active, key=_loss)[: settings.pop_size], 2)
    rng.random()
    child = {key: (second if rng.random() > settings.crossover else first).params[key] for key in space}
    if rng.random() < settings.mutation:
        (key,) = rng.sample(sorted(space), 1)
        child[key] = uniform(rng, space[key])
    movable = {key: number for key, number in space.items() if isinstance(number, Number) and not number.whole}
    if movable:
        rng.random()
        (key,) = rng.sample(list(movable), 1)
        child[key] = _moved(rng, movable[key], float(child[key]), settings.sigma)
    return uniform_params(rng, space) if rng.random() < settings.random_init else child


def fold(finished: Iterable[ScoredTrial], settings: IslandSettings) -> Populations:
    """The populations after the results, in the order in which they were told. One without finite loss is left out."""
    populations: Populations = [[] for _ in range(settings.num_islands)]
    for trial in finished:
        if trial.loss is not None and math.isfinite(trial.loss):
            home = trial.number % settings.num_islands
            populations[home].append(trial)
            exchange(trial.told, home, populations, settings)
    return populations


def exchange(told: int, source: int, islands: Populations, settings: IslandSettings) -> dict[int, list[ScoredTrial]]:
    """Changes `islands` by what the source sends after the result `told`, which is often nothing. Returns what each
    island gets."""
    rng = random.Random(f"{settings.seed}-exchange-{told}")
    if rng.random() >= settings.migration_probability / settings.island_size:
        return {}
    row = (settings.topology or topology_of(settings.num_islands))[source]
    best = sorted(islands[source], key=_loss)  # of equal losses the earlier first
    parcels: dict[int, list[ScoredTrial]] = {}  # nothing goes if there are too few individuals for all
    if settings.pollination and max(row) <= len(best):
        parcels = {target: best[:count] for target, count in enumerate(row) if count}
    elif not settings.pollination and sum(row) <= len(best):
        leaving = best[: sum(row)]
        rng.shuffle(leaving)
        parcels = {target: [leaving.pop(0) for _ in range(count)] for target, count in enumerate(row) if count}
    for target, parcel in parcels.items():
        for individual in parcel:
            islands[target].append(individual)
            shrinks = islands[target if settings.pollination else source]
            worst = max(shrinks, key=_loss)  # of equal losses the earlier
            shrinks.remove(worst if settings.pollination else individual)
    return parcels


def _loss(individual: ScoredTrial) -> float:
    assert individual.loss is not None
    return individual.loss


def _moved(rng: random.Random, number: Number, value: float, sigma: float) -> float:
    """The value after a normal step of `sigma` of the interval, kept within it and on the nearest step."""
    if number.log:
        width = math.log(number.high) - math.log(number.low)
        moved = math.exp(rng.gauss(math.log(value), width * sigma))
    else:
        moved = rng.gauss(value, (number.high - number.low) * sigma)
    inside = max(float(number.low), min(float(number.high), moved))
    return inside if number.step is None else number.at(number.steps_to(inside))
