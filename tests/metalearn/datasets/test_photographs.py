"""Photographs in every layout that circulates, tiny; what is missing is named, and what is written is read."""

import errno
import hashlib
import io
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from metalearn.cli.data import PHOTOGRAPHS, main
from metalearn.datasets import photographs
from metalearn.datasets.layouts import PublishedPictures
from metalearn.datasets.photographs import SETS, collect
from metalearn.errors import DataError, DiskError
from metalearn.tasks.common.episodes import HoldsClasses, published_list
from metalearn.tasks.common.stored import PICTURES, DrawnClass, read_pictures, read_set, write_set
from metalearn.tasks.image_folder import image_folder
from metalearn.tasks.photographs import cub, mini_imagenet, tiered_imagenet
from metalearn.types import TaskSource
from tests.metalearn.flat import Make, source_of

SPLITS = ("train", "val", "test")
SIZES = {"train": 3, "val": 2, "test": 2}
PER_CLASS = 2
SIDE = 20
MAKERS: dict[str, Make] = {
    "mini_imagenet": mini_imagenet, "tiered_imagenet": tiered_imagenet, "cub": cub,
}  # fmt: skip

Array = NDArray[np.uint8]
Whole = Mapping[str, Mapping[str, Array]]
"""Split → class → its pictures."""


def tiny(name: str) -> PublishedPictures:
    """The set as if the first classes of each split were all, with two small pictures each."""
    source = SETS[name]()
    classes = {one: split for split, size in SIZES.items() for one in source.of(split)[:size]}
    return replace(
        source, side=SIDE, split_of=classes, counts=dict.fromkeys(classes, (PER_CLASS, PER_CLASS)),
        totals={split: size * PER_CLASS for split, size in SIZES.items()},
    )  # fmt: skip


def drawn(published: PublishedPictures) -> Whole:
    rng = np.random.default_rng(0)
    side = published.side
    return {
        split: {
            name: rng.integers(0, 256, (PER_CLASS, side, side, 3), dtype=np.uint8) for name in published.of(split)
        } for split in SPLITS
    }  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))


# The layouts


