"""The keys of a group become the arguments of its factory; every message names the key as it is typed."""

import pickle
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from metalearn.config import build as build_module
from metalearn.config.build import build, factories
from metalearn.config.options import groups
from metalearn.errors import ConfigError, Invalid
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.glyphs import glyphs

GLYPHS: dict[str, Any] = {
    "_target_": "metalearn.tasks.glyphs.glyphs", "ways": 5, "shots": 1, "queries": 2, "image_size": 28, "channels": 1,
    "rotations": True, "seed": 0, "eval_seed": 1,
}  # fmt: skip


def dataset(**keys: Any) -> Any:
    """`GLYPHS` with other keys; None leaves a key out."""
    kept = {name: value for name, value in (GLYPHS | keys).items() if value is not None}
    return build(OmegaConf.create({"dataset": kept}), "dataset")


def test_the_fields_of_a_named_tuple_are_keys() -> None:
    direct = glyphs(
        episode=EpisodeSpec(5, 1, 2, train_ways=7), image_size=28, channels=1, rotations=True, seeds=Seeds(3, 1)
    )
    built = dataset(train_ways=7, seed=3)
    for split, ways in (("train", 7), ("test", 5)):
        one, other = (source.episodes(split, torch.arange(2)) for source in (direct, built))
        assert built.classes(split) == ways and torch.equal(one.query.x, other.query.x)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ways": None}, "dataset.ways: missing; metalearn.tasks.glyphs.glyphs needs it; write ways: VALUE into its"),
        ({"eval_seed": None}, "dataset.eval_seed: missing; "),
        ({"image_size": None}, "dataset.image_size: missing; "),
        ({"wayz": 3}, "dataset.wayz: metalearn.tasks.glyphs.glyphs does not take it; did you mean ways?"),
        ({"episode": 3}, "dataset.episode: metalearn.tasks.glyphs.glyphs does not take it"),
        ({"ways": 1}, "dataset.ways=1: must be a whole number of at least 2; type dataset.ways=2 or more"),
        ({"seed": -1}, "dataset.seed=-1: "),
    ],
)
def test_messages_name_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset(**keys)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "metalearn.storage.files.os.system",
        "metalearn.storage.files.write_atomically",
        "metalearn.models.conv4.conv4",
    ],
)
def test_what_is_no_factory_of_its_group_is_not_called(target: str) -> None:
    with pytest.raises(ConfigError, match=f"^dataset._target_={target}: is no factory of dataset; allowed: metalearn"):
        build(OmegaConf.create({"dataset": {"_target_": target, "command": "true"}}), "dataset")


@pytest.mark.parametrize("group", [*groups(), "checkpoint"])
def test_every_group_with_a_target_has_its_factories(group: str) -> None:
    assert all(name.startswith(("metalearn.", "distributed.")) for name in factories(group))
    assert bool(factories(group)) == (group not in ("experiment", "launch", "sweep", "hydra"))


def test_a_refused_value_can_be_pickled_and_names_its_group() -> None:
    error = pickle.loads(pickle.dumps(Invalid("frozen", True, "is for weights", "type GROUP.weights=A or KEY=false")))
    assert str(error) == "frozen=True: is for weights; type weights=A or frozen=false"
    assert error.text("model") == "model.frozen=True: is for weights; type model.weights=A or model.frozen=false"


def refuses(*, error: str) -> None:
    raise {"value": ValueError, "type": TypeError, "lookup": LookupError}[error](f"error={error}: raised here")


def test_only_refused_values_become_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "factories", lambda group: ("tests.metalearn.config.test_build.refuses",))
    for error, kind, message in (
        ("value", ConfigError, "group.error=value: raised here"),
        ("type", ConfigError, "group.error=type: raised here"),
        ("lookup", LookupError, "error=lookup: raised here"),
    ):
        node = {"_target_": "tests.metalearn.config.test_build.refuses", "error": error}
        with pytest.raises(kind) as caught:
            build(OmegaConf.create({"group": node}), "group")
        assert type(caught.value) is kind and str(caught.value) == message
