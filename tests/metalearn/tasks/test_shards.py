"""Shards of decoded pictures: the same numbers as without them, only what is needed mapped, and damage named early."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metalearn.cli.data import shard
from metalearn.config.compose import compose_config
from metalearn.config.saved import changed_config
from metalearn.config.values import to_container
from metalearn.errors import DataError
from metalearn.tasks.common.episodes import EpisodeShape, EpisodeSpec, Seeds
from metalearn.tasks.common.stored import INDEX, DataPlace, ShardForm, Shards, shard_name, write_shards
from metalearn.tasks.glyphs import glyph_characters, glyph_pretraining, glyphs
from metalearn.tasks.omniglot import omniglot, omniglot_characters
from metalearn.types import TaskSource
from tests.runs import Start, assert_same_bytes

SIZE = 16
SEEDS = Seeds(0, 1)
FORM = ShardForm("letters-v1", (2, 3))
CLASSES = {f"class{number}": np.full((4 + number, 2, 3), number, np.uint8) for number in range(6)}
GROUPS = [dict(list(CLASSES.items())[first : first + 2]) for first in (0, 2, 4)]
RUN = (
    f"dataset.image_size={SIZE}", "trainer.steps=3", "trainer.meta_batch_size=4", "trainer.val_tasks=4",
    "trainer.test_tasks=4", "logger.plots=false", "logger.report=false",
    "logger.tensorboard=false",
)  # fmt: skip


INDICES = torch.arange(40)


@pytest.fixture(scope="module")
def glyph_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The glyphs, 30 classes a shard."""
    folder = tmp_path_factory.mktemp("shards") / "glyphs"
    assert shard(["dataset=glyphs", f"dataset.image_size={SIZE}", "--out", str(folder), "--classes", "30"]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of two classes each."""
    folder = tmp_path / "letters"
    folder.mkdir()
    assert write_shards(folder, FORM, GROUPS) == 3
    return folder


def assert_same(source: TaskSource, other: TaskSource, *splits: str) -> None:
    for split in splits:
        for one, two in zip(source.episodes(split, INDICES), other.episodes(split, INDICES), strict=True):
            assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y)


# The same numbers


def test_glyphs_from_shards_are_those_that_are_drawn(glyph_shards: Path) -> None:
    common: dict[str, Any] = {"image_size": SIZE, "channels": 1, "seeds": SEEDS}
    cases: list[tuple[Callable[..., TaskSource], dict[str, Any]]] = [
        (glyphs, {"episode": EpisodeSpec(5, 1, 2), "rotations": True}),
        (glyph_characters, {"ways": 200, "train_drawings": 14, "val_drawings": 1, "known": 16}),
        (glyph_pretraining, {"train_classes": 100, "episode": EpisodeShape(5, 1, 2), "rotations": True}),
    ]
    for factory, arguments in cases:
        drawn = factory(**arguments, **common)
        assert_same(drawn, factory(**arguments, **common, shards=str(glyph_shards)), "train", "val", "test")


def test_a_run_with_shards_has_the_bits_of_a_run_without(glyph_shards: Path, start: Start, tmp_path: Path) -> None:
    given = (f"dataset.shards={glyph_shards}", "workers=2")
    for name, extra in (("without", ("workers=1",)), ("with", given)):
        outcome = start(*RUN, *extra, f"hydra.run.dir={tmp_path / name}").wait()
        assert outcome.code == 0, outcome.text
    assert_same_bytes(tmp_path / "without", tmp_path / "with")


def test_every_split_list_of_omniglot_reads_the_same_shards(omniglot_root: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "omniglot")
    assert shard(["dataset=omniglot", "dataset.split=vinyals", f"dataset.root={omniglot_root}", "--out", out]) == 0
    places = DataPlace(str(omniglot_root), download=False), DataPlace("absent", download=False, shards=out)
    for split in ("paper", "lake", "vinyals"):
        given: dict[str, Any] = {
            "split": split, "episode": EpisodeSpec(5, 1, 1), "image_size": 28, "channels": 1, "rotations": True,
        }  # fmt: skip
        tasks = [omniglot(place=place, seeds=SEEDS, **given) for place in places]
        assert_same(tasks[0], tasks[1], "train", "val", "test")
    plain: dict[str, Any] = {
        "split": "paper", "ways": 1100, "train_drawings": 14, "val_drawings": 1, "image_size": 28, "channels": 1,
        "known": 16,
    }  # fmt: skip
    samples = [omniglot_characters(place=place, seeds=SEEDS, **plain) for place in places]
    assert_same(samples[0], samples[1], "train", "val", "test")


def test_an_evaluation_uses_the_trainings_shards(folder: Path) -> None:
    for place, taken in ((folder, str(folder)), (folder / "absent", None)):
        saved = to_container(compose_config([f"dataset.shards={place}"]).config)
        assert changed_config(saved, [], {}).dataset.shards == taken


# Only what is needed


def test_a_shard_is_mapped_when_a_class_in_it_is_asked_for(folder: Path) -> None:
    shards = Shards(str(folder), FORM, list(CLASSES))
    assert shards.counts == [4, 5, 6, 7, 8, 9] and not mapped(folder)
    pictures = shards.pictures(3)
    assert mapped(folder) == {shard_name(1)}
    np.testing.assert_array_equal(pictures, np.full((7, 2, 3), 3))
    assert not pictures.flags.writeable


def mapped(folder: Path) -> set[str]:
    """The names of the files in a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(folder) in line}


