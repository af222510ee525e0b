"""Plain samples: each epoch shows every sample once, with its own label, and the same numbers give the same samples.
torchvision reads MNIST and CIFAR-10 from real files."""

import csv
import hashlib
import pickle
import shutil
import struct
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from numpy.typing import NDArray

from metalearn.errors import DataError
from metalearn.tasks import omniglot as omniglot_module
from metalearn.tasks.common.episodes import Seeds, class_names_of
from metalearn.tasks.common.samples import Labelled, SampleSource
from metalearn.tasks.common.stored import DataPlace
from metalearn.tasks.glyphs import character, glyph_characters
from metalearn.tasks.omniglot import decoded, omniglot_characters
from metalearn.tasks.torchvision_pictures import cifar10, fashion_mnist, mnist
from metalearn.types import Batch, TaskSource
from tests.metalearn.flat import Make, source_of

Pictures = NDArray[np.uint8]
Sample = tuple[bytes, int]

DRAWN: dict[str, Any] = {
    "ways": 20, "train_drawings": 14, "val_drawings": 1, "image_size": 28, "channels": 1, "known": 32, "seed": 0,
    "eval_seed": 1,
}  # fmt: skip
PHOTOS: dict[str, Any] = {
    "ways": 10, "val_samples": 5000, "image_size": 28, "channels": 1, "download": False, "known": 32, "seed": 0,
    "eval_seed": 1,
}  # fmt: skip


class Drawings(NamedTuple):
    """A source of drawn characters, the drawings [classes, 20, 28, 28] that it shows, and drawings that it must not
    show."""

    make: Make
    shown: Pictures
    unseen: Pictures

    def of(self, split: str) -> Counter[Sample]:
        first, end = {"train": (0, 14), "val": (14, 15), "test": (15, 20)}[split]
        return Counter(
            (picture.tobytes(), label) for label, drawn in enumerate(self.shown) for picture in drawn[first:end]
        )


def glyph_drawings() -> Drawings:
    pictures = np.stack([character(number, 28) for number in range(25)])
    return Drawings(lambda **given: source_of(glyph_characters, **DRAWN | given), pictures[:20], pictures[20:])


def omniglot_drawings(root: Path) -> Drawings:
    with Path(omniglot_module.__file__).with_name("omniglot_characters.csv").open(newline="") as file:
        trains = np.array([row["paper"] == "train" for row in csv.DictReader(file)])
    pictures = decoded(DataPlace(str(root), download=False), 28)
    real: dict[str, Any] = DRAWN | {"root": str(root), "split": "paper", "ways": 1100, "download": False}
    return Drawings(lambda **given: source_of(omniglot_characters, **real | given), pictures[trains], pictures[~trains])


@pytest.fixture(scope="module", params=["glyph_characters", "omniglot_characters"])
def drawings(request: pytest.FixtureRequest) -> Drawings:
    if request.param == "glyph_characters":
        return glyph_drawings()
    return omniglot_drawings(request.getfixturevalue("omniglot_root"))


def queries(source: TaskSource, split: str, indices: Iterable[int]) -> Batch:
    return source.episodes(split, torch.tensor(list(indices), dtype=torch.int64)).query


def as_bytes(batch: Batch) -> list[Sample]:
    """The samples as the pictures' bytes and the labels."""
    pictures = batch.x[0, :, 0].mul(255).round().to(torch.uint8).numpy()
    return [(picture.tobytes(), label) for picture, label in zip(pictures, batch.y[0].tolist(), strict=True)]


def asked(source: TaskSource, split: str, indices: Iterable[int]) -> list[Sample]:
    return as_bytes(queries(source, split, indices))


# Which samples there are


def test_an_epoch_shows_every_drawing_once(drawings: Drawings) -> None:
    source, expected = drawings.make(), drawings.of("train")
    count = expected.total()
    assert count == 14 * len(drawings.shown) and source.size("train") is None
    first, second = (asked(source, "train", range(epoch * count, (epoch + 1) * count)) for epoch in (0, 1))
    assert Counter(first) == Counter(second) == expected
    assert first != second


def test_validation_and_test_show_their_drawings_once(drawings: Drawings) -> None:
    source = drawings.make()
    for split, per_class in (("val", 1), ("test", 5)):
        expected = drawings.of(split)
        assert source.size(split) == expected.total() == per_class * len(drawings.shown)
        assert Counter(asked(source, split, range(expected.total()))) == expected


