"""Population based training as a pure function: who takes over from whom, and when that is known."""

import random

import pytest
from by_hand import contains
from hypothesis import given
from hypothesis import strategies as st

from hydra_async_sweeper.islands import ScoredTrial
from hydra_async_sweeper.population import PopulationSettings, decide
from hydra_async_sweeper.space import Category, Number, Params, Space
from hydra_async_sweeper.trials import StartedTrial

SPACE: Space = {
    "rate": Number(1e-4, 1e-1, log=True),
    "width": Number(8, 64, step=8, whole=True),
    "depth": Number(1, 6, whole=True),
    "model": Category(("conv4", "mlp")),
}
PARAMS: Params = {"rate": 1e-2, "width": 32, "depth": 3, "model": "mlp"}


def settings(members: int = 4, **others: object) -> PopulationSettings:
    return PopulationSettings(**{"seed": 3, "members": members, "rounds": 5, **others})  # type: ignore[arg-type]


def round_of(losses: list[float | None], params: list[Params] | None = None) -> list[ScoredTrial]:
    """The first round, whose trials have these losses."""
    own = params or [PARAMS | {"rate": 1e-3 * (n + 1)} for n in range(len(losses))]
    return [ScoredTrial(n, n, own[n], loss) for n, loss in enumerate(losses)]


def test_the_first_round_draws_every_member_from_the_space() -> None:
    first = [decide(n, [], SPACE, settings(8)) for n in range(8)]
    assert all(found is not None and found.parent is None for found in first)
    drawn = [found.params for found in first if found is not None]
    assert all(contains(SPACE[key], params[key]) for params in drawn for key in SPACE)
    assert len({params["rate"] for params in drawn}) == 8


def test_the_worst_member_takes_over_from_the_best() -> None:
    before = round_of([0.4, 0.9, 0.1, 0.5])
    after = [decide(4 + member, before, SPACE, settings(resample=0.0)) for member in range(4)]
    assert [found and found.parent for found in after] == [0, 2, 2, 3]
    for member in (0, 2, 3):
        assert after[member] == StartedTrial(4 + member, before[member].params, member)
    taken = after[1]
    assert taken is not None
    ratio = taken.params["rate"] / before[2].params["rate"]  # type: ignore[operator]
    assert ratio == pytest.approx(0.8) or ratio == pytest.approx(1.2)
    assert taken.params["width"] in (24, 40)  # one step at least
    assert taken.params["depth"] in (2, 4)
    assert taken.params["model"] == before[2].params["model"]


@pytest.mark.parametrize("members", [2, 3, 4, 7, 8, 12])
def test_a_quarter_and_never_less_than_one_member_is_replaced(members: int) -> None:
    before = round_of([float(n) for n in range(members)])
    parents = [decide(members + n, before, SPACE, settings(members)) for n in range(members)]
    replaced = [n for n, found in enumerate(parents) if found is not None and found.parent != n]
    count = max(1, members // 4)
    assert replaced == list(range(members - count, members))
    assert {parents[n].parent for n in replaced} <= set(range(count))  # type: ignore[union-attr]


def test_a_member_without_a_value_takes_over() -> None:
    before = round_of([None, 0.3, None, None])
    assert [found and found.parent for found in (decide(4 + n, before, SPACE, settings()) for n in range(4))] == [1] * 4


def test_without_any_value_nobody_goes_on() -> None:
    assert [decide(4 + n, round_of([None] * 4), SPACE, settings()) for n in range(4)] == [None] * 4


losses = st.lists(st.one_of(st.none(), st.sampled_from([0.1, 0.2, 0.3, 0.4])), min_size=2, max_size=9)


@given(losses, st.randoms(use_true_random=False))
def test_what_is_decided_early_is_what_the_whole_round_decides(results: list[float | None], rng: random.Random) -> None:
    """In any order of ends, and for equal losses, a decision that is there once never changes."""
    members, before = len(results), round_of(results)
    whole = [decide(members + n, before, SPACE, settings(members)) for n in range(members)]
    order = rng.sample(before, members)
    early = 0
    for count in range(members):
        for member in range(members):
            found = decide(members + member, order[:count], SPACE, settings(members))
            assert found in (None, whole[member])
            early += found is not None
    distinct = len({loss for loss in results if loss is not None}) == members
    assert early or members == 2 or not distinct  # with three members one is certain before the last has ended


def test_parameters_move_by_a_factor_or_are_resampled() -> None:
    ends: Params = {"rate": 1e-1, "width": 64, "depth": 6, "model": "mlp"}
    before = round_of([0.1, 0.2], [ends, PARAMS])
    moved = [decide(3, before, SPACE, settings(2, seed=seed, resample=0.0)) for seed in range(60)]
    assert {found.params["rate"] for found in moved if found} == {0.1 * 0.8, 0.1}  # 0.12 is outside
    assert {found.params["width"] for found in moved if found} == {48, 64}  # 0.8 · 64 = 51.2
    assert {found.params["depth"] for found in moved if found} == {5, 6}
    fresh = [decide(3, before, SPACE, settings(2, seed=seed, resample=1.0)) for seed in range(60)]
    assert len({found.params["rate"] for found in fresh if found}) == 60
    assert {found.params["model"] for found in fresh if found} == {"conv4", "mlp"}
