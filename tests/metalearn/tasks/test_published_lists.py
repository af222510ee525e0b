"""CIFAR-FS, FC100 and mini-ImageNet: their lists of classes, and episodes from files like the published ones."""

import csv
import hashlib
import os
import pickle
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from numpy.typing import NDArray

from metalearn.errors import DataError
from metalearn.tasks import cifar100 as cifar100_module
from metalearn.tasks.cifar100 import cifar_fs, classes_of, fc100
from metalearn.tasks.photographs import published_splits
from metalearn.types import Batch
from tests.metalearn.flat import Make, source_of
from tests.runs import slow

SPLITS = ("train", "val", "test")
GIVEN: dict[str, Any] = {
    "ways": 5, "shots": 1, "queries": 2, "channels": 3, "rotations": False, "seed": 0, "eval_seed": 1,
}  # fmt: skip
CIFAR: dict[str, Any] = GIVEN | {"image_size": 32, "download": False}
MINI: dict[str, Any] = GIVEN | {"image_size": 8}

# The lists


def rows() -> list[dict[str, str]]:
    with Path(cifar100_module.__file__).with_name("cifar100_classes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def members(division: str) -> dict[str, set[str]]:
    names = [row["class"] for row in rows()]
    return {split: {names[number] for number in classes_of(division, split)} for split in SPLITS}


@pytest.mark.parametrize(("division", "sizes"), [("cifar_fs", (64, 16, 20)), ("fc100", (60, 20, 20))])
def test_cifar_100_is_divided_as_published(division: str, sizes: tuple[int, ...]) -> None:
    names, superclasses = [row["class"] for row in rows()], Counter(row["superclass"] for row in rows())
    assert len(set(names)) == 100 and names == sorted(names)
    assert len(superclasses) == 20 and set(superclasses.values()) == {5}
    parts = members(division)
    assert tuple(len(parts[split]) for split in SPLITS) == sizes
    assert len(set().union(*parts.values())) == 100


def test_cifar_fs_is_evaluated_on_the_classes_of_its_paper() -> None:
    parts = members("cifar_fs")
    val = (
        "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle otter sea shark "
        "television tractor"
    )
    test = (
        "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail sweet_pepper table "
        "telephone wardrobe whale woman worm"
    )
    assert parts["val"] == set(val.split()) and parts["test"] == set(test.split())


def test_fc100_divides_superclasses_by_the_numbers_of_its_paper() -> None:
    superclasses = sorted({row["superclass"] for row in rows()})  # their numbers follow the alphabet
    numbers = {"train": {1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19}, "val": {8, 11, 13, 16}, "test": {0, 7, 12, 14}}
    for split, classes in members("fc100").items():
        assert classes == {row["class"] for row in rows() if superclasses.index(row["superclass"]) in numbers[split]}


def test_mini_imagenet_is_divided_as_published() -> None:
    parts = {
        split: {name for name, part in published_splits("mini_imagenet").items() if part == split} for split in SPLITS
    }
    assert [len(parts[split]) for split in SPLITS] == [64, 16, 20]
    assert parts["val"] == {
        f"n{number:08}"
        for number in (
            1855672, 2091244, 2114548, 2138441, 2174001, 2950826, 2971356, 2981792, 3075370, 3417042, 3535780, 3584254,
            3770439, 3773504, 3980874, 9256479,
        )
    }  # fmt: skip
    assert parts["test"] == {
        f"n{number:08}"
        for number in (
            1930112, 1981276, 2099601, 2110063, 2110341, 2116738, 2129165, 2219486, 2443484, 2871525, 3127925, 3146219,
            3272010, 3544143, 3775546, 4146614, 4149813, 4418357, 4522168, 7613480,
        )
    }  # fmt: skip


# CIFAR-100's files


class Files(NamedTuple):
    """The folder of the files, and the name of each picture's class."""

    root: Path
    names: NDArray[np.str_]


@pytest.fixture(scope="module")
def cifar_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """Files in full size, in which picture number n carries n, big-endian, in its first four bytes."""
    root = tmp_path_factory.mktemp("cifar")
    folder = root / "cifar-100-python"
    folder.mkdir()
    names = [row["class"] for row in rows()][::-1]  # not the published numbers, so the names must be read
    rng = np.random.default_rng(0)
    all_labels = []
    for name, first, count in (("train", 0, 50_000), ("test", 50_000, 10_000)):
        labels = rng.permutation(np.arange(count) % 100)
        pictures = np.zeros((count, 3072), np.uint8)
        pictures[:, :4] = np.arange(first, first + count, dtype=">u4").view(np.uint8).reshape(-1, 4)
        with (folder / name).open("wb") as file:
            pickle.dump({"data": pictures, "fine_labels": labels.tolist()}, file)
        all_labels.append(labels)
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    yield Files(root, np.array(names)[np.concatenate(all_labels)])
    shutil.rmtree(root)


@pytest.fixture
def cifar(cifar_files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Files:
    """The files, and an empty cache; torchvision is patched to take the files for the published ones."""
    published = torchvision.datasets.CIFAR100
    folder = cifar_files.root / "cifar-100-python"
    digests = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    monkeypatch.setattr(published, "meta", published.meta | {"md5": digests["meta"]})
    monkeypatch.setattr(published, "train_list", [["train", digests["train"]]])
    monkeypatch.setattr(published, "test_list", [["test", digests["test"]]])
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    return cifar_files


def numbers_of(batch: Batch) -> NDArray[np.int64]:
    """The numbers of all pictures [t, n]; a picture is red, green and blue planes in the file, as in a batch."""
    first = batch.x[:, :, 0, 0, :4].mul(255).round().to(torch.uint8).numpy()
    return np.ascontiguousarray(first).view(">u4")[..., 0].astype(np.int64)


@slow
def test_cifar_episodes_are_of_the_classes_of_their_split(cifar: Files) -> None:
    for make, division in ((cifar_fs, "cifar_fs"), (fc100, "fc100")):
        tasks = source_of(make, root=str(cifar.root), **CIFAR)
        for split, classes in members(division).items():
            support, query = tasks.episodes(split, torch.arange(150))
            assert support.x.shape == (150, 5, 3, 32, 32) and query.x.shape == (150, 10, 3, 32, 32)
            assert support.x[:, :, 1:].max() == 0
            given, asked = numbers_of(support), numbers_of(query)
            assert all(len(set(both)) == 15 for both in np.concatenate([given, asked], axis=1).tolist())
            names = cifar.names[given]
            assert all(len(set(task)) == 5 for task in names.tolist()) and set(names.flat) == classes
            assert (np.repeat(names, 2, axis=1) == cifar.names[asked]).all()
            assert given.min() < 50_000 <= given.max()
    assert len(list(Path(os.environ["METALEARN_CACHE"]).glob("*.npy"))) == 1
    turning = source_of(cifar_fs, root=str(cifar.root), **CIFAR | {"rotations": True})
    turned = turning.episodes("val", torch.arange(20))
    seen = turned.support.x[:, :, 0].amax(dim=(0, 1))
    last_bytes = ((0, 3), (28, 0), (31, 28), (3, 31))  # of a number: upright, and turned by one to three quarters
    assert all(seen[place] > 0 for place in last_bytes)


@pytest.mark.parametrize("make", [cifar_fs, fc100])
def test_missing_cifar_files_are_named_with_their_place(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("there is no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    for download, said in ((False, "dataset.download=true"), (True, "no network here")):
        with pytest.raises(DataError) as caught:
            source_of(make, root=str(tmp_path), **CIFAR | {"download": download}).episodes("train", torch.tensor([0]))
        for part in (f"dataset.root={tmp_path}: ", "train, test and meta", str(tmp_path / "cifar-100-python"), said):
            assert part in str(caught.value)
