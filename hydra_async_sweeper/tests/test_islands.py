"""Islands against recordings of Propulate 1.2.2 itself (record_propulate.py), and what must hold for every space."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from search_functions import PROBLEMS

from hydra_async_sweeper.islands import (
    IslandSettings,
    Populations,
    ScoredTrial,
    breed,
    exchange,
    fold,
    offspring,
)
from hydra_async_sweeper.space import Category, Number, Params, Space, Value

RECORDINGS: dict[str, Any] = json.loads(Path(__file__).with_name("propulate.json").read_text())

PLAIN: Space = {"a": Number(-5.12, 5.12), "b": Number(-5.12, 5.12)}

EVERY_KIND: Space = {
    "algorithm.inner_lr": Number(1e-4, 1.0, log=True),
    "training.steps": Number(100, 900, step=200, whole=True),
    "algorithm": Category(("maml", "anil", "boil")),
    "model.width": Number(8, 512, log=True, whole=True),
    "optimizer.momentum": Number(0, 0.9, step=0.1),
    "model.depth": Number(1, 6, whole=True),
    "training.clip": Number(0, 2.5),
    "training.tasks": Number(1, 31, log=True, step=10, whole=True),
}

GRIDS: dict[str, set[Value]] = {
    "training.steps": {100, 300, 500, 700, 900},
    "optimizer.momentum": {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9},
    "training.tasks": {1, 11, 21, 31},
}


def suggest(number: int, finished: list[ScoredTrial], space: Space, settings: IslandSettings) -> Params:
    """The parameters of trial `number`, from the results that are there when it starts."""
    return offspring(number, fold(finished, settings), space, settings)


def moves_of(finished: list[ScoredTrial], settings: IslandSettings) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Every exchange while these results come in: after which, from where to where, and the numbers of its trials."""
    moves: list[tuple[int, int, int, tuple[int, ...]]] = []

    def noted(told: int, source: int, populations: Populations, law: IslandSettings) -> dict[int, list[ScoredTrial]]:
        parcels = exchange(told, source, populations, law)
        moves.extend((told, source, target, tuple(i.number for i in parcel)) for target, parcel in parcels.items())
        return parcels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra_async_sweeper.islands.exchange", noted)
        fold(finished, settings)
    return moves


def space_of(limits: dict[str, list[Any]]) -> Space:
    """The same space as Propulate's limits: texts, whole numbers and numbers."""
    return {
        key: Category(tuple(limit))
        if isinstance(limit[0], str)
        else Number(limit[0], limit[1], whole=isinstance(limit[0], int))
        for key, limit in limits.items()
    }


def recorded(case: dict[str, Any]) -> list[tuple[Params, float]]:
    return [(dict(zip(case["limits"], values, strict=True)), loss) for *values, loss in case["trials"]]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(case[key]) for key in ("name", "pollination", "seed") if key in case)


def loss_of(params: Params) -> float:
    """Some loss of some numbers, with ties."""
    return round(sum(float(value) ** 2 for value in params.values() if not isinstance(value, str)), 1)


