"""Tasks are pure functions of (seed, split, index); Omniglot's real archives are read, whole and damaged."""

import hashlib
import logging
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from metalearn.errors import ConfigError, DataError
from metalearn.tasks import glyphs as glyphs_module
from metalearn.tasks.cifar100 import cifar_fs
from metalearn.tasks.common.episodes import (
    Classes,
    EpisodeSpec,
    Seeds,
    Shots,
    shapes_of,
    sizes_of_task,
    turned,
)
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import DataPlace, cached_array
from metalearn.tasks.glyphs import character, glyphs
from metalearn.tasks.omniglot import HELD_BACK, SPLIT_LISTS, characters, classes_of, decoded, names_of, omniglot
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.chunks import chunk_of
from metalearn.types import Episode, GivesSamples, TaskSource
from tests.runs import slow

SPLITS = ("train", "val", "test")


def drawn(seed: int = 0, *, ways: int = 5, shots: Shots = 1, queries: int = 2, rotations: bool = True) -> TaskSource:
    episode = EpisodeSpec(ways, shots, queries)
    return glyphs(episode=episode, image_size=28, channels=1, rotations=rotations, seeds=Seeds(seed, 1))


def waves(seed: int = 0) -> TaskSource:
    return sinusoid(shots=5, queries=10, eval_queries=20, seeds=Seeds(seed, 1))


def real(
    root: Path, *, split: str = "paper", ways: int = 5, rotations: bool = True, download: bool = False,
    within: str | None = None, test: str | None = None,
) -> TaskSource:  # fmt: skip
    return omniglot(
        place=DataPlace(str(root), download), split=split, episode=EpisodeSpec(ways, shots=1, queries=1), image_size=28,
        channels=1, rotations=rotations, seeds=Seeds(0, 1), within=within, test=test,
    )  # fmt: skip


def photographs(root: Path) -> TaskSource:
    return cifar_fs(
        place=DataPlace(str(root), download=False), episode=EpisodeSpec(ways=5, shots=1, queries=1), image_size=32,
        channels=3, rotations=False, seeds=Seeds(0, 1),
    )  # fmt: skip


def same(a: Episode, b: Episode) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_turned_is_rot90(quarters: int) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 4, 4), dtype=np.uint8)
    assert np.array_equal(turned(pictures, quarters), np.rot90(pictures, quarters, axes=(1, 2)))


@pytest.mark.parametrize("make", [drawn, waves])
def test_a_task_depends_on_its_number_alone(make: type[TaskSource]) -> None:
    many = make(0).episodes("train", torch.tensor([3, 7, 5]))
    one = make(0).episodes("train", torch.tensor([7]))
    assert same(one, Episode(*(type(b)(b.x[1:2], b.y[1:2]) for b in many)))
    assert not same(make(0).episodes("train", torch.tensor([8])), one)
    assert not same(make(4).episodes("train", torch.tensor([7])), one)
    for split in ("val", "test"):
        assert same(make(0).episodes(split, torch.tensor([7])), make(4).episodes(split, torch.tensor([7])))
    assert not same(make(0).episodes("val", torch.tensor([7])), make(0).episodes("test", torch.tensor([7])))


def test_sinusoid_is_a_sine_of_the_paper() -> None:
    support, query = waves().episodes("test", torch.arange(50))
    assert support.x.shape == (50, 5, 1) and query.x.shape == (50, 20, 1)
    assert query.x.abs().max() <= 5 and query.y.abs().max() <= 5
    for x, y in zip(torch.cat([support.x, query.x], 1), torch.cat([support.y, query.y], 1), strict=True):
        # y = A sin(x − φ) lies in the span of sin and cos: the least-squares residual is zero.
        basis = torch.cat([x.sin(), x.cos()], dim=1).double()
        coefficients = torch.linalg.lstsq(basis, y.double()).solution
        assert (basis @ coefficients - y).abs().max() < 1e-5
        assert 0.1 - 1e-5 <= coefficients.norm() <= 5 + 1e-5


