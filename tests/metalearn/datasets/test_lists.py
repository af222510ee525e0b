"""The committed lists, and the sets that were built of them: whole families and subgroups, nothing shared."""

import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from metalearn.datasets.drawing import HERE, designs_of, listed
from metalearn.tasks.common.drawn_set import INDEX, DrawnSet, read_pictures, read_set
from tests.runs import slow

MODIFIERS = re.compile(r"-?\b(200d|fe0f|2640|2642|1f3f[b-f]|1f9b[0-3]|27a1)\b")
PERSONS = {"1f468": "1f9d1", "1f469": "1f9d1", "1f466": "1f9d2", "1f467": "1f9d2", "1f474": "1f9d3", "1f475": "1f9d3"}


def test_every_emoji_has_four_designs_and_whole_subgroups_go_to_a_split() -> None:
    rows = listed(HERE / "emoji_classes.csv")
    designs = [design.name for design in designs_of(HERE / "emoji_designs.csv")]
    assert Counter(one.one.split for one in rows) == {"train": 891, "val": 222, "test": 284}
    assert len({one.one.key for one in rows}) == len(rows)
    assert min(sum(bool(one.row[name]) for name in designs) for one in rows) >= 4
    splits = defaultdict(set)
    for one in rows:
        splits[one.row["group"], one.row["subgroup"]].add(one.one.split)
    assert {len(found) for found in splits.values()} == {1}


def test_emoji_that_differ_in_gender_hair_or_skin_are_one_class() -> None:
    families = Counter()
    for one in listed(HERE / "emoji_classes.csv"):
        signs = MODIFIERS.sub("", one.one.key).strip("-").split("-")
        families["-".join(PERSONS.get(sign, sign) for sign in signs)] += 1
    assert [family for family, count in families.items() if count > 1] == []


def test_the_flag_is_no_map_of_japan() -> None:
    rows = {one.one.key: one.row for one in listed(HERE / "emoji_classes.csv")}
    assert rows["1f5fe"]["name"] == "map of Japan" and not rows["1f5fe"]["streamline-emojis"]


@pytest.mark.parametrize("name", ["emoji_designs", "fonts"])
def test_every_package_is_pinned_and_has_a_licence(name: str) -> None:
    designs = designs_of(HERE / f"{name}.csv")
    assert len({design.name for design in designs}) == len(designs)
    for design in designs:
        assert re.fullmatch("[0-9a-f]{64}", design.sha256) and design.version and design.licence and design.author


def built(name: str) -> tuple[DrawnSet, NDArray[np.uint8]]:
    folder = Path(os.environ.get("METALEARN_DATA", "data")) / name
    if not (folder / INDEX).exists():
        pytest.skip(f"{folder} is not built: metalearn data {name}")
    index = read_set(folder, "")
    return index, read_pictures(folder, index, "")


def cropped(picture: NDArray[np.uint8]) -> NDArray[Any]:
    """A picture's ink in a square of 32 pixels, as darkness: [32, 32] or [32, 32, 3]."""
    dark = 255 - picture if picture.ndim == 3 else picture
    rows, columns = np.nonzero((dark.max(2) if dark.ndim == 3 else dark) > 10)
    ink = dark[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    side = max(ink.shape[:2])
    square = np.zeros((side, side, *dark.shape[2:]), np.uint8)
    top, left = (side - ink.shape[0]) // 2, (side - ink.shape[1]) // 2
    square[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return np.asarray(Image.fromarray(square).resize((32, 32), Image.Resampling.BOX), np.int16)


@slow
@pytest.mark.parametrize("name", ["emoji", "kanji"])
def test_no_picture_is_shown_in_two_splits(name: str) -> None:
    """Of every pair of a split and another one whose ink correlates, how much of the ink differs."""
    index, pictures = built(name)
    sizes = [len(one.drawers) for one in index.classes]
    label = np.repeat(np.arange(len(sizes)), sizes)
    drawer = np.concatenate([one.drawers for one in index.classes])
    split = np.array([one.split for one in index.classes])[label]
    squares = np.stack([cropped(picture) for picture in pictures])
    features = squares.reshape(len(squares), -1).astype(np.float32)
    features -= features.mean(1, keepdims=True)
    features[~features.any(1)] = 1  # full squares, which resemble each other
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    shared = []
    # Emoji are compared across designs too. A font resembles itself most: kanji are compared within each.
    groups = [np.arange(len(label))] if name == "emoji" else [np.flatnonzero(drawer == n) for n in set(drawer.tolist())]
    for group in groups:
        for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
            a, b = group[split[group] == one], group[split[group] == other]
            for i, j in zip(*np.nonzero(features[a] @ features[b].T > 0.9), strict=True):
                x, y = squares[a[i]], squares[b[j]]
                differ = np.abs(x - y) > 48
                ink = np.maximum(x, y) > 10
                if x.ndim == 3:
                    differ, ink = differ.any(2), ink.any(2)
                if differ.sum() < 0.04 * ink.sum():
                    names = [f"{index.classes[label[k]].name} by {index.drawers[drawer[k]]}" for k in (a[i], b[j])]
                    shared.append(" = ".join(names))
    assert not shared


@slow
@pytest.mark.parametrize("name", ["emoji", "kanji"])
def test_what_is_built_is_what_the_list_says(name: str) -> None:
    index, _ = built(name)
    rows = listed(HERE / f"{name}_classes.csv")
    assert [(one.key, one.split) for one in index.classes] == [(row.one.key, row.one.split) for row in rows]
    assert [one.digest for one in index.classes] == [row.digest for row in rows]