# Bad input


def edit(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | changes))


def flip(folder: Path) -> None:
    data = bytearray((folder / shard_name(1)).read_bytes())
    data[-1] ^= 1
    (folder / shard_name(1)).write_bytes(data)


WRONG: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no index": (INDEX, lambda folder: (folder / INDEX).unlink()),
    "half an index": (INDEX, lambda folder: os.truncate(folder / INDEX, 40)),
    "another program's index": (INDEX, lambda folder: edit(folder, format="shards 0")),
    "an edited index": (INDEX, lambda folder: edit(folder, picture=[3, 2])),
    "no shard": (shard_name(2), lambda folder: (folder / shard_name(2)).unlink()),
    "half a shard": (shard_name(1), lambda folder: os.truncate(folder / shard_name(1), 20)),
    "a flipped bit": (shard_name(1), flip),
}


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_named_before_anything_is_mapped(name: str, folder: Path) -> None:
    file, damage = WRONG[name]
    damage(folder)
    with pytest.raises(DataError, match=rf"dataset\.shards={folder}: {file} ") as caught:
        Shards(str(folder), FORM, list(CLASSES))
    assert "dataset.shards=null" in str(caught.value) and not mapped(folder)


@pytest.mark.parametrize(
    ("form", "classes", "named"),
    [
        (FORM._replace(decoder="glyphs-v1"), list(CLASSES), "shards of letters-v1, and the dataset is glyphs-v1"),
        (FORM._replace(shape=(2, 4)), list(CLASSES), r"shape \[2, 3\], and the dataset's \[2, 4\]"),
        (FORM, [*CLASSES, "more"], "1 of the dataset's 7 classes are not there"),
    ],
)
def test_shards_of_another_dataset_are_refused(form: ShardForm, classes: list[str], named: str, folder: Path) -> None:
    with pytest.raises(DataError, match=named):
        Shards(str(folder), form, classes)


def test_a_run_refuses_shards_of_another_dataset(folder: Path, start: Start, tmp_path: Path) -> None:
    outcome = start(*RUN, f"dataset.shards={folder}", f"hydra.run.dir={tmp_path / 'run'}").wait()
    assert outcome.code == 2 and "these are shards of letters-v1, and the dataset is glyphs-v1" in outcome.text
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_shards_hold_every_drawer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["dataset=omniglot_drawers", "dataset.held_drawers=[1,2]", "dataset.test=cross"]
    assert shard([*keys, "--out", str(tmp_path / "out")]) == 2
    assert "dataset.held_drawers=[1, 2]: shards hold the drawings of all drawers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keys", [["dataset=glyph_characters"], ["dataset=image_folder", "dataset.root=x"]])
def test_what_cannot_be_cut_is_refused(keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard([*keys, "--out", str(tmp_path / "out")]) == 2
    assert "cannot be cut into shards; type dataset=omniglot" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
