"""Pages: each is one file that needs nothing else, for screens of any width, light and dark; and their pictures. Line
charts are drawn by matplotlib: inside a page, in its colours, or as files."""

import base64
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from torch import Tensor  # not at once: the demo sets its threads before torch is imported

    from metalearn.types import Episode

PALETTE = ("#2f8ad0", "#d4641c", "#1f9c78", "#bd62a2", "#8a94a0")
"""The colours of lines in turn: they are seen on light and on dark. In a page they are its --c1 to --c5."""

_SOFT, _EDGE = "#6b7480", "#c9ced4"
"""The colours of texts and of the grid; in a page its --soft and --edge."""

_PAGE_COLOURS = {**{colour: f"c{n}" for n, colour in enumerate(PALETTE, 1)}, _SOFT: "soft", _EDGE: "edge"}
_MOST_POINTS = 500  # a line of more points shows the means of neighbours: else noise hides it, and the page is large
_ROUND = (1, 2, 5, 10)  # the first digits of the distance of ticks
_MARKS = {"line": "-", "dots": "o-", "dashes": "--", "points": "o"}


class Line(NamedTuple):
    """A line of a chart: `points` (x, y), with half the height of their 95% `intervals` if they have any. `style` is
    `line`, `dots` (a line with a dot at each point), `dashes` or `points` (no line). `colour` is by default that of its
    place. In a page the attribute `data-line` of the line's group is its `tag`."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[float] = ()
    style: str = "line"
    colour: str = ""
    tag: str = ""


class Chart(NamedTuple):
    """A chart of `lines`, in the order of the colours; `x` and `y` name the axes, with units. If `percent`, the values
    of y are fractions; if `whole`, the ticks of x are whole numbers. A page has the `note` below it."""

    title: str
    lines: Sequence[Line]
    x: str
    y: str
    percent: bool = False
    logarithmic: bool = False
    whole: bool = False
    note: str = ""


def chart(title: str, lines: Sequence[Line], *, logarithmic: bool = False, **axes: Any) -> Chart:
    """A chart, with the other fields `axes`, of what can be drawn: finite points, above 0 if it is `logarithmic`."""
    shown = []
    for line in lines:
        kept = [
            (point, interval if math.isfinite(interval) else 0.0)
            for point, interval in zip(line.points, line.intervals or [0.0] * len(line.points), strict=True)
            if all(map(math.isfinite, point)) and (point[1] > 0 or not logarithmic)
        ]
        points = [point for point, _ in kept]
        if (size := math.ceil(len(points) / _MOST_POINTS)) > 1:
            groups = [points[first : first + size] for first in range(0, len(points), size)]
            means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
            name = f"{line.name} (means of {size} lines of the log)"
            shown.append(line._replace(name=name, points=means, intervals=()))
        else:
            intervals = [interval for _, interval in kept] if line.intervals else ()
            shown.append(line._replace(points=points, intervals=intervals))
    values = [y for line in shown for _, y in line.points]
    far = logarithmic and far_apart(values)
    return Chart(title, [line for line in shown if line.points], logarithmic=far, **axes)


def far_apart(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows them better. Within a power of ten it looks as a linear one does, and has no
    round ticks."""
    return max(values, default=0) > 10 * min(values, default=0) > 0


