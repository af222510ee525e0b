"""The search space is what Hydra's own syntax says."""

from dataclasses import fields

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from hydra_async_sweeper.islands import IslandSettings
from hydra_async_sweeper.plan import plan_of
from hydra_async_sweeper.settings import settings_of
from hydra_async_sweeper.space import Category, Dimension, Number, SpaceError, as_overrides, from_plain, size, to_plain
from hydra_plugins.async_sweeper.async_sweeper import AsyncSweeperConf, IslandsConf

PARSER = OverridesParser.create()

KEYS = {
    "sampler": None, "n_trials": 5, "n_jobs": 2, "objective": None, "direction": None, "pruner": "none", "seed": 0,
    "study_name": "s", "storage": None, "params": {}, "max_failure_rate": 0.0, "max_retries": 2, "warm": True,
    "plots": True, "preload": [], "islands": {},
}  # fmt: skip


def test_the_keys_of_islands_can_be_typed() -> None:
    """They are those of the search itself, and null is its default."""
    keys = [field.name for field in fields(IslandsConf)]
    assert {*keys, "seed"} == set(IslandSettings._fields)
    config = OmegaConf.structured(AsyncSweeperConf)
    space = plan("x=interval(0,1)")
    assert settings_of(KEYS | {"islands": config.islands}, space).islands == settings_of(KEYS, space).islands
    config.merge_with_dotlist(["islands.num_islands=2", "islands.pop_size=3"])
    chosen = settings_of(KEYS | {"islands": config.islands}, space).islands
    assert (chosen.num_islands, chosen.pop_size) == (2, 3)
    with pytest.raises(ConfigAttributeError, match="popsize"):
        config.merge_with_dotlist(["islands.popsize=2"])


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("x=interval(0.01,0.0001)", r"0.01 must be below 0.0001; type interval\(0.0001,0.01\)"),
        ("x=interval(1,1)", "is empty"),
        ("x=tag(log,interval(0,1))", "must begin above 0"),
        ("x=range(3,3)", "the range is empty"),
        ("x=tag(log,range(0,10))", "must begin above 0"),
    ],
)
def test_an_impossible_dimension_is_refused(override: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        plan(override)


def test_overrides_keep_the_order_of_the_command_line() -> None:
    planned = plan_of(
        ["a=1", "x=interval(0.0,1.0)", "b=2", "+y=p,q"], {"z": "int(interval(1,3))", "x": "5"}, lambda _: []
    )
    assert list(planned.space) == ["z", "x", "+y"]
    assert planned.overrides({"x": 0.1, "+y": "q", "z": 2}) == ["z=2", "a=1", "x=0.1", "b=2", "+y=q"]
    assert as_overrides({"x": 1e-05, "n": 3}) == ["x=1e-05", "n=3"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampler": "tpee"}, "hydra.sweeper.sampler=tpee: must be one of tpe, islands"),
        ({"pruner": "fast"}, "hydra.sweeper.pruner=fast"),
        ({"n_jobs": 0}, "hydra.sweeper.n_jobs=0: must be a whole number of at least 1"),
        ({"n_trials": None, "sampler": "tpe"}, "type hydra.sweeper.n_trials=20"),
        ({"sampler": "grid"}, "an interval has no last value"),
        ({"direction": "up"}, "must be one of minimize, maximize"),
        ({"direction": 5}, "hydra.sweeper.direction=5: must be one of minimize, maximize"),
        ({"islands": {"num_islands": 0}}, "hydra.sweeper.islands.num_islands=0: must be a whole number of at least 1"),
        ({"islands": {"num_islands": "abc"}}, "hydra.sweeper.islands.num_islands=abc: must be a whole number"),
        ({"objective": ["val.mse", "seconds"], "direction": "minimize"}, "2 objectives need as many directions"),
        ({"objective": ["a", "b"], "sampler": "islands"}, "searches for one objective"),
        ({"sampler": "islands", "islands": {"pop_size": 1}}, "hydra.sweeper.islands.pop_size=1"),
        ({"max_failure_rate": 2}, "must be from 0 to 1"),
        ({"storage": "sqlite:///x.db"}, "must be a file, the journal of the study, and no database"),
        ({"preload": ["no_such.module"]}, "there is no package 'no_such'; type the name of a module"),
    ],
)
def test_a_key_of_the_sweeper_is_checked(keys: dict[str, object], message: str) -> None:
    with pytest.raises(SpaceError, match=message.replace(".", r"\.")):
        settings_of(KEYS | keys, plan("x=interval(0.0,1.0)"))


def test_directions_follow_from_the_objectives() -> None:
    space = plan("x=interval(0.0,1.0)")
    both = settings_of(KEYS | {"objective": ["val.accuracy", "seconds"]}, space)
    assert both.directions == ["maximize", "minimize"]
    assert settings_of(KEYS, space, "val.accuracy").directions == ["maximize"]
    assert settings_of(KEYS, space, "val.f1").directions == ["minimize"]
    assert settings_of(KEYS, space, "val.f1", ["f1", "top_k"]).directions == ["maximize"]
    assert settings_of(KEYS | {"n_trials": None}, plan("x=a,b")).sampler == "grid"
