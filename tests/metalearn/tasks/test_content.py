"""The digest of what a dataset shows."""

from collections.abc import Mapping

import numpy as np
import pytest

from metalearn.tasks.common import episodes
from metalearn.tasks.common.episodes import (
    Classes,
    Content,
    EpisodeSpec,
    Images,
    Seeds,
    content_of,
    shapes_of,
)
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.glyphs import glyphs
from metalearn.tasks.sinusoid import sinusoid
from metalearn.types import TaskSource

SPLITS, CLASSES, PICTURES = ("train", "val", "test"), 9, 6


def pictures() -> dict[str, Images]:
    """Of every split [classes, pictures, 8, 8], all of them different."""
    generator = np.random.default_rng(0)
    return {split: generator.integers(0, 256, (CLASSES, PICTURES, 8, 8), np.uint8) for split in SPLITS}


def source(shown: dict[str, Images], *, drawn: bool = False) -> TaskSource:
    def load() -> Mapping[str, Classes]:
        return {
            split: Classes([f"{split}{n}" for n in range(CLASSES)], PICTURES, values.__getitem__, drawn)
            for split, values in shown.items()
        }

    episode = EpisodeSpec(2, 1, 1)
    return few_shot(load, shapes_of(episode), episode, rotations=False, seeds=Seeds(0, 0), instead="mnist")


@pytest.mark.parametrize("place", [("train", 8, 5), ("val", 0, 0), ("test", 7, 3)])
def test_any_other_picture_is_another_content(place: tuple[str, int, int]) -> None:
    before = content_of(source(pictures()))
    changed = pictures()
    split, label, number = place
    changed[split][label, number, 7, 7] ^= 1
    after = content_of(source(changed))
    assert after.digest != before.digest == content_of(source(pictures())).digest
    assert before.is_known_otherwise(after.digest) and not before.is_known_otherwise(before.digest)


def test_digests_that_were_made_in_another_way_are_not_compared() -> None:
    content = Content("2-abc")
    assert not content.is_known_otherwise(None)
    assert not content.is_known_otherwise("abd")  # of a version that covered the first tasks only


def test_the_first_and_last_pictures_of_each_class_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "_WHOLE", 1000)
    monkeypatch.setattr(episodes, "_FIRST", 0)
    whole, middle, end = pictures(), pictures(), pictures()
    middle["test"][8, 3] = 0
    end["test"][8, PICTURES - 1] = 0
    digests = [content_of(source(shown)).digest for shown in (whole, middle, end)]
    assert digests[0] == digests[1] != digests[2]


def test_drawn_pictures_are_known_by_their_first_tasks() -> None:
    shown = pictures()
    assert content_of(source(shown, drawn=True)).digest != content_of(source(shown)).digest
    characters = glyphs(
        episode=EpisodeSpec(2, 1, 1), image_size=12, channels=1, rotations=True, seeds=Seeds(0, 0)
    )  # fmt: skip
    assert characters.classes_of("train").drawn  # type: ignore[attr-defined]


def test_curves_have_a_content_too() -> None:
    waves = [sinusoid(shots=5, queries=5, eval_queries=5, seeds=Seeds(seed, 0)) for seed in (0, 0, 1)]
    digests = [content_of(wave).digest for wave in waves]
    assert digests[0] == digests[1] != digests[2]