def search(space: Space, settings: IslandSettings, count: int, slots: int = 1, failing: int = 0) -> list[ScoredTrial]:
    """A search whose trials end out of order if there are slots, and every `failing`th without a loss."""
    order = random.Random(slots)
    finished: list[ScoredTrial] = []
    running: list[tuple[int, Params]] = []
    number = 0
    while len(finished) < count:
        while len(running) < slots:
            running.append((number, offspring(number, fold(finished, settings), space, settings)))
            number += 1
        ended, params = running.pop(order.randrange(slots))
        failed = failing and ended % failing == failing - 1
        loss = (None, math.nan, math.inf, -math.inf)[ended // failing % 4] if failed else loss_of(params)
        finished.append(ScoredTrial(len(finished), ended, params, loss))
    return finished


@pytest.mark.parametrize("case", RECORDINGS["breeding"], ids=name_of)
def test_breeding_is_propulates_draw_for_draw(case: dict[str, Any]) -> None:
    space, settings = space_of(case["limits"]), IslandSettings(seed=0, pop_size=case["pop_size"])
    rng = random.Random(case["seed"])
    population: list[ScoredTrial] = []
    for number, (params, loss) in enumerate(recorded(case)):
        child = breed(rng, population, space, settings)
        assert child == params
        assert list(map(type, child.values())) == list(map(type, params.values()))
        population.append(ScoredTrial(number, number, params, loss))


@pytest.mark.parametrize("case", RECORDINGS["islands"], ids=name_of)
def test_a_whole_search_on_islands_is_propulates(case: dict[str, Any]) -> None:
    """Every suggestion, and which individuals are active on each island, in its order."""
    settings = IslandSettings(
        num_islands=len(case["topology"]),
        **{key: case[key] for key in ("seed", "pop_size", "pollination", "topology", "migration_probability")},
    )
    space = space_of(case["limits"])
    finished: list[ScoredTrial] = []
    for number, (params, loss) in enumerate(recorded(case)):
        assert suggest(number, finished, space, settings) == params
        finished.append(ScoredTrial(number, number, params, loss))
        if str(number) in case["active"]:
            populations = fold(finished, settings)
            assert [[one.number for one in island] for island in populations] == case["active"][str(number)]
    assert len(moves_of(finished, settings)) > 20


@pytest.mark.parametrize("case", RECORDINGS["breeding"], ids=name_of)
def test_the_functions_of_the_benchmark_are_propulates(case: dict[str, Any]) -> None:
    problem = PROBLEMS.get(case["name"])
    assert problem or case["name"] in ("mixed", "whole")
    if problem:
        assert list(problem.limits) == [tuple(limit) for limit in case["limits"].values()]
        for params, loss in recorded(case):
            assert problem.loss([float(value) for value in params.values()]) == pytest.approx(loss, rel=1e-9, abs=1e-9)
            assert loss > problem.minimum - 1e-6


def test_a_child_differs_from_its_parents_only_by_draws() -> None:
    settings = IslandSettings(seed=0, pop_size=2, mutation=0, random_init=0, sigma=0)
    parents = [ScoredTrial(i, i, {"a": float(i), "b": float(i)}, 0.0) for i in range(2)]
    rng = random.Random(0)
    children = [breed(rng, parents, PLAIN, settings) for _ in range(4000)]
    assert {tuple(child.values()) for child in children} == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
    mixed = sum(child["a"] != child["b"] for child in children) / len(children)
    assert mixed == pytest.approx(2 * 0.7 * 0.3, abs=0.03)


@given(st.integers(0, 2**32), st.integers(2, 30), st.booleans())
@examples(max_examples=60, deadline=None)
def test_values_stay_in_the_space(seed: int, count: int, pollination: bool) -> None:
    settings = IslandSettings(seed=seed, pop_size=2, num_islands=2, pollination=pollination, mutation=1, sigma=0.5)
    for trial in search(EVERY_KIND, settings, count):
        assert list(trial.params) == list(EVERY_KIND)
        for key, dimension in EVERY_KIND.items():
            value = trial.params[key]
            if isinstance(dimension, Category):
                assert value in dimension.options
            else:
                assert isinstance(value, int if dimension.whole else float)
                assert dimension.low <= float(value) <= dimension.high
                assert value in GRIDS.get(key, {value})


def test_every_value_of_a_grid_is_drawn() -> None:
    settings = IslandSettings(seed=1, pop_size=1000)
    params = [suggest(number, [], EVERY_KIND, settings) for number in range(600)]
    for key, grid in GRIDS.items():
        assert {one[key] for one in params} == grid
    assert {one["model.depth"] for one in params} == {1, 2, 3, 4, 5, 6}


@given(st.integers(0, 2**32), st.floats(1e-6, 1e-2), st.floats(1.5, 1e6))
@examples(max_examples=60, deadline=None)
def test_a_logarithmic_number_is_the_exponential_of_a_plain_one(seed: int, low: float, ratio: float) -> None:
    high = low * ratio
    settings = IslandSettings(seed=0, pop_size=3)
    plain, log = random.Random(seed), random.Random(seed)
    plain_parents: list[ScoredTrial] = []
    log_parents: list[ScoredTrial] = []
    for number in range(20):
        x = breed(plain, plain_parents, {"x": Number(math.log(low), math.log(high))}, settings)
        y = breed(log, log_parents, {"x": Number(low, high, log=True)}, settings)
        assert y["x"] == pytest.approx(math.exp(float(x["x"])), rel=1e-9)
        plain_parents.append(ScoredTrial(number, number, x, float(number)))
        log_parents.append(ScoredTrial(number, number, y, float(number)))


def test_a_whole_logarithmic_number_halves_with_its_size() -> None:
    """1 is drawn as often as 2 and 3 together, and as often as 4 to 7."""
    settings = IslandSettings(seed=2, pop_size=1000)
    space: Space = {"n": Number(1, 7, log=True, whole=True)}
    drawn = [int(suggest(number, [], space, settings)["n"]) for number in range(6000)]
    for low, high in ((1, 1), (2, 3), (4, 7)):
        assert sum(low <= n <= high for n in drawn) / 6000 == pytest.approx(1 / 3, abs=0.02)


def test_a_whole_number_has_the_step_one() -> None:
    settings = IslandSettings(seed=3, pop_size=2)
    with_step = search({"n": Number(-4, 9, step=1, whole=True)}, settings, 40)
    assert with_step == search({"n": Number(-4, 9, whole=True)}, settings, 40)


@pytest.mark.parametrize("pollination", [True, False])
def test_trials_without_a_finite_loss_change_nothing(pollination: bool) -> None:
    settings = IslandSettings(seed=4, pop_size=3, num_islands=3, pollination=pollination)
    finished = search(PLAIN, settings, 90, failing=4)
    usable = [trial for trial in finished if trial.loss is not None and math.isfinite(trial.loss)]
    assert len(usable) < len(finished)
    with_failed, without = fold(finished, settings), fold(usable, settings)
    assert with_failed == without
    assert moves_of(finished, settings) == moves_of(usable, settings)
    for number in range(90, 120):
        assert suggest(number, finished, PLAIN, settings) == suggest(number, usable, PLAIN, settings)


def test_the_first_trials_are_random_while_all_have_failed() -> None:
    settings = IslandSettings(seed=5, pop_size=2)
    failed = [ScoredTrial(told, told, suggest(told, [], PLAIN, settings), math.nan) for told in range(20)]
    assert suggest(20, failed, PLAIN, settings) == suggest(20, [], PLAIN, settings)


def test_a_search_continues_from_what_a_file_holds() -> None:
    """The settings and the results in their order are all its state: it may go on with any number of slots."""
    settings = IslandSettings(seed=7, pop_size=4, num_islands=2, island_size=2)
    finished = search(PLAIN, settings, 40, slots=4)
    saved = json.loads(json.dumps([settings._asdict(), finished]))
    again, results = IslandSettings(**saved[0]), [ScoredTrial(*trial) for trial in saved[1]]
    assert again == settings
    assert suggest(44, results, PLAIN, again) == suggest(44, finished, PLAIN, settings)


def test_pollination_keeps_sizes_and_migration_moves() -> None:
    finished = [ScoredTrial(told, told, {"a": 0.0, "b": 0.0}, float(-told % 7)) for told in range(40)]
    pollination = fold(finished, IslandSettings(seed=8, pop_size=2, num_islands=4))
    assert [len(island) for island in pollination] == [10, 10, 10, 10]
    migration = fold(finished, IslandSettings(seed=8, pop_size=2, num_islands=4, pollination=False))
    assert sorted(one.number for island in migration for one in island) == list(range(40))
    for pollinates in (True, False):
        moves = moves_of(finished, IslandSettings(seed=8, pop_size=2, num_islands=4, pollination=pollinates))
        assert moves and all(source != target for _, source, target, _ in moves)
        assert all(source == told % 4 and len(numbers) == 1 for told, source, _, numbers in moves)


def test_pollination_drops_one_for_each_that_arrives() -> None:
    """By hand: island 0 has the losses 0 and 2 and sends both; island 1 has 1 and keeps the best of 0, 1 and 2."""
    settings = IslandSettings(seed=0, pop_size=2, num_islands=2, topology=[[0, 2], [0, 0]], migration_probability=1)
    losses = [0.0, 1.0, 2.0]
    finished = [ScoredTrial(told, told, {}, loss) for told, loss in enumerate(losses)]
    result = fold(finished, settings)
    assert [[one.number for one in island] for island in result] == [[0, 2], [0]]
    assert moves_of(finished, settings) == [(2, 0, 1, (0, 2))]


def test_a_larger_island_exchanges_less_often() -> None:
    finished = [ScoredTrial(told, told, {}, 0.0) for told in range(2000)]
    counts = [
        len(moves_of(finished, IslandSettings(seed=9, pop_size=2, num_islands=2, island_size=size))) for size in (1, 3)
    ]
    assert counts[0] / 2000 == pytest.approx(0.9, abs=0.03)
    assert counts[1] / 2000 == pytest.approx(0.3, abs=0.03)
