"""Classes that several people have drawn: who is held back is seen nowhere but where the test says so."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metalearn.app.parts import REPORT, check_unseen, seen_in, warn_of_seen_drawers
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.errors import DataError
from metalearn.runs.metrics import KEY, SEEN_DRAWERS, Seen, from_meta, to_meta
from metalearn.tasks.common.stored import DrawnClass, write_set
from metalearn.types import Episode, GivesSamples, TaskSource

DRAWERS = ["ann", "bob", "cid", "dee", "eve", "fay"]
CLASSES = {"train": 9, "val": 7, "test": 8}


def coloured(label: int, drawer: int) -> Any:
    """A picture whose red tells the class, and whose green the drawer."""
    picture = np.zeros((84, 84, 3), np.uint8)
    picture[..., 0], picture[..., 1] = 10 * label, 20 * drawer
    return picture


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 24 classes, of which every third one lacks the last three drawers."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "emoji").mkdir()
    splits = [split for split, count in CLASSES.items() for _ in range(count)]
    everyone = [list(range(3 if label % 3 == 0 else 6)) for label in range(len(splits))]
    classes = [
        (DrawnClass(str(label), f"name {label}", splits[label], drawn), np.stack([coloured(label, d) for d in drawn]))
        for label, drawn in enumerate(everyone)
    ]
    write_set(folder / "emoji", "emoji", DRAWERS, (84, 84, 3), classes, sum(map(len, everyone)))
    return folder


def source(root: Path, *overrides: str) -> TaskSource:
    config = compose_config([
        "dataset=emoji", f"dataset.root={root}", "dataset.image_size=84", "dataset.ways=3", "dataset.queries=2",
        *overrides,
    ]).config  # fmt: skip
    found: TaskSource = build(config, "dataset")
    return found


def shown(episode: Episode) -> tuple[list[list[int]], list[list[int]]]:
    """(drawers, labels) of the support set and of the query set, by the colours of the pictures."""
    pixels = [(batch.x[:, :, :2, 0, 0] * 255).round().to(torch.int64).flatten(0, 1) for batch in episode]
    return [(one[:, 1] // 20).tolist() for one in pixels], [(one[:, 0] // 10).tolist() for one in pixels]


HELD = "dataset.held_drawers=[bob,dee,fay]"


@pytest.mark.parametrize(
    ("test", "of_support", "of_query"),
    [("all", {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}), ("held", {1, 3, 5}, {1, 3, 5}), ("cross", {0, 2, 4}, {1, 3, 5})],
)
def test_held_drawers_are_shown_by_the_test_alone(
    root: Path, test: str, of_support: set[int], of_query: set[int]
) -> None:
    tasks = source(root, HELD, f"dataset.test={test}", "dataset.queries=1")
    for split in ("train", "val"):
        drawers, _ = shown(tasks.episodes(split, torch.arange(40)))
        assert set(drawers[0]) | set(drawers[1]) == {0, 2, 4}
    drawers, labels = shown(tasks.episodes("test", torch.arange(80)))
    assert (set(drawers[0]), set(drawers[1])) == (of_support, of_query)
    assert set(labels[0]) <= set(range(16, 24)) and labels[0] == labels[1]
    pairs = zip(zip(labels[0], drawers[0], strict=True), zip(labels[1], drawers[1], strict=True), strict=True)
    assert all(one != other for one, other in pairs)


def test_cross_takes_shots_and_queries_of_the_right_drawers(root: Path) -> None:
    tasks = source(root, HELD, "dataset.test=cross", "dataset.shots=2", "dataset.queries=1")
    drawers, labels = shown(tasks.episodes("test", torch.arange(30)))
    assert set(drawers[0]) == {0, 2, 4} and set(drawers[1]) == {1, 3, 5}
    pictures = list(zip(labels[0], drawers[0], strict=True))
    assert len(pictures) == 30 * 3 * 2
    assert all(pictures[first] != pictures[first + 1] for first in range(0, len(pictures), 2))


def test_small_classes_are_left_out_with_a_count_or_refused(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tasks = source(root, "dataset.shots=3")
        assert len(tasks.classes_of("train").identities) == 6  # type: ignore[attr-defined]
    assert "3 of 9 classes of 'train' have fewer than 5 drawings, and are left out" in caplog.text
    with pytest.raises(DataError, match=r"3 of 9 classes of 'train' .* dataset.drop_small=true"):
        source(root, "dataset.shots=3", "dataset.drop_small=false").episodes("train", torch.arange(1))
    with pytest.raises(DataError, match="an episode has 7 classes, and 6 of 'train' have drawings for"):
        source(root, "dataset.shots=3", "dataset.ways=7").episodes("train", torch.arange(1))


def test_grey_emoji_are_ink_on_paper(root: Path) -> None:
    pixels = source(root, "dataset.channels=1").episodes("test", torch.arange(1)).support.x
    assert pixels.shape == (1, 3, 1, 84, 84)
    red, green = (
        part * 255 for part in source(root).episodes("test", torch.arange(1)).support.x[0, :, :2, 0, 0].unbind(1)
    )
    luma = 0.299 * red + 0.587 * green  # ITU-R BT.601, as Pillow has it; nothing is blue
    torch.testing.assert_close(pixels[0, :, 0, 0, 0] * 255, 255 - luma, atol=1, rtol=0)


def test_unknown_drawers_and_missing_sets_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="zoe is none of the drawers, which are ann, bob"):
        source(root, "dataset.held_drawers=[zoe]").episodes("train", torch.arange(1))
    with pytest.raises(DataError, match="names all drawers"):
        source(root, f"dataset.held_drawers=[{','.join(DRAWERS)}]").episodes("train", torch.arange(1))
    with pytest.raises(DataError, match=r"emoji: index\.json .*; type metalearn data emoji"):
        source(tmp_path).episodes("train", torch.arange(1))


def test_plain_samples_are_of_the_training_drawers(root: Path) -> None:
    tasks = source(root, HELD)
    assert isinstance(tasks, GivesSamples)
    plain, words = tasks.samples("tasks")
    assert words == "all 18 pictures of the 6 training classes; the others' tasks evaluate"
    x = plain.episodes("train", torch.arange(60)).query.x[0]
    assert {int(g) for g in (x[:, 1, 0, 0] * 255 / 20).round()} == {0, 2, 4}


def test_pictures_are_reduced_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        x = source(root, "dataset.image_size=32").episodes("test", torch.arange(2)).support.x
        assert x.shape == (2, 3, 3, 32, 32) and x[0, 0].flatten(1).std(1).max() < 1e-6
    assert len(list((tmp_path / "cache").glob("emoji-*-32.npy"))) == 1


def test_a_test_says_whose_pictures_the_training_has_shown(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_back = source(root, HELD, "dataset.test=cross")
    seen = from_meta({KEY: to_meta(seen_in(held_back, 1))})
    assert check_unseen(seen, held_back, "test", REPORT).keys() == {KEY}
    warn_of_seen_drawers(check_unseen(seen, held_back, "test", REPORT))
    assert "the training has shown" not in caplog.text

    other = source(root, "dataset.held_drawers=[bob,cid,eve]", "dataset.test=held")
    assert check_unseen(seen, other, "test", REPORT)[SEEN_DRAWERS] == ["cid", "eve"]
    warn_of_seen_drawers(check_unseen(seen, other, "test", REPORT))
    assert "the training has shown pictures by cid, eve, so this test is none of unseen drawers" in caplog.text
    everyone = seen_in(source(root), 1)
    assert check_unseen(everyone.joined(Seen()), held_back, "test", REPORT)[SEEN_DRAWERS] == ["bob", "dee", "fay"]
    assert SEEN_DRAWERS not in check_unseen(everyone, source(root, HELD), "test", REPORT)  # it shows everybody
    assert SEEN_DRAWERS not in check_unseen(seen_in(source(root), 0), held_back, "test", REPORT)

    # Of plain samples.
    assert isinstance(held_back, GivesSamples)
    plain, _ = held_back.samples("tasks")
    assert check_unseen(seen_in(plain, 1), other, "test", REPORT)[SEEN_DRAWERS] == ["cid", "eve"]
