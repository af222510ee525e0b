"""Pages: each is one file that needs nothing else, for screens of any width, light and dark; and their pictures."""

import base64
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from metalearn.reporting.charts import svg

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from torch import Tensor  # not at once: the demo sets its threads before torch is imported

    from metalearn.types import Episode


Picture = NDArray[np.uint8]  # red, green and blue: [height, width, 3]


class Tile(NamedTuple):
    """A small picture with its `caption` for those who do not see it; and whether it was predicted `right`, and what is
    written below."""

    picture: Picture
    caption: str
    answer: str = ""
    right: bool | None = None


def page(template: "str | Template", **values: Any) -> str:
    """The page that a template makes of the values; all texts among them are escaped.

    Args:
        template: a file of the folder `templates`, or one of `pages().from_string`.
    """
    content = pages().get_template(template).render(values)
    # In ASCII no editor or server can spoil it; and names of files may hold bytes that are no UTF-8.
    return content.encode("ascii", "xmlcharrefreplace").decode()


@cache
def pages() -> "Environment":
    """The templates, with their filters: `svg` of a chart, `png` of a picture, `percent` of a fraction."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not before a page is wanted
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["svg"] = lambda chart: Markup(svg(chart))  # noqa: S704 (matplotlib escapes texts)
    environment.filters["png"] = _png
    environment.filters["percent"] = "{:.1%}".format
    return environment


def _png(picture: Picture) -> str:
    """The address of a picture that is in the page."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


MOST_CLASSES, MOST_EACH = 20, 6
"""The most classes of an episode that are shown, and the most support and query pictures of each class."""

_LARGEST = 96  # pixels of the longer side of a shown picture
_GAP = 6


class ShownClass(NamedTuple):
    """A class of an episode: the positions of its support and query pictures that are shown."""

    label: int
    support: list[int]
    query: list[int]


def has_pictures(episode: "Episode") -> bool:
    """Whether it classifies pictures of one or three channels."""
    x, y = episode.query.x, episode.query.y
    return x.dim() == 5 and x.shape[2] in (1, 3) and not y.is_floating_point()


def shown_classes(episode: "Episode") -> list[ShownClass]:
    """The classes of the first task of an episode."""
    labels = sorted(set(episode.query.y[0].tolist()))[:MOST_CLASSES]
    places = [[(batch.y[0] == label).nonzero().flatten().tolist()[:MOST_EACH] for batch in episode] for label in labels]
    return [ShownClass(label, *where) for label, where in zip(labels, places, strict=True)]


def picture_of(x: "Tensor") -> Picture:
    """The picture of an input [c, h, w] with values in [0, 1]; a large one is reduced."""
    values = (x.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values).convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    return np.asarray(image, np.uint8)


def side_by_side(pictures: Sequence[Picture]) -> Picture:
    """Small pictures in a row, with white between them and below the shorter ones."""
    height, width = max(len(one) for one in pictures), sum(one.shape[1] + _GAP for one in pictures) - _GAP
    sheet, left = np.full((height, width, 3), 255, np.uint8), 0
    for one in pictures:
        sheet[: len(one), left : left + one.shape[1]] = one
        left += one.shape[1] + _GAP
    return sheet


def episode_picture(episode: "Episode") -> Picture:
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
