"""Made-up characters, drawn by program: few-shot pictures without a download.

A character is a few curved strokes. Their control points come from a generator seeded by the character's number. Each
drawing moves the points, then slants, stretches and shifts the whole character, as a hand would.
"""

from functools import cache, partial

import numpy as np

from metalearn.errors import only, whole_number
from metalearn.tasks.common.episodes import Classes, EpisodeSpec, Images, Seeds, check_filled, identity, shapes_of
from metalearn.tasks.common.samples import drawn_samples, few_shot
from metalearn.types import TaskSource

CLASSES = {"train": 400, "val": 100, "test": 200}
DRAWINGS = 20
_FIRST = {"train": 0, "val": 400, "test": 500}
_FAMILY = 20171
_CURVE_POINTS = 32


def identities(split: str) -> list[str]:
    """The identities of a split's characters."""
    return [identity("glyphs", _FIRST[split] + label) for label in range(CLASSES[split])]


@cache
def character(number: int, size: int) -> Images:
    """All drawings of character `number`: ink in [0, 255], [DRAWINGS, size, size]."""
    rng = np.random.default_rng((_FAMILY, number))
    strokes = int(rng.integers(2, 5))
    ideal = rng.uniform(-0.75, 0.75, (strokes, 3, 2))
    ideal[1:, 0] = np.where(rng.random((strokes - 1, 1)) < 0.5, ideal[:-1, 2], ideal[1:, 0])  # pen not lifted
    ideal *= 0.75 / np.abs(ideal).max()

    control = ideal + rng.normal(0, 0.03, (DRAWINGS, strokes, 3, 2))
    warp = np.eye(2) + rng.normal(0, 0.1, (DRAWINGS, 2, 2))
    shift = rng.normal(0, 0.1, (DRAWINGS, 1, 2))
    t = np.linspace(0, 1, _CURVE_POINTS)
    bezier = np.einsum("kp,dskx->dspx", np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2]), control)
    points = bezier.reshape(DRAWINGS, -1, 2) @ warp + shift
    width = rng.uniform(0.05, 0.11, (DRAWINGS, 1))

    centre = (np.arange(size) + 0.5) * 2 / size - 1
    grid = np.stack(np.meshgrid(centre, centre, indexing="ij"), axis=-1).reshape(-1, 2)
    # The distance of each pixel x from the nearest point p: ‖x − p‖² = ‖x‖² + (‖p‖² − 2 x·p), where one matrix product
    # gives all that depends on p.
    pixels = np.hstack([np.ones((len(grid), 1)), grid]).T
    nearest = [
        (np.hstack([(drawing**2).sum(-1, keepdims=True), -2 * drawing]) @ pixels).min(axis=0) for drawing in points
    ]
    distance = np.sqrt(np.maximum((grid**2).sum(-1) + np.stack(nearest), 0))
    ink = np.clip((width - distance) * size / 2 + 0.5, 0, 1)
    pictures: Images = np.rint(ink * 255).astype(np.uint8)
    return pictures.reshape(DRAWINGS, size, size)


def glyphs(*, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds) -> TaskSource:
    """Drawn characters: 400 to train, 100 to validate, 200 to test, 20 drawings of each."""
    shapes = shapes_of(episode)
    check_filled(shapes, {split: (classes, DRAWINGS) for split, classes in CLASSES.items()})
    whole_number("image_size", image_size, at_least=8)
    only("channels", channels, 1, "glyphs, which are grey")

    def part(split: str) -> Classes:
        pictures = lambda label: character(_FIRST[split] + label, image_size)  # noqa: E731
        names = [f"glyph {_FIRST[split] + label}" for label in range(CLASSES[split])]
        return Classes(identities(split), DRAWINGS, pictures, drawn=True, names=names)

    load = lambda: {split: part(split) for split in CLASSES}  # noqa: E731
    return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="glyph_characters")


def glyph_characters(
    *, ways: int, train_drawings: int, val_drawings: int, image_size: int, channels: int, known: int, seeds: Seeds
) -> TaskSource:  # fmt: skip
    """Plain classification of the training characters of `glyphs`."""
    whole_number("image_size", image_size, at_least=8)
    only("channels", channels, 1, "glyphs, which are grey")
    return drawn_samples(  # the training characters are the first ones
        lambda: partial(character, size=image_size), identities("train"), DRAWINGS, ways=ways, train=train_drawings,
        val=val_drawings, known=known, seeds=seeds,
    )  # fmt: skip
