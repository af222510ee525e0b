"""Pages: each is one file that needs nothing else, for screens of any width, light and dark."""

import base64
import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from metalearn.reporting.charts import svg
from metalearn.reporting.loggers.protocol import Picture

if TYPE_CHECKING:
    from jinja2 import Environment, Template


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
