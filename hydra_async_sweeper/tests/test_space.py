"""The search space is what Hydra's own syntax says; and the keys of the sweeper are checked."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import settings
from hydra.core.override_parser.overrides_parser import OverridesParser

from hydra_async_sweeper.islands import IslandSettings
from hydra_async_sweeper.space import (
    Category,
    Dimension,
    Number,
    SpaceError,
    from_plain,
    plan_of,
    size,
    to_plain,
)
from hydra_async_sweeper.sweep import SweepRun, TaskTraits
from hydra_async_sweeper.trials import COMPLETED, FinishedTrial, FinishedTrials, StartedTrial
from hydra_plugins.async_sweeper import IslandsConf

PARSER = OverridesParser.create()


def plan(*arguments: str, **params: str) -> dict[str, Dimension]:
    return plan_of(arguments, params, lambda group: ["conv4", "mlp", "resnet12"]).space


@pytest.mark.parametrize(
    ("override", "dimension"),
    [
        ("x=a,b", Category(("a", "b"))),
        ("x=choice(1,2,2)", Category(("1", "2"))),
        ("model=glob(*,exclude=r*)", Category(("conv4", "mlp"))),
        ("x=interval(0.5,2)", Number(0.5, 2.0)),
        ("x=interval(1,8)", Number(1.0, 8.0)),
        ("x=int(interval(1.0,8.0))", Number(1, 8, whole=True)),
        ("x=tag(log,interval(1e-3,1e-1))", Number(1e-3, 1e-1, log=True)),
        ("x=range(0,10,3)", Number(0, 9, step=3, whole=True)),
        ("x=range(5)", Number(0, 4, step=1, whole=True)),
        ("x=range(0,1,0.25)", Number(0, 0.75, step=0.25)),
        ("x=range(0.3,1.2,0.3)", Number(0.3, 0.9, step=0.3)),
        ("x=range(1.0,0.1,-0.1)", Number(0.2, 1.0, step=0.1)),
    ],
)
def test_a_dimension_is_what_hydra_means(override: str, dimension: Dimension) -> None:
    (parsed,) = plan(override).values()
    assert parsed == dimension
    assert from_plain(to_plain({"x": parsed})) == {"x": parsed}
    (read,) = PARSER.parse_overrides([override])
    if read.is_discrete_sweep() and not override.startswith("model"):
        listed = list(dict.fromkeys(read.sweep_string_iterator()))
        assert size({"x": parsed}) == len(listed)


REFUSED: dict[str, dict[str, Any]] = {
    "sampler=tpee": {"sampler": "tpee"},
    "pruner=fast": {"pruner": "fast"},
    "n_jobs=0": {"n_jobs": 0},
    "n_trials=null": {"n_trials": None, "sampler": "tpe"},
    "sampler=grid": {"sampler": "grid"},
    "direction=up": {"direction": "up"},
    "direction=5": {"direction": 5},
    "direction=minimize": {"objective": ["val.mse", "seconds"], "direction": "minimize"},
    "sampler=islands": {"objective": ["a", "b"], "sampler": "islands"},
    "max_failure_rate=2": {"max_failure_rate": 2.0},
    "storage=sqlite": {"storage": "sqlite:///x.db"},
    "preload=no_such.module": {"preload": ["no_such.module"]},
    "islands.num_islands=0": {"islands": {"num_islands": 0}},
    "islands.pop_size=1": {"islands": {"pop_size": 1}},
    "islands.migration_probability=1.1": {"islands": {"migration_probability": 1.1}},
    "islands.mutation=-0.1": {"islands": {"mutation": -0.1}},
    "islands.sigma=nan": {"islands": {"sigma": float("nan")}},
    "islands.topology=[[0]]": {"islands": {"topology": [[0]], "num_islands": 2}},
    "islands.topology=[[0, -1]": {"islands": {"topology": [[0, -1], [1, 0]], "num_islands": 2}},
    "islands.topology=[[1, 1]": {"islands": {"topology": [[1, 1], [1, 0]], "num_islands": 2}},
    "members=1": {"pbt": True, "members": 1},
    "rounds=0": {"pbt": True, "rounds": 0},
    "quantile=0.6": {"pbt": True, "quantile": 0.6},
    "resample=-0.1": {"pbt": True, "resample": -0.1},
    "factors=[]": {"pbt": True, "factors": []},
    "factors=[0.0]": {"pbt": True, "factors": [0.0]},
    "sampler=pbt": {"pbt": True, "objective": ["a", "b"]},
}
"""From the key that the message names to keys of the sweeper."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_of_the_sweeper_is_checked(name: str) -> None:
    keys = ({} if "pbt" in REFUSED[name] else {"n_trials": 5}) | REFUSED[name]
    with pytest.raises(SpaceError) as caught:
        settings(plan("x=interval(0.0,1.0)"), **keys)
    assert str(caught.value).startswith(f"hydra.sweeper.{name}")