def test_characters_of_no_training_class_are_never_shown(drawings: Drawings) -> None:
    source = drawings.make()
    unseen = {picture.tobytes() for drawn in drawings.unseen for picture in drawn}
    shown = {
        picture for split in ("train", "val", "test") for picture, _ in asked(source, split, range(len(drawings.shown)))
    }
    assert len(unseen) > 0.99 * 20 * len(drawings.unseen) and not shown & unseen


def test_what_is_beyond_a_split_is_refused(drawings: Drawings) -> None:
    source = drawings.make()
    for split in ("val", "test"):
        size = source.size(split)
        assert size is not None
        queries(source, split, [size - 1])
        for index in (size, 10 * size, -1):
            with pytest.raises(ValueError, match=rf"{split}.*has {size} samples.* {index}$"):
                queries(source, split, [0, index])


def test_known_samples_are_training_samples(drawings: Drawings) -> None:
    supports = [
        drawings.make(seed=seed).episodes(split, torch.tensor([index])).support
        for seed, split, index in ((0, "val", 0), (0, "test", 3), (7, "test", 0))
    ]
    known = [as_bytes(support) for support in supports]
    assert known[0] == known[1] == known[2] and len(known[0]) == 32
    assert not Counter(known[0]) - drawings.of("train")
    training = drawings.make().episodes("train", torch.tensor([0, 5]))
    assert training.support.x.shape == (1, 0, 1, 28, 28) and training.support.y.shape == (1, 0)


# Which order they come in


def glyphs_made(*, seed: int = 0, eval_seed: int = 1) -> TaskSource:
    return source_of(glyph_characters, **DRAWN | {"seed": seed, "eval_seed": eval_seed})


def order(source: TaskSource, split: str) -> list[Sample]:
    return asked(source, split, range({"train": 280, "val": 20, "test": 100}[split]))


@pytest.mark.parametrize(
    ("split", "decides", "leaves"),
    [("train", "seed", "eval_seed"), ("val", "eval_seed", "seed"), ("test", "eval_seed", "seed")],
)
def test_the_order_is_a_shuffle_that_depends_on_one_seed(split: str, decides: str, leaves: str) -> None:
    start = order(glyphs_made(), split)
    labels = [label for _, label in start]
    assert labels != sorted(labels) and sum(label == 0 for label in labels[:140]) < 14
    assert order(glyphs_made(**{leaves: 5}), split) == start
    assert order(glyphs_made(**{decides: 5}), split) != start


def test_a_sample_depends_on_its_number_alone() -> None:
    in_order = glyphs_made()
    train, val = asked(in_order, "train", range(5 * 280)), order(in_order, "val")
    apart = glyphs_made()
    rng = np.random.default_rng(0)
    for index in rng.integers(0, 5 * 280, 200).tolist():
        assert asked(apart, "train", [index]) == [train[index]]
        assert asked(apart, "val", [index % 20]) == [val[index % 20]]
    mixed = rng.integers(0, 5 * 280, 300).tolist()
    assert asked(apart, "train", mixed) == [train[index] for index in mixed]
    far = asked(glyphs_made(), "train", [280 * 10**6 + 3])
    assert asked(apart, "train", [280 * 10**6 + 3]) == far


def test_data_is_read_once_and_only_when_asked_for() -> None:
    reads = []

    def load() -> dict[str, Labelled]:
        reads.append(1)
        part = Labelled(np.arange(8 * 3, dtype=np.uint8).reshape(2, 2, 2, 3), np.arange(2))
        return {"train": part, "val": part, "test": part}

    source = SampleSource(load, {"train": 2, "val": 2, "test": 2}, ["a", "b"], known=1, seeds=Seeds(0, 0))
    assert source.classes("train") == 2 and not reads
    for split in ("train", "val", "test"):
        x, y = queries(source, split, [0, 1])
        assert x.shape == (1, 2, 3, 2, 2) and x.dtype == torch.float32 and y.dtype == torch.int64
        first = int(y[0].tolist().index(0))
        assert x[0, first, 1].mul(255).round().tolist() == [[1, 4], [7, 10]]  # green is every third number from 1
    assert reads == [1]


