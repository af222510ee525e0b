"""Episodes of pictures as pictures."""

from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from metalearn.reporting.loggers.protocol import Picture
from metalearn.types import Episode

MOST_CLASSES, MOST_EACH = 20, 6
"""The most classes of an episode that are shown, and the most support and query pictures of each class."""

_LARGEST = 96
"""Pixels of the longer side of a shown picture."""

_GAP = 6


class ShownClass(NamedTuple):
    """A class of an episode: the positions of its support and query pictures that are shown."""

    label: int
    support: list[int]
    query: list[int]


def has_pictures(episode: Episode) -> bool:
    """Whether it classifies pictures of one or three channels."""
    x, y = episode.query.x, episode.query.y
    return x.dim() == 5 and x.shape[2] in (1, 3) and not y.is_floating_point()


def shown_classes(episode: Episode) -> list[ShownClass]:
    """The classes of the first task of an episode."""
    labels = sorted(set(episode.query.y[0].tolist()))[:MOST_CLASSES]
    places = [[(batch.y[0] == label).nonzero().flatten().tolist()[:MOST_EACH] for batch in episode] for label in labels]
    return [ShownClass(label, *where) for label, where in zip(labels, places, strict=True)]


def picture_of(x: Tensor) -> Picture:
    """The picture of an input [c, h, w] with values in [0, 1]; a large one is reduced."""
    values = (x.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values).convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    return np.asarray(image, np.uint8)


def episode_picture(episode: Episode) -> Picture:
    """The first task of an episode as one picture: a row for each class, its support pictures left of its queries."""
    shown = shown_classes(episode)
    height, width = picture_of(episode.query.x[0, 0]).shape[:2]
    shots, queries = max(len(row.support) for row in shown), max(len(row.query) for row in shown)
    sheet = np.full((len(shown) * (height + 1), (shots + queries) * (width + 1) + _GAP, 3), 255, np.uint8)
    for number, row in enumerate(shown):
        tiles = [(place, episode.support.x) for place in enumerate(row.support)]
        tiles += [((shots + column, place), episode.query.x) for column, place in enumerate(row.query)]
        for (column, place), x in tiles:
            left = column * (width + 1) + (_GAP if column >= shots else 0)
            top = number * (height + 1)
            sheet[top : top + height, left : left + width] = picture_of(x[0, place])
    return sheet
