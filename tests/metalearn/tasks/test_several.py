"""Tasks of several data sets: each is a task of its set, and the figures of a set are those of its own test."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from metalearn.app.job import script, to_job
from metalearn.app.parts import assemble
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError, DataError
from metalearn.runs.metrics import figures_of, summary
from metalearn.tasks.common.episodes import class_names_of, content_of, identities_of
from metalearn.tasks.common.stored import DrawnClass, write_set
from metalearn.types import OfSets, TaskSource
from tests.runs import ROOT, Start

SHAPE = ("dataset.ways=3", "dataset.queries=2", "dataset.image_size=16", "dataset.channels=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small sets `emoji` and `kanji`: pictures of noise, eight classes a split of four pictures each."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, shape in (("emoji", (84, 84, 3)), ("kanji", (56, 56))):
        (folder / name).mkdir()
        classes = [
            (
                DrawnClass(f"{split}{label}", f"{name} {split} {label}", split, [0, 1, 2, 3]),
                rng.integers(0, 256, (4, *shape), np.uint8),
            )
            for split in ("train", "val", "test")
            for label in range(8)
        ]
        write_set(folder / name, name, ["ann", "bob", "cid", "dee"], shape, classes, 96)
    return folder


def source(root: Path, dataset: str, *overrides: str) -> TaskSource:
    config = compose_config([f"dataset={dataset}", f"launch.data={root}", *SHAPE, *overrides]).config
    found: TaskSource = build(config, "dataset")
    return found


def test_each_task_is_one_of_its_set(root: Path) -> None:
    both = source(root, "[emoji,kanji]")
    alone = {name: source(root, name) for name in ("emoji", "kanji")}
    assert isinstance(both, OfSets)
    for split in ("train", "val", "test"):
        whole = both.episodes(split, torch.arange(7))
        for index in range(7):
            name = both.set_of(split, index)
            number = index if split == "train" else index // 2
            assert split == "train" or name == ("emoji", "kanji")[index % 2]
            own = alone[name].episodes(split, torch.tensor([number]))
            for ours, theirs in zip(whole, own, strict=True):
                assert torch.equal(ours.x[index], theirs.x[0]) and torch.equal(ours.y[index], theirs.y[0])
            assert class_names_of(both, split, index) == class_names_of(alone[name], split, number)
        assert identities_of(both, split) == identities_of(alone["emoji"], split) | identities_of(alone["kanji"], split)  # type: ignore[operator]
    assert {both.set_of("train", index) for index in range(7)} == {"emoji", "kanji"}


def test_training_takes_the_sets_by_their_weights(root: Path) -> None:
    both = source(root, "[emoji,kanji]", "dataset.weights=[3,1]")
    assert isinstance(both, OfSets)
    emoji = sum(both.set_of("train", index) == "emoji" for index in range(4000))
    assert abs(emoji / 4000 - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5


def test_other_pictures_of_one_set_are_other_data(root: Path, tmp_path: Path) -> None:
    before = content_of(source(root, "[emoji,kanji]")).digest
    (tmp_path / "kanji").symlink_to(root / "kanji")
    (tmp_path / "emoji").mkdir()
    pictures = np.random.default_rng(0).integers(0, 256, (96, 84, 84, 3), np.uint8)
    pictures[-1] = 0  # a picture that no first task shows
    classes = [
        (DrawnClass(f"{split}{label}", f"emoji {split} {label}", split, [0, 1, 2, 3]), pictures[at : at + 4])
        for at, (split, label) in zip(
            range(0, 96, 4), [(s, n) for s in ("train", "val", "test") for n in range(8)], strict=True
        )
    ]
    write_set(tmp_path / "emoji", "emoji", ["ann", "bob", "cid", "dee"], (84, 84, 3), classes, 96)
    assert content_of(source(tmp_path, "[emoji,kanji]")).digest != before


def test_figures_of_each_set(root: Path) -> None:
    both = source(root, "[emoji,kanji]")
    accuracy = torch.tensor([[0.1], [0.5], [0.3], [0.9], [0.2]])
    values = {"accuracy": accuracy, "loss": 1 - accuracy}
    figures = figures_of(values, both, "test")
    assert figures["accuracy"] == pytest.approx(0.4)
    assert figures["by_set"]["emoji"]["accuracy"] == pytest.approx(0.2)
    assert figures["by_set"]["kanji"] == summary({key: table[[1, 3]] for key, table in values.items()})
    assert "by_set" not in figures_of(values, source(root, "kanji"), "test")


def test_a_run_reports_each_set(root: Path, tmp_path: Path, start: Start) -> None:
    ended = start(
        "dataset=[emoji,kanji]", f"launch.data={root}", *SHAPE, "algorithm=protonet", "model.filters=8",
        "trainer.steps=2", "trainer.val_every=2", "trainer.val_tasks=4", "trainer.test_tasks=4", "logger.plots=false",
        "logger.report=false", "run=several",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.text
    result = json.loads(next(tmp_path.glob("outputs/*/several/result.json")).read_text())
    each = result["test"]["by_set"]
    assert sum(own["accuracy"] for own in each.values()) / 2 == pytest.approx(result["test"]["accuracy"])
    assert "\nof kanji: accuracy" in ended.text


@pytest.mark.parametrize(
    ("dataset", "override", "message"),
    [
        ("[emoji]", "seed=0", r"dataset\.sets=\['emoji'\]: must be a list of different options"),
        ("[emoji,emoji]", "seed=0", "must be a list of different options"),
        ("[emoji,kanjy]", "seed=0", "did you mean kanji"),
        ("[emoji,several]", "seed=0", "must be a list of different options"),
        ("[emoji,kanji]", "dataset.weights=[1]", r"dataset\.weights=\[1\]: must be 2 numbers"),
        ("[emoji,kanji]", "dataset.weights=[1,0]", r"dataset\.weights=0: must be"),
        ("[emoji,kanji]", "dataset.shots=[1,2]", "tasks of several sets have one number of shots"),
        ("[emoji,sinusoid]", "seed=0", "sinusoid has no tasks of 3 classes"),
    ],
)
def test_sets_that_do_not_go_together_are_refused(root: Path, dataset: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(root, dataset, override)


def test_pictures_of_other_shapes_are_refused(root: Path) -> None:
    from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
    from metalearn.tasks.several import several

    small, large = source(root, "emoji"), source(root, "kanji", "dataset.image_size=20")
    tasks = several(
        sets={"emoji": small, "kanji": large}, weights=None, episode=EpisodeSpec(3, 1, 2), image_size=16, channels=1,
        seeds=Seeds(0, 1),
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"tasks differ in shape: emoji \(1, 3, 1, 16, 16\) and kanji \(1, 3, 1, 20, 20\)"
    ):
        tasks.episodes("test", torch.arange(2))


def test_every_set_is_tested_by_two_tasks_or_more(root: Path) -> None:
    keys = ["dataset=[emoji,kanji]", f"launch.data={root}", *SHAPE, "algorithm=protonet", "trainer.test_tasks=3"]
    with pytest.raises(ConfigError, match="test_tasks=3: must be at least 4, two tasks of each of the 2 sets"):
        assemble(to_job(*compose_config(keys), script(ROOT / "train.py"), []))