def test_published_pictures_have_the_names_of_their_classes() -> None:
    """torchvision has the names of two; it reads those of CIFAR-10 from the files."""
    given = {"root": "nowhere", **PHOTOS}
    shown = source_of(mnist, **given), source_of(fashion_mnist, **given), source_of(cifar10, **given | COLOUR)
    digits, clothes, things = (class_names_of(source, "test", 0) for source in shown)
    assert [f"{name} - " for name in digits] == [name[:4] for name in torchvision.datasets.MNIST.classes]
    assert clothes == torchvision.datasets.FashionMNIST.classes
    assert len(things) == 10 and sorted(things) == list(things)  # its authors have them in the order of the alphabet


# Files as they are published

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: Pictures) -> bytes:
    """The IDX format: two zeros, 8 for bytes, the number of dimensions, their big-endian sizes, the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, contents: Iterable[Pictures]) -> None:
    folder.mkdir(parents=True)
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).write_bytes(idx(content))


def numbered(count: int, length: int, *, start: int) -> Pictures:
    """Flat pictures [count, length] that carry their number, from `start`, in four bytes, then a fixed pattern."""
    pictures = np.empty((count, length), np.uint8)
    pictures[:] = np.arange(length) * 7 % 251
    pictures[:, :4] = np.arange(start, start + count, dtype=">u4").view(np.uint8).reshape(-1, 4)
    return pictures


def label_of(number: NDArray[np.int64]) -> NDArray[np.int64]:
    return (number // 3 + number // 1000) % 10


def shown_numbers(source: TaskSource, split: str, first: int, count: int, template: Pictures) -> list[int]:
    """The numbers of the pictures shown, after a check that each is whole and has its label."""
    numbers = []
    for begin in range(first, first + count, 1000):
        x, y = queries(source, split, range(begin, min(begin + 1000, first + count)))
        flat = x[0].mul_(255).round_().to(torch.uint8).flatten(1).numpy()
        read = flat[:, :4].copy().view(">u4")[:, 0].astype(np.int64)
        assert (flat[:, 4:] == template[4:]).all()
        assert (y[0].numpy() == label_of(read)).all()
        numbers += read.tolist()
    return numbers


@pytest.fixture(scope="module")
def idx_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """MNIST's and Fashion-MNIST's files in full size; Fashion-MNIST's pictures are numbered from 100000."""
    root = tmp_path_factory.mktemp("idx")
    for name, start in (("MNIST", 0), ("FashionMNIST", 100_000)):
        pictures = numbered(70_000, 784, start=start)
        labels = label_of(np.arange(start, start + 70_000)).astype(np.uint8)
        shaped = pictures.reshape(-1, 28, 28)
        write_idx(root / name / "raw", (shaped[:60_000], labels[:60_000], shaped[60_000:], labels[60_000:]))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("there is no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.parametrize(("factory", "start"), [(mnist, 0), (fashion_mnist, 100_000)])
@pytest.mark.usefixtures("no_network")
def test_idx_files_are_read_without_a_network(factory: Make, start: int, idx_root: Path) -> None:
    source = source_of(factory, root=str(idx_root), **PHOTOS | {"download": True})
    template = numbered(1, 784, start=0)[0]
    train = shown_numbers(source, "train", 0, 55_000, template)
    val = shown_numbers(source, "val", 0, 5000, template)
    test = shown_numbers(source, "test", 0, 10_000, template)
    assert sorted(train + val) == list(range(start, start + 60_000))
    assert sorted(test) == list(range(start + 60_000, start + 70_000))
    assert (source.size("train"), source.size("val"), source.size("test")) == (None, 5000, 10_000)
    assert max(val) - min(val) > 50_000


def test_the_same_pictures_validate_in_every_run(idx_root: Path) -> None:
    template = numbered(1, 784, start=0)[0]
    one, other = (source_of(mnist, root=str(idx_root), **PHOTOS | {"seed": s, "eval_seed": s + 1}) for s in (0, 8))
    first, second = (shown_numbers(source, "val", 0, 5000, template) for source in (one, other))
    assert first != second and set(first) == set(second)
    known = one.episodes("val", torch.tensor([0])).support
    numbers = known.x[0].mul(255).round().to(torch.uint8).flatten(1).numpy()[:, :4].copy().view(">u4")[:, 0]
    assert len(set(numbers.tolist())) == 32 and not set(numbers.tolist()) & set(first) and numbers.max() < 60_000


def refusal(factory: Make, root: Path, **given: Any) -> str:
    with pytest.raises(DataError) as caught:
        source_of(factory, root=str(root), **PHOTOS | given).episodes("train", torch.tensor([0]))
    return str(caught.value)


COLOUR: dict[str, Any] = {"image_size": 32, "channels": 3}


@pytest.mark.parametrize(
    ("factory", "given", "folder", "file"),
    [
        (mnist, {}, "MNIST/raw", FILES[0]), (fashion_mnist, {}, "FashionMNIST/raw", FILES[3]),
        (cifar10, COLOUR, "cifar-10-batches-py", "test_batch"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_network")
def test_missing_files_are_named_with_their_place(
    factory: Make, given: dict[str, Any], folder: str, file: str, tmp_path: Path
) -> None:
    message = refusal(factory, tmp_path, **given)
    place = [f"dataset.root={tmp_path}: ", str(tmp_path / folder), file]
    assert all(part in message for part in (*place, "METALEARN_DATA=", "dataset.download=true")), message
    assert list(tmp_path.iterdir()) == []
    message = refusal(factory, tmp_path, **given, download=True)
    assert all(part in message for part in (*place, "dataset.root=/path", "no network here")), message


@pytest.mark.parametrize(("pictures", "labels"), [(10, 60_000), (60_000, 10)])
def test_idx_files_of_another_length_or_cut_short_are_refused(pictures: int, labels: int, tmp_path: Path) -> None:
    blank = np.zeros((pictures, 28, 28), np.uint8)
    write_idx(tmp_path / "MNIST" / "raw", (blank, np.zeros(labels, np.uint8), blank[:10], blank[:10, 0, 0]))
    message = refusal(mnist, tmp_path)
    assert "should be (60000, 28, 28) and 60000 labels" in message
    assert f"is ({pictures}, 28, 28) and {labels} labels" in message and str(tmp_path) in message
    with (tmp_path / "MNIST" / "raw" / FILES[0]).open("r+b") as file:
        file.truncate(16 + 784)
    message = refusal(mnist, tmp_path)
    assert "MNIST is not there or damaged" in message and "should be" not in message
    shutil.rmtree(tmp_path / "MNIST")


# CIFAR-10's batches are pickles


@pytest.fixture
def cifar_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Batches in full size with numbered pictures; torchvision is patched to take them for the published ones."""
    root = tmp_path_factory.mktemp("cifar")
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    digests = {}

    def write(name: str, content: dict[str, Any]) -> None:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        digests[name] = hashlib.md5(data).hexdigest()

    for batch, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pictures, labels = numbered(10_000, 3072, start=batch * 10_000), label_of(np.arange(10_000) + batch * 10_000)
        write(name, {"data": pictures, "labels": labels.tolist()})
    write("batches.meta", {"label_names": list("abcdefghij")})
    published = torchvision.datasets.CIFAR10
    monkeypatch.setattr(published, "meta", published.meta | {"md5": digests.pop("batches.meta")})
    monkeypatch.setattr(published, "test_list", [["test_batch", digests.pop("test_batch")]])
    monkeypatch.setattr(published, "train_list", list(map(list, digests.items())))
    yield root
    shutil.rmtree(root)


@pytest.mark.usefixtures("no_network")
def test_cifar_batches_are_read_as_red_green_and_blue_planes(cifar_root: Path) -> None:
    source = source_of(cifar10, root=str(cifar_root), **PHOTOS | COLOUR | {"download": True})
    assert queries(source, "train", [0, 1]).x.shape == (1, 2, 3, 32, 32)
    template = numbered(1, 3072, start=0)[0]
    train = shown_numbers(source, "train", 0, 45_000, template)
    val = shown_numbers(source, "val", 0, 5000, template)
    assert sorted(train + val) == list(range(50_000))
    assert sorted(shown_numbers(source, "test", 0, 10_000, template)) == list(range(50_000, 60_000))


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.usefixtures("no_network")
def test_an_unpublished_cifar_batch_is_not_unpickled(tmp_path: Path) -> None:
    folder, sprung = tmp_path / "cifar-10-batches-py", tmp_path / "sprung"
    folder.mkdir()
    data = pickle.dumps(Trap(sprung))
    pickle.loads(data)
    sprung.unlink()  # the trap works
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(data)
    for download in (False, True):
        assert "CIFAR10 is not there or damaged" in refusal(cifar10, tmp_path, **COLOUR, download=download)
    assert not sprung.exists()