def set_logarithmic(axes: Any, heights: Sequence[float]) -> None:
    """Makes the vertical axis logarithmic, with ticks at round numbers."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", nonpositive="clip")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(heights) < 1000 * min(heights) else (1,)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()


def svg(chart: Chart) -> str:
    """The chart as an SVG element for a page, which has a legend of its own beside it."""
    with new_figure(3.9, 2.35, content=chart, layout=None) as figure:
        figure.subplots_adjust(left=0.16, right=0.98, top=0.97, bottom=0.18)  # a layout engine takes 3 times as long
        _draw(figure.subplots(), chart)
        drawn = _svg_of(figure)
    # Inside HTML no namespaces are needed; and the names of groups would be those of every chart.
    drawn = re.sub(r'<g id="line:([^"]*)"', r'<g data-line="\1"', drawn[drawn.index("<svg") :])
    drawn = re.sub(r' xmlns(:xlink)?="[^"]*"', "", re.sub(r'<g id="[^"]*"', "<g", drawn))
    return re.sub(f": ({'|'.join(_PAGE_COLOURS)})", lambda match: f": var(--{_PAGE_COLOURS[match[1]]})", drawn)


def svg_file(chart: Chart) -> str:
    """The chart as the content of an SVG file, with its legend below it, for light and dark pages."""
    with new_figure(5.5, 3.5 + 0.2 * len(chart.lines), content=chart) as figure:
        _draw(figure.subplots(), chart)
        figure.legend(loc="outside lower left", frameon=False, labelcolor=_SOFT)
        return _svg_of(figure)


def save(charts: Sequence[Chart], path: Path) -> Path:
    """Draws charts side by side into a PNG file; makes its folder."""
    with new_figure(5.5 * len(charts), 4) as figure:
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _draw(axes, chart)
            if chart.lines:
                axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
    return path


@contextmanager
def new_figure(width: float, height: float, *, content: object = "", layout: Any = "constrained") -> Iterator[Any]:
    """A figure of this size in inches, with its layout engine, and matplotlib's settings while it is drawn and saved.
    Names inside an SVG are hashes of the `content`, so two charts of a page share none."""
    import matplotlib as mpl  # takes half a second, and only the rank that draws needs it
    from matplotlib.figure import Figure  # needs no display and no global state, as pyplot does

    settings: Any = {
        "font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False, "svg.fonttype": "none",
        "svg.hashsalt": repr(content),
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield Figure(figsize=(width, height), layout=layout)


def _svg_of(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="none", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()


def percent(value: float, _: object = None) -> str:
    """A tick of an axis whose values are fractions. matplotlib's own ticks are all as long as the longest: 20.0%."""
    return f"{100 * value:.4g}%"


def _draw(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, line in enumerate(chart.lines):
        at, values = zip(*line.points, strict=True)
        # A line of one point is nothing to see.
        mark = _MARKS["points" if len(at) == 1 and line.style == "line" else line.style]
        colour = line.colour or PALETTE[number % len(PALETTE)]
        drawn = axes.errorbar(
            at, values, line.intervals or None, fmt=mark, color=colour, linewidth=1.4, elinewidth=0.9, markersize=3,
            label=line.name, clip_on=False,
        )  # fmt: skip
        if line.tag:
            drawn.lines[0].set_gid(f"line:{line.tag}")
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND, integer=chart.whole))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter(percent if chart.percent else "{x:,g}")
    if chart.logarithmic:
        set_logarithmic(axes, [y for line in chart.lines for _, y in line.points])
    axes.set_facecolor("none")
    axes.grid(axis="y", color=_EDGE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(_SOFT)


Picture = NDArray[np.uint8]  # red, green and blue: [height, width, 3]


class Tile(NamedTuple):
    """A small picture with its `caption` for those who do not see it; and whether it was predicted `right`, and what is
    written below."""

    picture: Picture
    caption: str
    answer: str = ""
    right: bool | None = None


def page(template: "str | Template", **values: Any) -> str:
    """The page that a template (a file of the folder `templates`, or one of `pages().from_string`) makes of the values;
    all texts among them are escaped."""
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


def has_pictures(episode: "Episode") -> bool:
    """Whether it classifies pictures of one or three channels."""
    x, y = episode.query.x, episode.query.y
    return x.dim() == 5 and x.shape[2] in (1, 3) and not y.is_floating_point()


def shown_classes(episode: "Episode") -> list[tuple[int, list[int], list[int]]]:
    """The classes of the first task of an episode, and the positions of their shown support and query pictures."""
    labels = sorted(set(episode.query.y[0].tolist()))[:MOST_CLASSES]
    support, query = (
        [(batch.y[0] == label).nonzero().flatten().tolist()[:MOST_EACH] for label in labels] for batch in episode
    )
    return list(zip(labels, support, query, strict=True))


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
    shots, queries = max(len(row) for _, row, _ in shown), max(len(row) for _, _, row in shown)
    sheet = np.full((len(shown) * (height + 1), (shots + queries) * (width + 1) + _GAP, 3), 255, np.uint8)
    for number, (_, support, query) in enumerate(shown):
        tiles = [(column, episode.support.x[0, place]) for column, place in enumerate(support)]
        tiles += [(column, episode.query.x[0, place]) for column, place in enumerate(query, shots)]
        for column, x in tiles:
            left, top = column * (width + 1) + (_GAP if column >= shots else 0), number * (height + 1)
            sheet[top : top + height, left : left + width] = picture_of(x)
    return sheet