def test_a_population_needs_a_space() -> None:
    with pytest.raises(SpaceError, match="no key has several values"):
        settings({}, pbt=True)


@pytest.mark.parametrize(
    "override",
    [
        "x=interval(0.01,0.0001)", "x=interval(1,1)", "x=tag(log,interval(0,1))", "x=interval(0,inf)",
        "x=range(5,5)", "x=range(0,5,-1)", "model=glob(none*)", "x=tag(log,range(0,10))",
    ],
)  # fmt: skip
def test_an_impossible_dimension_is_refused(override: str) -> None:
    with pytest.raises(SpaceError) as caught:
        plan(override)
    assert str(caught.value).startswith(f"{override}: ")


def test_overrides_keep_the_order_of_the_command_line() -> None:
    planned = plan_of(
        ["a=1", "x=interval(0.0,1.0)", "b=2", "+y=p,q"], {"z": "int(interval(1,3))", "x": "5"}, lambda _: []
    )
    assert list(planned.space) == ["z", "x", "+y"]
    assert planned.overrides({"x": 0.1, "+y": "q", "z": 2}) == ["z=2", "a=1", "x=0.1", "b=2", "+y=q"]
    assert planned.overrides({"x": 1e-05, "+y": "p", "z": 3}) == ["z=3", "a=1", "x=1e-05", "b=2", "+y=p"]


@pytest.mark.parametrize("later", ["x=0.05", "++x=0.05", "~x", "x=1,2", "x=interval(0,2)"])
def test_a_searched_key_is_given_once(later: str) -> None:
    """Otherwise the records would name values of `x` that never ran."""
    searched = "x=interval(0.0,1.0)"
    with pytest.raises(SpaceError) as caught:
        plan("y=1,2", searched, "z=3", later)
    assert str(caught.value).startswith(f"{later}: comes after {searched}, which searches")
    assert "+x" not in plan_of([later], {"+x": "interval(0.0,1.0)"}, list).space
    assert list(plan("x=0.05", searched)) == ["x"]  # as with Hydra's own sweepers, the last one counts


def test_the_best_command_has_the_order_of_its_trial() -> None:
    best = FinishedTrial(0, {"a": "{b:1,c:2}"}, COMPLETED, (0.5,), 0, None, "", None)
    sweep = object.__new__(SweepRun)  # _command needs these alone
    sweep._plan, sweep._task = (
        plan_of(["a=choice({b:1,c:2},{b:2})", "a.b=3"], {}, list),
        TaskTraits(program="python app.py"),
    )
    sweep._settings = settings(sweep._plan.space)
    sweep._study = SimpleNamespace(ended=lambda _: FinishedTrials([best], ["value"], ["minimize"]))  # type: ignore[assignment]
    assert sweep._command() == "python app.py 'a={b:1,c:2}' a.b=3"


def test_directions_follow_from_the_objectives() -> None:
    space = plan("x=interval(0.0,1.0)")
    assert settings(space, n_trials=5, objective=["val.accuracy", "seconds"]).directions == ["maximize", "minimize"]
    for objective, maximized, direction in (
        ("val.accuracy", [], "maximize"), ("val.f1", [], "minimize"), ("val.f1", ["f1", "top_k"], "maximize"),
    ):  # fmt: skip
        assert settings(space, objective, maximized, n_trials=5).directions == [direction]
    assert settings(plan("x=a,b")).sampler == "grid"


def test_the_keys_of_islands_are_those_of_the_search() -> None:
    assert {*(field.name for field in fields(IslandsConf)), "seed"} == set(IslandSettings._fields)
    space = plan("x=interval(0,1)")
    chosen = settings(space, n_trials=5, n_jobs=7, islands={"num_islands": 2, "pop_size": 3, "sigma": None}).islands
    assert (chosen.num_islands, chosen.pop_size, chosen.island_size, chosen.sigma) == (2, 3, 3, 0.05)


def test_a_round_whose_parent_is_gone_is_not_started(tmp_path: Path) -> None:
    sweep = object.__new__(SweepRun)  # overrides_of needs these alone
    sweep._plan, sweep._settings = (
        plan_of([], {}, list),
        settings(plan("x=interval(0,1)"), pbt=True, members=2, rounds=2),
    )
    sweep._task = TaskTraits(segment=lambda round_, rounds, parent, names: [f"from={parent}"])
    sweep._folder_of = lambda number: tmp_path / str(number)
    with pytest.raises(FileNotFoundError, match="trial 2 goes on from its checkpoint"):
        sweep.overrides_of(StartedTrial(2, {}, parent=0))
    (tmp_path / "0").mkdir()
    assert sweep.overrides_of(StartedTrial(2, {}, parent=0)) == [f"from={(tmp_path / '0').resolve()}"]