def test_glyph_episodes_hold_what_they_should() -> None:
    support, query = drawn(shots=2, queries=3).episodes("train", torch.arange(4))
    assert support.x.shape == (4, 10, 1, 28, 28) and query.x.shape == (4, 15, 1, 28, 28)
    assert support.x.dtype == torch.float32 and support.x.min() >= 0 and support.x.max() <= 1
    assert support.y[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert query.y[0].bincount().tolist() == [3] * 5
    pictures = torch.cat([support.x, query.x], dim=1)[0].flatten(1)
    assert len({tuple(row.tolist()) for row in pictures}) == 25


def test_training_episodes_may_have_a_shape_of_their_own() -> None:
    episode = EpisodeSpec(ways=5, shots=1, queries=2, train_ways=7, train_queries=4)
    source = glyphs(episode=episode, image_size=28, channels=1, rotations=True, seeds=Seeds(0, 1))
    support, query = source.episodes("train", torch.arange(3))
    assert support.y.shape == (3, 7) and query.y.shape == (3, 28) and source.classes("train") == 7
    assert same(source.episodes("test", torch.arange(3)), drawn().episodes("test", torch.arange(3)))
    assert source.classes("test") == source.classes("val") == 5


def test_character_tasks_give_plain_samples() -> None:
    tasks = drawn()
    assert isinstance(tasks, GivesSamples)
    source, words = tasks.samples("tasks")
    assert words == "all 8000 pictures of the 400 training classes, upright; the others' tasks evaluate"
    support, query = source.episodes("train", torch.arange(8000))
    assert support.x.shape[1] == 0 and source.classes("train") == 400 and source.size("val") is None
    shown = Counter(
        (picture.mul(255).round().byte().numpy().tobytes(), label)
        for picture, label in zip(query.x[0], query.y[0].tolist(), strict=True)
    )
    assert shown == Counter((picture.tobytes(), label) for label in range(400) for picture in character(label, 28))
    for split in ("val", "test"):
        assert same(source.episodes(split, torch.arange(3)), drawn().episodes(split, torch.arange(3)))
    with pytest.raises(ConfigError, match=r"wants one problem with the same classes .*dataset=glyph_characters"):
        tasks.samples("samples")


def test_characters_are_those_of_earlier_versions() -> None:
    """The digest is that of the pictures that the first version drew: results of different versions can be compared."""
    drawings = hashlib.sha256(b"".join(character(number, 28).tobytes() for number in range(0, 700, 10)))
    assert drawings.hexdigest() == "68fb26cf2faec7434a88c9cc327964444be5a12152fcc09ce3de00d78284fbf0"


def test_glyph_splits_share_no_character() -> None:
    first, sizes = glyphs_module._FIRST, glyphs_module.CLASSES
    ranges = [set(range(first[split], first[split] + sizes[split])) for split in SPLITS]
    assert sum(map(len, ranges)) == len(set.union(*ranges)) == 700


@pytest.mark.parametrize(
    ("split", "sizes"), [("paper", (1100, 100, 423)), ("lake", (864, 100, 659)), ("vinyals", (1028, 172, 423))]
)
def test_omniglot_splits(split: str, sizes: tuple[int, ...]) -> None:
    classes = {part: classes_of(split, part, rotations=False) for part in SPLITS}
    assert tuple(len(classes[part]) for part in SPLITS) == sizes
    assert len({number for part in SPLITS for number, _ in classes[part]}) == 1623
    turned = {part: len(classes_of(split, part, rotations=True)) for part in SPLITS}
    assert tuple(turned.values()) == tuple(size * (4 if split == "vinyals" else 1) for size in sizes)


def test_omniglot_list_names_every_character_once() -> None:
    names = [character.path for character in characters()]
    assert len(set(names)) == len(names) == 1623
    assert len({character.digest for character in characters()}) == 1623
    collections = Counter(name.split("/")[0] for name in names)
    assert collections == {"images_background": 964, "images_evaluation": 659}
    background = {c.path for c in characters() if c.parts["lake"] != "test"}
    assert all(name.startswith("images_background") for name in background)


def test_real_omniglot_episodes(omniglot_root: Path) -> None:
    for split in SPLIT_LISTS:
        support, query = real(omniglot_root, split=split, ways=20).episodes("test", torch.arange(3))
        assert support.x.shape == query.x.shape == (3, 20, 1, 28, 28)
        ink = support.x.flatten(2)
        assert 0.02 < ink.mean() < 0.25  # thin strokes, ink is 1
        assert ink.amax(dim=2).min() > 0.5
    plain = real(omniglot_root, rotations=False).episodes("train", torch.arange(8))
    turned = real(omniglot_root, rotations=True).episodes("train", torch.arange(8))
    assert not torch.equal(plain.support.x, turned.support.x)


def test_tasks_of_one_alphabet_are_set_by_one_drawer(omniglot_root: Path) -> None:
    options: dict[str, Any] = {"split": "alphabets", "ways": 20, "rotations": True, "within": "alphabet"}
    source = real(omniglot_root, **options)
    alphabets: dict[str, set[str]] = {split: set() for split in SPLITS}
    everything = decoded(DataPlace(str(omniglot_root), False), 28)
    places = {character.path: number for number, character in enumerate(characters())}
    for split in SPLITS:
        for index in range(5):
            support, query = source.episodes(split, torch.tensor([index]))
            names = source.class_names(split, index)
            (alphabet,) = {name.rpartition(" ")[0] for name in names}
            alphabets[split].add(alphabet)
            of_class = [next(n for p, n in places.items() if name == names_of([(n, 0)])[0]) for name in names[:3]]
            for batch in (support, query):  # which drawing it is, and how it is turned, is one for all classes
                seen = [
                    {
                        (drawer, turn) for drawer in range(20) for turn in range(4)
                        if np.array_equal(np.rot90(everything[n, drawer], turn), (batch.x[0, way, 0] * 255).round())
                    }
                    for way, n in enumerate(of_class)
                ]  # fmt: skip
                assert set.intersection(*seen)
    assert not alphabets["train"] & alphabets["val"] and alphabets["val"] <= {a.replace("_", " ") for a in HELD_BACK}
    numbers, pictures = source.numbers("train", torch.arange(3)), source.pictures_of("train")
    for task, row in enumerate(numbers):  # as the steps on a GPU take them
        query = source.episodes("train", torch.tensor([task])).query.x[0, :, 0]
        by_number = [np.rot90(pictures[picture], int(turn)) / 255 for turn, _, picture in row.tolist()]
        np.testing.assert_allclose(np.stack(by_number), query, atol=1e-6)


def test_tasks_of_one_alphabet_may_differ_in_shots(omniglot_root: Path) -> None:
    source = omniglot(
        place=DataPlace(str(omniglot_root), False), split="alphabets", episode=EpisodeSpec(5, [1, 5], queries=2),
        image_size=28, channels=1, rotations=True, seeds=Seeds(0, 1), within="alphabet",
    )  # fmt: skip
    sizes = [
        (support.y.shape[1], query.y.shape[1])
        for support, query in (source.episodes("test", torch.tensor([index])) for index in range(8))
    ]
    assert {queries for _, queries in sizes} == {5 * 2} and len({shots for shots, _ in sizes}) > 2


def test_lakes_runs_are_twenty_drawings_and_twenty_questions(omniglot_root: Path) -> None:
    options: dict[str, Any] = {"split": "alphabets", "ways": 20, "rotations": True, "test": "lake_runs"}
    source = real(omniglot_root, **options)
    episode = source.episodes("test", torch.arange(20))
    assert source.size("test") == 20 and source.size("train") is None
    assert episode.support.x.shape == episode.query.x.shape == (20, 20, 1, 28, 28)
    assert source.class_names("test", 2)[5:7] == ["Ge ez 6", "Ge ez 8"]
    digest = hashlib.sha256(((episode.query.x * 255).round().byte()).numpy().tobytes()).hexdigest()
    # Of the drawings that the authors' lists of the runs name, in the order of their classes.
    assert digest == "47dbe7fd513d67034077f39d68bcb533ff162bec3706d376f9f1c5729744ec80"
    distances = torch.cdist(episode.query.x.flatten(2), episode.support.x.flatten(2))
    assert (distances.argmin(dim=2) != episode.query.y).sum() == 316  # of 400, by pixels
    assert len(set(source.identities("test")) & {*source.identities("train"), *source.identities("val")}) == 0


def test_streams_have_600_classes_and_all_their_drawings(omniglot_root: Path) -> None:
    source = real(omniglot_root, split="lake", ways=5, rotations=True, test="stream")
    (support, query), (first, _) = source.episodes("test", torch.tensor([3])), source.episodes("val", torch.tensor([0]))
    assert (source.size("test"), source.classes("test"), source.classes("val")) == (10, 600, 5)
    assert support.x.shape[1] == 9000 and query.x.shape[1] == 3000 and first.x.shape[1] == 5
    assert torch.equal(support.y[0], torch.arange(600).repeat_interleave(15))
    names = source.class_names("test", 3)
    assert len(set(names)) == 600 and names != source.class_names("test", 4)
    label = list(source.class_names("test", 3)).index(names[7])  # upright, and each drawing once
    drawn = torch.cat([x[0, y[0] == label] for x, y in (support, query)])
    whole = source.classes_of("test").pictures(int(np.random.default_rng(3).permutation(659)[7]))
    assert sorted((drawn * 255).round().byte().flatten(1).tolist()) == sorted(whole.reshape(20, -1).tolist())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"test": "stream"}, "type split=alphabets"),
        ({"test": "lake_runs"}, "type split=alphabets"),
        ({"test": "lake_runs", "split": "alphabets", "ways": 5}, "ways=20"),
        ({"within": "alphabet", "split": "lake", "ways": 20}, "has at most"),
        ({"within": "script"}, "must be one of"),
    ],
)
def test_runs_and_alphabets_that_do_not_fit(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        real(Path("unread"), **options)


def test_rotations_turn_a_drawn_class_as_a_whole() -> None:
    pictures = {
        0: np.arange(4 * 9, dtype=np.uint8).reshape(4, 3, 3),
        1: np.arange(36, 72, dtype=np.uint8).reshape(4, 3, 3),
    }
    classes, episode = Classes(["a", "b"], 4, pictures.__getitem__), EpisodeSpec(2, 1, 2)
    source = few_shot(
        lambda: dict.fromkeys(SPLITS, classes), shapes_of(episode), episode, rotations=True, seeds=Seeds(0, 0),
        instead="mnist",
    )  # fmt: skip
    seen = set()
    for number in range(40):
        support, query = source.episodes("train", torch.tensor([number]))
        shown = torch.cat([support.x.view(2, 1, 3, 3), query.x.view(2, 2, 3, 3)], dim=1)
        for group in (shown * 255).round().numpy():
            label = int(group.min() >= 36)
            turns = {
                turn
                for turn in range(4)
                if all(any((np.rot90(p, turn) == g).all() for p in pictures[label]) for g in group)
            }
            assert len(turns) == 1
            seen |= turns
    assert seen == {0, 1, 2, 3}


# Damage


@pytest.fixture
def archives(omniglot_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the archives that may be damaged, and a cache of its own."""
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "deep" / "inside"
    folder.mkdir(parents=True)
    for name in ("images_background.zip", "images_evaluation.zip"):
        shutil.copy(next(omniglot_root.glob(f"**/{name}")), folder / name)
    return folder


def error_of(root: Path) -> str:
    with pytest.raises(DataError) as caught:
        real(root).episodes("train", torch.tensor([0]))
    assert not list(Path(os.environ["METALEARN_CACHE"]).glob("*.npy"))
    return str(caught.value)


def test_a_truncated_archive_is_named(archives: Path) -> None:
    path = archives / "images_evaluation.zip"
    path.write_bytes(path.read_bytes()[:-100_000])
    assert str(path) in error_of(archives)


def test_a_flipped_bit_is_detected_and_the_picture_named(archives: Path) -> None:
    path = archives / "images_background.zip"
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo([name for name in archive.namelist() if name.endswith(".png")][5000])
    data = bytearray(path.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + 60] ^= 1
    path.write_bytes(data)
    message = error_of(archives)
    assert str(path) in message and member.filename in message


def rewritten(path: Path, *, drop: str = "", replace: str = "") -> None:
    """Writes the archive again, without the member `drop` and with `replace` painted over."""
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            if name == replace:
                with target.open(name, "w") as file:
                    Image.new("1", (105, 105), 1).save(file, "PNG")
            elif name != drop:
                target.writestr(name, data)


def test_a_missing_and_a_changed_drawing_are_detected(archives: Path) -> None:
    path = archives / "images_background.zip"
    with zipfile.ZipFile(path) as archive:
        victim = next(name for name in archive.namelist() if name.endswith("_07.png"))
    original = path.read_bytes()
    rewritten(path, drop=victim)
    assert "19 drawings of 20" in error_of(archives)
    path.write_bytes(original)
    rewritten(path, replace=victim)
    assert "not the published ones" in error_of(archives) and victim.rpartition("/")[0] in error_of(archives)


def test_the_message_about_missing_data_says_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    message = error_of(tmp_path)
    assert "images_background.zip" in message and "METALEARN_DATA" in message and str(tmp_path) in message


@slow
def test_folders_and_archives_give_the_same_array(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_archives = real(archives).episodes("val", torch.arange(4))
    unpacked = tmp_path / "unpacked"
    for path in archives.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(unpacked)
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "other"))
    assert same(real(unpacked).episodes("val", torch.arange(4)), from_archives)


# The cache


@pytest.mark.parametrize(
    ("title", "file", "shape", "make"),
    [
        ("Omniglot", "omniglot-v1-28.npy", (1623, 20, 28, 28), real),
        ("CIFAR-100", "cifar100-v1.npy", (100, 600, 32, 32, 3), photographs),
    ],
)
def test_a_root_that_is_not_read_is_named_beside_the_cache_file(
    title: str, file: str, shape: tuple[int, ...], make: Callable[[Path], TaskSource], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path))
    # an earlier test in this process may have sent this logger elsewhere
    monkeypatch.setattr(logging.getLogger("metalearn"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("metalearn"), "propagate", True)
    caplog.set_level(logging.INFO)
    cached_array(Path(file).stem, shape, lambda: np.zeros(shape, np.uint8), title=title)
    for root, level, end in (
        (tmp_path, logging.INFO, ""),
        (tmp_path / "nowhere", logging.WARNING, ", and there is no such folder"),
    ):
        make(root).episodes("train", torch.tensor([0]))
        message = f"{title}: decoded before, read from {tmp_path / file}; dataset.root={root} is not read{end}"
        assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, message)]
        caplog.clear()


def test_the_sizes_of_meta_dataset_are_those_counted_by_hand() -> None:
    """With given β and α."""

    class Given(NamedTuple):
        beta: float
        alphas: Sequence[float]

        def random(self) -> float:
            return 1 - self.beta

        def uniform(self, low: float, high: float, size: int) -> np.ndarray:
            assert (low, high) == (pytest.approx(np.log(0.5)), pytest.approx(np.log(2)))
            return np.array(self.alphas or size * [0.0])

    def sizes(
        pictures: list[int], queries: int, beta: float = 0.25, alphas: Sequence[float] = ()
    ) -> tuple[list[int], int]:
        return sizes_of_task(Given(beta, alphas), np.array(pictures), queries)  # type: ignore[arg-type]

    # 3 queries; room 3, 17, 117, of which 3, 17, 100 count: ⌈0.75⌉ + ⌈4.25⌉ + 25 = 31 shots, of which 28 are shared out
    # as 6 : 20 : 120: 1.15, 3.84, 23.01, and one more for each
    assert sizes([6, 20, 120], 10) == ([2, 4, 24], 3)
    # 2 × 5 shots, of which 8 are shared out as 4 : 1, 6.4 and 1.6; but the first class has 5 besides its queries
    assert sizes([10, 10], 5, 1.0, [np.log(2), np.log(0.5)]) == ([5, 2], 5)
    # 25 for each of 30 classes are more than 500, and (500 − 30) / 30 = 15.67
    assert sizes(30 * [1000], 10) == (30 * [16], 10)


def test_meta_dataset_tasks_follow_from_their_numbers() -> None:
    source = drawn(ways=9, shots="meta_dataset", queries=10)
    tasks = [source.episodes("train", torch.tensor([number])) for number in range(12)]
    counts = [task.support.y[0].bincount() for task in tasks]
    assert {len(count) for count in counts} <= set(range(5, 10)) and len({len(count) for count in counts}) > 2
    assert any(len(count.unique()) > 1 for count in counts)
    for task, count in zip(tasks, counts, strict=True):
        assert (task.query.y[0].bincount() == 10).all() and count.min() >= 1
        assert len(task.support.x[0].flatten(1).unique(dim=0)) == len(task.support.y[0])
    (again, _) = chunk_of(source, "train", torch.tensor([3, 4]))
    assert torch.equal(again.support.x, tasks[3].support.x)
