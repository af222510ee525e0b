"""Characters of alphabets that never were, drawn by program: few-shot pictures without a download.

A character is a few curved strokes whose control points come from a generator seeded by its number; a
drawing of it moves the points, then slants, stretches and shifts the whole, as a hand would.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from metalearn.checks import enough_classes, whole_number
from metalearn.tasks.common.episodes import Classes, Images, check_filled, picture_tasks, shapes_of
from metalearn.tasks.common.samples import Labelled, all_drawings, drawing_sizes, pretraining, samples, split_drawings
from metalearn.types import TaskSource

CLASSES = {"train": 400, "val": 100, "test": 200}
DRAWINGS = 20
_FIRST = {"train": 0, "val": 400, "test": 500}
_FAMILY = 20171
_CURVE_POINTS = 32


def _curve(control: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points [drawings, strokes × _CURVE_POINTS, 2] of quadratic Béziers [drawings, strokes, 3, 2]."""
    t = np.linspace(0, 1, _CURVE_POINTS)
    basis = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2])
    points: NDArray[np.float64] = np.einsum("kp,dskx->dspx", basis, control)
    return points.reshape(len(control), -1, 2)


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
    points = _curve(control) @ warp + shift
    width = rng.uniform(0.05, 0.11, (DRAWINGS, 1, 1))

    centre = (np.arange(size) + 0.5) * 2 / size - 1
    grid = np.stack(np.meshgrid(centre, centre, indexing="ij"), axis=-1).reshape(-1, 2)
    squares = (grid**2).sum(-1)[None, :, None] - 2 * grid @ points.transpose(0, 2, 1) + (points**2).sum(-1)[:, None, :]
    distance = np.sqrt(np.maximum(squares.min(axis=2), 0))[..., None]
    ink = np.clip((width - distance) * size / 2 + 0.5, 0, 1)
    pictures: Images = np.rint(ink * 255).astype(np.uint8)
    return pictures.reshape(DRAWINGS, size, size)


def glyphs(
    *, ways: int, shots: int, queries: int, train_ways: int | None = None,
    train_queries: int | None = None, image_size: int,
    channels: int, rotations: bool, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Drawn characters: 400 to train, 100 to validate, 200 to test, 20 drawings of each.

    Args:
        ways, shots, queries: classes of an episode; support and query pictures of each class.
        train_ways, train_queries: the same for training tasks, where they differ.
        image_size: height and width, in pixels.
        channels: must be 1.
        rotations: turn each drawn class by a random multiple of 90°.
        seed, eval_seed: what training tasks, and what validation and test tasks, are drawn from.

    Raises:
        ValueError: an episode that the characters cannot fill.
    """
    shapes = shapes_of(ways, shots, queries, train_ways, train_queries)
    check_filled(shapes, {split: (classes, DRAWINGS) for split, classes in CLASSES.items()})
    whole_number("image_size", image_size, at_least=8)
    if channels != 1:
        raise ValueError(f"channels={channels}: glyphs are grey pictures; type channels=1")

    def part(split: str) -> Classes:
        return Classes(CLASSES[split], DRAWINGS, lambda label: character(_FIRST[split] + label, image_size))

    def load() -> dict[str, Classes]:
        return {split: part(split) for split in CLASSES}

    return picture_tasks(load, shapes, rotations=rotations, seed=seed, eval_seed=eval_seed)


def glyph_characters(
    *, ways: int, train_drawings: int, val_drawings: int, image_size: int, channels: int, known: int, seed: int,
    eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Plain classification of the training characters of `glyphs`.

    Args:
        ways: characters, the first so many.
        train_drawings, val_drawings: of each character's 20 drawings, how many train and validate; the rest test.
        image_size, channels: as for `glyphs`.
        known, seed, eval_seed: as for `metalearn.tasks.common.samples.samples`.

    Raises:
        ValueError: more characters or drawings than there are.
    """
    whole_number("ways", ways, at_least=2)
    enough_classes("ways", ways, "train", CLASSES["train"])
    whole_number("image_size", image_size, at_least=8)
    if channels != 1:
        raise ValueError(f"channels={channels}: glyphs are grey pictures; type channels=1")
    sizes = drawing_sizes(ways, DRAWINGS, train=train_drawings, val=val_drawings)

    def load() -> dict[str, Labelled]:
        pictures = np.stack([character(_FIRST["train"] + number, image_size) for number in range(ways)])
        return split_drawings(pictures, train=train_drawings, val=val_drawings)

    return samples(load, sizes, ways, known=known, seed=seed, eval_seed=eval_seed)


def glyph_pretraining(
    *, train_classes: int, ways: int, shots: int, queries: int, image_size: int, channels: int, rotations: bool,
    seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Training characters as plain samples, all 20 drawings of each; validation and test tasks as `glyphs` has them.

    Args:
        train_classes: how many of the training characters, the first so many.
        ways, shots, queries, image_size, channels, rotations, seed, eval_seed: as for `glyphs`; training samples
            are not turned.

    Raises:
        ValueError: more characters than there are, or an episode that they cannot fill.
    """
    tasks = glyphs(
        ways=ways, shots=shots, queries=queries, image_size=image_size, channels=channels, rotations=rotations,
        seed=seed, eval_seed=eval_seed,
    )  # fmt: skip
    whole_number("train_classes", train_classes, at_least=2, at_most=CLASSES["train"])

    def load() -> Images:
        return np.stack([character(_FIRST["train"] + number, image_size) for number in range(train_classes)])

    return pretraining(all_drawings(load, train_classes, DRAWINGS, seed=seed, eval_seed=eval_seed), tasks)