def png(picture: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def flat_folders(root: Path, whole: Whole) -> None:
    for classes in whole.values():
        for name, pictures in classes.items():
            for number, picture in enumerate(pictures):
                put(root / name / f"{number}.png", png(picture))
    put(root / "n00000001" / "0.png", b"a class of ImageNet that is not in the set")


def split_folders(root: Path, whole: Whole, **names: str) -> None:
    for split, classes in whole.items():
        flat_folders(root / names.get(split, split), {split: classes})
        shutil.rmtree(root / names.get(split, split) / "n00000001")


def bird_folders(root: Path, whole: Whole) -> None:
    flat_folders(root / "CUB_200_2011" / "images", whole)
    flat_folders(root / "CUB_200_2011" / "segmentations", whole)
    put(root / "CUB_200_2011" / "images.txt", b"1 001.Black_footed_Albatross/0.png\n")


def lists(root: Path, whole: Whole, place: str = ".") -> None:
    for split, classes in whole.items():
        rows = ["filename,label"]
        for name, pictures in classes.items():
            for number, picture in enumerate(pictures):
                put(root / "images" / f"{name}{number:08}.jpg", png(picture))
                rows.append(f"{name}{number:08}.jpg,{name}")
        put(root / place / f"{split}.csv", "\n".join(rows).encode())


def stacked(classes: Mapping[str, Array]) -> tuple[Array, list[int]]:
    """All pictures, shuffled, and the number of the class of each."""
    labels = np.repeat(np.arange(len(classes)), PER_CLASS)
    order = np.random.default_rng(1).permutation(len(labels))
    return np.concatenate(list(classes.values()))[order], labels[order].tolist()


def cache_pickles(root: Path, whole: Whole) -> None:
    for split, classes in whole.items():
        images, labels = stacked(classes)
        places = {
            name: np.flatnonzero(np.array(labels) == label).tolist() for label, name in enumerate(classes)
        }  # fmt: skip
        content = {"image_data": images, "class_dict": places}
        put(root / f"mini-imagenet-cache-{split}.pkl", pickle.dumps(content, 2))


def named_pickles(root: Path, whole: Whole) -> None:
    for split, classes in whole.items():
        images, labels = stacked(classes)
        part = "train_phase_train" if split == "train" else split
        content = {
            "data": images, "labels": [64 + label for label in labels],
            "catname2label": {name: 64 + label for label, name in enumerate(classes)},
        }  # fmt: skip
        put(root / f"miniImageNet_category_split_{part}.pickle", pickle.dumps(content, 3))
    put(root / "miniImageNet_category_split_train_phase_val.pickle", b"other pictures of training classes")


def encoded_pickles(root: Path, whole: Whole, *, words: bool = True) -> None:
    names = sorted(row["class"] for row in published_list("tiered_imagenet_classes.csv"))
    texts = {name: f"thing {number}" for number, name in enumerate(names)}
    for split, classes in whole.items():
        images, labels = stacked(classes)
        pngs = [np.frombuffer(png(image), np.uint8)[:, None] for image in images]
        put(root / f"{split}_images_png.pkl", pickle.dumps(pngs, 2))
        content = {
            "label_specific": np.array(labels, np.int32), "label_general": np.zeros(len(labels), np.int32),
            "label_specific_str": [texts[name] for name in classes], "label_general_str": ["everything"],
        }  # fmt: skip
        put(root / f"{split}_labels.pkl", pickle.dumps(content if words else {"labels": labels}, 2))
    if words:
        put(root / "synsets.txt", "\n".join(texts).encode())
        put(root / "class_names.txt", "\n".join(texts.values()).encode())


LAYOUTS: dict[str, tuple[str, str, Callable[[Path, Whole], None]]] = {
    "mini, lists": ("mini_imagenet", "lists beside a folder images", lists),
    "mini, lists in split": ("mini_imagenet", "lists beside a folder images", lambda p, w: lists(p, w, "split")),
    "mini, one folder": ("mini_imagenet", "class folders side by side", flat_folders),
    "mini, three folders": ("mini_imagenet", "class folders in train, val and test", split_folders),
    "mini, cache": ("mini_imagenet", "pickles of arrays", cache_pickles),
    "mini, split": ("mini_imagenet", "pickles of arrays", named_pickles),
    "tiered, folders": (
        "tiered_imagenet", "class folders in train, val and test",
        lambda p, w: split_folders(p, w, train="base", test="novel")),
    "tiered, ImageNet": (
        "tiered_imagenet", "class folders side by side",
        lambda p, w: (flat_folders(p / "CLS-LOC" / "train", w), put(p / "CLS-LOC" / "val" / "1.JPEG", b""))[0]),
    "tiered, encoded": ("tiered_imagenet", "pickles of encoded pictures", encoded_pickles),
    "cub, images": ("cub", "class folders side by side", bird_folders),
    "cub, lists": ("cub", "lists beside a folder images", lists),
}  # fmt: skip


def digest_of(whole: Whole) -> str:
    """The SHA-256 of the array that holds the pictures of each class in the order of their digests."""
    ordered = [
        sorted(classes[name], key=lambda picture: hashlib.sha256(picture.tobytes()).digest())
        for classes in whole.values() for name in sorted(classes)
    ]  # fmt: skip
    file = io.BytesIO()
    np.save(file, np.concatenate(ordered))
    return hashlib.sha256(file.getvalue()).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_set(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name, said, make = LAYOUTS[layout]
    source = tiny(name)
    whole = drawn(source)
    (tmp_path / "data").mkdir()
    make(tmp_path / "data", whole)
    with caplog.at_level(logging.INFO):
        made = collect(source, tmp_path / "data", tmp_path / name, partly=False)
    assert f"{source.title}: {said} in " in caplog.text
    assert f"{source.title}: the classes and the numbers of pictures are the published ones" in caplog.text
    assert made.digest == digest_of(whole)
    read = read_set(tmp_path / name, "")
    assert [(one.key, one.split) for one in read.classes] == [
        (key, split) for split in SPLITS for key in sorted(whole[split])
    ]
    assert len(read_pictures(tmp_path / name, read, "")) == read.total == PER_CLASS * sum(SIZES.values())
    assert f"read from {said}." in (tmp_path / name / "ATTRIBUTION.txt").read_text()
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
        ".lock", "ATTRIBUTION.txt", "index.json", "pictures.npy",
    ]  # fmt: skip


# Reading


def classes_of(source: TaskSource, split: str) -> tuple[list[str], list[set[bytes]]]:
    """The names of a split's classes, and their pictures."""
    assert isinstance(source, HoldsClasses)
    classes = source.classes_of(split)
    return list(classes.names), [
        {picture.tobytes() for picture in classes.pictures(label)} for label in range(len(classes.identities))
    ]


def tasks(name: str, root: Path, **given: Any) -> TaskSource:
    usual: dict[str, Any] = {
        "ways": 2, "shots": 1, "queries": 1, "channels": 3, "rotations": False, "seed": 0, "eval_seed": 1,
        "image_size": tiny(name).side,
    }  # fmt: skip
    return source_of(MAKERS[name], root=str(root), **usual | given)


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Whole:
    """A written set in the folder of its name."""
    source = tiny(request.param)
    whole = drawn(source)
    side = source.side
    classes = [
        (DrawnClass(key, (key.partition(".")[2] or key).replace("_", " "), split, [0] * PER_CLASS), pictures)
        for split, own in whole.items()
        for key, pictures in own.items()
    ]
    (tmp_path / request.param).mkdir()
    write_set(tmp_path / request.param, request.param, ["x"], (side, side, 3), classes, PER_CLASS * len(classes))
    return whole


@pytest.mark.parametrize(("written", "name"), [(name, name) for name in PHOTOGRAPHS], indirect=["written"])
def test_the_datasets_read_what_is_written(written: Whole, name: str, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / name):
        source = tasks(name, root)
        for split in SPLITS:
            names, pictures = classes_of(source, split)
            keys = sorted(written[split])
            words = [key.partition(".")[2] or key for key in keys]
            assert names == [word.replace("_", " ") for word in words]
            assert pictures == [{picture.tobytes() for picture in written[split][key]} for key in keys]
    support, query = source.episodes("test", torch.arange(10))
    side = tiny(name).side
    assert support.x.shape == (10, 2, 3, side, side) and query.x.shape == (10, 2, 3, side, side)
    everything = {picture.tobytes() for pictures in written["test"].values() for picture in pictures}
    for task in torch.cat([support.x, query.x], dim=1):
        shown = {bytes(one.mul(255).round().byte().permute(1, 2, 0).numpy().tobytes()) for one in task}
        assert len(shown) == 4 and shown <= everything


@pytest.mark.parametrize(("written", "name"), [("mini_imagenet", "mini_imagenet")], indirect=["written"])
def test_sizes_and_colours_are_made_from_the_written_set(written: Whole, name: str, tmp_path: Path) -> None:
    small = tasks(name, tmp_path, image_size=10)
    grey = tasks(name, tmp_path, image_size=10, channels=1)
    key = min(written["val"])
    for source, mode in ((small, "RGB"), (grey, "L")):
        wanted = {
            Image.fromarray(one).convert(mode).resize((10, 10), Image.Resampling.LANCZOS).tobytes()
            for one in written["val"][key]
        }
        assert classes_of(source, "val")[1][0] == wanted
    with pytest.raises(
        DataError, match=r"dataset\.image_size=84: the pictures in .* have 20 pixels; type dataset\.image_"
    ):
        tasks(name, tmp_path, image_size=84).episodes("train", torch.tensor([0]))
    with pytest.raises(DataError, match=r"the split 'train' has classes of 2.* This is "):
        tasks(name, tmp_path, queries=2).episodes("train", torch.tensor([0]))


@pytest.mark.parametrize(("written", "name"), [("tiered_imagenet", "tiered_imagenet")], indirect=["written"])
def test_training_classes_are_plain_samples_too(written: Whole, name: str, tmp_path: Path) -> None:
    source = tasks(name, tmp_path)
    samples, _ = source.samples("tasks")  # type: ignore[attr-defined]
    assert samples.classes("train") == SIZES["train"] and samples.classes("test") == 2


@pytest.mark.parametrize(("written", "name"), [("cub", "cub")], indirect=["written"])
def test_what_is_damaged_is_named(written: Whole, name: str, tmp_path: Path) -> None:
    content = bytearray((tmp_path / name / PICTURES).read_bytes())
    content[-100] ^= 255
    (tmp_path / name / PICTURES).write_bytes(content)
    for act in (
        lambda: tasks(name, tmp_path).episodes("train", torch.tensor([0])),
        lambda: collect(tiny(name), tmp_path, tmp_path / name, partly=False),
    ):
        with pytest.raises(DataError, match=r"pictures\.npy is damaged .* remove "):
            act()
    with pytest.raises(DataError, match=r"no folder tiered_imagenet .* metalearn data tiered_imagenet --from="):
        tasks("tiered_imagenet", tmp_path).episodes("train", torch.tensor([0]))


def test_a_class_has_the_same_identity_as_in_folders(tmp_path: Path) -> None:
    source = tiny("cub")
    split_folders(tmp_path / "data", drawn(source))
    collect(source, tmp_path / "data", tmp_path / "cub", partly=False)
    given: dict[str, Any] = {
        "ways": 2, "shots": 1, "queries": 1, "image_size": 8, "channels": 3, "rotations": False, "seed": 0,
        "eval_seed": 1,
    }  # fmt: skip
    folders = source_of(image_folder, root=str(tmp_path / "data"), split="folders", **given)
    assert tasks("cub", tmp_path).identities("val") == folders.identities("val")  # type: ignore[attr-defined]


# What is not as published


def refusal(source: PublishedPictures, data: Path, out: Path) -> str:
    with pytest.raises(DataError) as caught:
        collect(source, data, out, partly=False)
    assert not (out / "index.json").exists() and not list(out.glob("*.npy")) and not list(out.glob(".pic*"))
    return str(caught.value)


def test_what_is_missing_or_too_much_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny("mini_imagenet")
    whole = drawn(source)
    split_folders(tmp_path / "data", whole)
    train, val = (list(whole[split]) for split in ("train", "val"))
    shutil.rmtree(tmp_path / "data" / "train" / train[1])
    (tmp_path / "data" / "val" / val[0] / "1.png").unlink()
    shutil.copy(tmp_path / "data" / "val" / val[1] / "1.png", tmp_path / "data" / "val" / val[1] / "2.png")
    put(tmp_path / "data" / "test" / "dogs" / "1.png", png(whole["val"][val[0]][0]))
    (tmp_path / "data" / "val" / val[1]).rename(tmp_path / "data" / "test" / val[1])
    message = refusal(source, tmp_path / "data", tmp_path / "out")
    for said in (
        f"--from={tmp_path / 'data'}: is not mini-ImageNet as published: 1 classes are in another split: {val[1]} "
        "(in test, belongs to val); ",
        f"train: 1 of 3 classes are missing: {train[1]}; ", f"val: 1 classes have too few pictures: {val[0]} (1 of 2)",
        f"val: 1 classes have too many pictures: {val[1]} (3 of 2)",
        "test: 1 classes do not belong there, and are left out: dogs. ", "or type --partial",
    ):  # fmt: skip
        assert said in message
    made = collect(source, tmp_path / "data", tmp_path / "out", partly=True)
    assert "classes are missing" in caplog.text and (made.total, len(made.classes)) == (2 * 2 + 1 + 3 + 2 * 2, 6)
    assert f"- train: 1 of 3 classes are missing: {train[1]}" in (tmp_path / "out" / "ATTRIBUTION.txt").read_text()

    with pytest.raises(DataError, match="out: holds a part of mini_imagenet, as --partial writes it; remove"):
        collect(source, tmp_path / "data", tmp_path / "out", partly=False)
    assert collect(source, tmp_path / "data", tmp_path / "out", partly=True) == made
    with pytest.raises(DataError, match="the split 'val' has classes of 1"):
        tasks("mini_imagenet", tmp_path / "out").episodes("train", torch.tensor([0]))
    assert f"mini_imagenet: is not as published, as ATTRIBUTION.txt says in {tmp_path / 'out'}" in caplog.text


def test_missing_splits_pictures_and_totals_are_named(tmp_path: Path) -> None:
    source = tiny("mini_imagenet")
    whole = drawn(source)
    cache_pickles(tmp_path, {split: whole[split] for split in ("train", "test")})
    assert "val: there is nothing of its 2 classes" in refusal(source, tmp_path, tmp_path / "out")
    lists(tmp_path / "lists", whole)
    (tmp_path / "lists" / "images" / f"{next(iter(whole['val']))}00000001.jpg").unlink()
    message = refusal(source, tmp_path / "lists", tmp_path / "out")
    assert "the lists name 1 pictures that images does not hold: " in message and "(1 of 2)" in message
    cut = (tmp_path / "lists" / "test.csv").read_text()
    (tmp_path / "lists" / "test.csv").write_text(cut[: cut.rindex(",")])  # as a download that has ended early
    assert "test.csv: is not a list of filename,label" in refusal(source, tmp_path / "lists", tmp_path / "out")

    tiered = tiny("tiered_imagenet")
    flat_folders(tmp_path / "data", drawn(tiered))
    counts = dict.fromkeys(tiered.counts, (1, 5))
    wide = replace(tiered, counts=counts, totals=tiered.totals | {"val": 7})
    message = refusal(wide, tmp_path / "data", tmp_path / "out")
    assert "published: val: has 4 pictures, and 7 are published. " in message


def test_classes_without_names_are_counted(tmp_path: Path) -> None:
    source = tiny("tiered_imagenet")
    whole = drawn(source)
    encoded_pickles(tmp_path, whole, words=False)
    made = collect(source, tmp_path, tmp_path / "tiered_imagenet", partly=False)
    assert [one.key for one in made.classes[:2]] == ["tiered_imagenet/train/0000", "tiered_imagenet/train/0001"]
    names, pictures = classes_of(tasks("tiered_imagenet", tmp_path), "val")
    assert names == ["val 0", "val 1"]
    assert pictures == [{one.tobytes() for one in own} for own in whole["val"].values()]
    encoded_pickles(tmp_path, whole | {"val": dict([*whole["val"].items()][:1])}, words=False)
    assert "val: has 1 classes, and 2 are published" in refusal(source, tmp_path, tmp_path / "out")


def test_digests_are_compared_with_those_that_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny("mini_imagenet")
    cache_pickles(tmp_path / "data", drawn(source))
    own = hashlib.md5((tmp_path / "data" / "mini-imagenet-cache-val.pkl").read_bytes()).hexdigest()
    table = (photographs.HERE / "photograph_files.csv").read_text().replace("f87ddf9b5211920dd73520274371eb6a", own)
    put(tmp_path / "lists" / "photograph_files.csv", table.encode())
    monkeypatch.setattr(photographs, "HERE", tmp_path / "lists")
    with caplog.at_level(logging.INFO):
        collect(source, tmp_path / "data", tmp_path / "out", partly=False)
    assert f"mini-imagenet-cache-val.pkl: its MD5, {own}, is the one that PaddleFSL publishes" in caplog.text
    assert "is another than the 069993a77e65a83bbf8f8de4c9dcca68 that PaddleFSL publishes" in caplog.text


# Bad input


def test_an_unknown_layout_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    for name, place, parts in (
        ("mini_imagenet", "data", ["in no layout that is known", "train.csv, val.csv and test.csv", "class folders",
                                   "mini-imagenet-cache-SPLIT.pkl"]),
        ("tiered_imagenet", "data", ["SPLIT_images_png.pkl"]),
        ("cub", "nowhere", ["there is no such folder"]),
    ):  # fmt: skip
        message = refusal(SETS[name](), tmp_path / place, tmp_path / "out")
        assert all(part in message for part in parts), message


def test_damaged_pictures_are_named(tmp_path: Path) -> None:
    source = tiny("tiered_imagenet")
    whole = drawn(source)
    flat_folders(tmp_path / "data", whole)
    broken = tmp_path / "data" / source.of("val")[1] / "1.png"
    broken.write_bytes(broken.read_bytes()[:800])
    message = refusal(source, tmp_path / "data", tmp_path / "out")
    assert message.startswith(f"1 pictures cannot be read: {broken} (")
    encoded_pickles(tmp_path / "more", whole)
    pngs = pickle.loads((tmp_path / "more" / "val_images_png.pkl").read_bytes())
    put(tmp_path / "more" / "val_images_png.pkl", pickle.dumps([b"no picture", *pngs[1:]]))
    assert "1 pictures cannot be read: one of n0" in refusal(source, tmp_path / "more", tmp_path / "out")


NO_PICTURES = {"data": np.zeros((2, 9), np.uint8), "labels": [0, 1]}
NO_LABELS = {"data": np.zeros((2, 84, 84, 3), np.uint8), "labels": [[0], [1]]}
NO_PLACES = {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"n01532829": [5]}}
BEFORE_THE_FIRST = NO_PLACES | {"class_dict": {"n01532829": [-1]}}


@pytest.mark.parametrize("content", [[1, 2], {"x": 1}, NO_PICTURES, NO_LABELS, NO_PLACES, BEFORE_THE_FIRST])
def test_pickles_of_something_else_are_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"mini-imagenet-cache-train\.pkl: does not hold what it should"):
        collect(tiny("mini_imagenet"), tmp_path, tmp_path / "out", partly=False)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = tiny("cub")
    flat_folders(tmp_path / "data", drawn(source))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match="No space left on device"):
            collect(source, tmp_path / "data", tmp_path / "out", partly=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert collect(source, tmp_path / "data", tmp_path / "out", partly=False).total == 14


# The command


def test_the_command_writes_finds_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METALEARN_DATA", str(tmp_path / "sets"))
    flat_folders(tmp_path / "data", drawn(tiny("cub")))
    command = ["cub", "--from", str(tmp_path / "data")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "train: 97 of 100 classes are missing: 007.Parakeet_Auklet, " in said and "type --partial" in said
    for _ in range(2):
        assert main([*command, "--partial"]) == 0
        assert f"{tmp_path / 'sets' / 'cub'}: 7 classes, 14 pictures, SHA-256 " in capsys.readouterr().out
    assert main(["mini_imagenet", "--from", str(tmp_path / "data"), "--out", str(tmp_path / "sets" / "cub")]) == 2
    assert "holds cub; remove" in capsys.readouterr().err
    assert classes_of(tasks("cub", tmp_path / "sets"), "val")[0] == ["Laysan Albatross", "Least Auklet"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("cub", "cub: nothing is downloaded; type --from=/path/to/the/photographs"),
        ("emoji --from x", "emoji is drawn here: --from and --partial are for mini_imagenet, "),
        ("kanji --partial", "kanji is drawn here"),
        ("imagenet --from x", "invalid choice: 'imagenet'"),
    ],
)
def test_wrong_options_are_named(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert said in capsys.readouterr().err


# The published lists


def test_the_lists_are_as_published() -> None:
    sizes = {name: [len(SETS[name]().of(split)) for split in SPLITS] for name in PHOTOGRAPHS}
    assert sizes == {
        "mini_imagenet": [64, 16, 20], "tiered_imagenet": [351, 97, 160], "cub": [100, 50, 50],
    }  # fmt: skip
    categories = {row["category"]: row["split"] for row in published_list("tiered_imagenet_classes.csv")}
    assert [list(categories.values()).count(split) for split in SPLITS] == [20, 6, 8]
    assert all(categories[row["category"]] == row["split"] for row in published_list("tiered_imagenet_classes.csv"))


def test_birds_are_divided_by_their_place_in_the_alphabet() -> None:
    names = [row["class"] for row in published_list("cub_classes.csv")]
    assert names == sorted(names) and [name[:3] for name in names] == [f"{number:03}" for number in range(1, 201)]
    for number, row in enumerate(published_list("cub_classes.csv")):
        assert row["split"] == ("train" if number % 2 == 0 else "val" if number % 4 == 1 else "test")
    totals = SETS["cub"]().totals
    assert totals == {"train": 5885, "val": 2950, "test": 2953} and sum(totals.values()) == 11_788
