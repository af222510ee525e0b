"""Line charts as SVG, for pages. matplotlib takes seconds to import and to draw; this takes a millisecond."""

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 42
_MOST_POINTS = 500
"""A line of more points shows the means of neighbours."""
_COLOURS = 5
"""How many colours the style of a page has for lines."""

_FILE_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #6b7480; } path { fill: none; stroke: #6b7480; } .grid { opacity: .25; }
.line, .dots, .dashes { stroke-width: 1.8; } .dashes { stroke-dasharray: 6 4; } .bars { opacity: .65; }
path.c1 { stroke: #2f8ad0; } path.c2 { stroke: #d4641c; } path.c3 { stroke: #1f9c78; } path.c4 { stroke: #bd62a2; }
path.c5 { stroke: #8a94a0; } circle.c1 { fill: #2f8ad0; } circle.c2 { fill: #d4641c; } circle.c3 { fill: #1f9c78; }
circle.c4 { fill: #bd62a2; } circle.c5 { fill: #8a94a0; }"""
"""Colours that are seen on light and on dark pages."""


class Line(NamedTuple):
    """A line of a chart: `points` (x, y), with half the height of their 95% `intervals` if they have any. `style` is
    `line`, `dots` (a line with a dot at each point), `dashes` or `points` (no line)."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[float] = ()
    style: str = "line"


class _Axis(NamedTuple):
    place: Callable[[float], float]
    ticks: Sequence[float]


def chart(
    lines: Sequence[Line], *, x: str, y: str, percent: bool = False, logarithmic: bool = False, whole: bool = False
) -> str:
    """A chart with its legend, as HTML: its colours are those of `metalearn.reporting.page`. Points that are not finite
    are left out.

    Args:
        lines: what is drawn, in the order of the colours.
        x, y: what the axes show, with units.
        percent: the values of y are fractions, and shown in percent.
        logarithmic: the axis of y is; values of 0 and less are left out.
        whole: the ticks of x are whole numbers.
    """
    drawn = [_visible(line, logarithmic) for line in lines]
    if not any(line.points for line in drawn):
        return "<p>There is nothing to draw.</p>"
    name = html.escape(f"{y} against {x}")
    keys = "".join(
        f'<span class="key c{number % _COLOURS + 1} {line.style}">{html.escape(line.name)}</span>'
        for number, line in enumerate(drawn)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        f"{_elements(drawn, x, y, percent, logarithmic, whole)}</svg>"
        f"<figcaption>{keys}</figcaption></figure>"
    )


def file(lines: Sequence[Line], *, x: str, y: str, percent: bool = False, whole: bool = False) -> str:
    """The chart of `chart` as the content of an SVG file, with its legend in it, for pages that have another style."""
    legend = "".join(
        f'<path class="{line.style} c{number % _COLOURS + 1}" d="M{_LEFT} {HEIGHT + 12 + 20 * number}h24"/>'
        f'<text x="{_LEFT + 32}" y="{HEIGHT + 16 + 20 * number}">{html.escape(line.name)}</text>'
        for number, line in enumerate(lines)
    )
    drawn = _elements([_visible(line, False) for line in lines], x, y, percent, False, whole)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 8 + 20 * len(lines)}">'
        f"<style>{_FILE_STYLE}</style>\n{drawn}\n{legend}</svg>\n"
    )


def _elements(drawn: Sequence[Line], x: str, y: str, percent: bool, logarithmic: bool, whole: bool) -> str:
    """The axes and the lines of a chart that has points."""
    xs = [at for line in drawn for at, _ in line.points]
    ys = [value for line in drawn for value in _ends(line) if value > 0 or not logarithmic]
    across = _linear(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, whole=whole)
    scale = _logarithmic if logarithmic else _linear
    up = scale(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up, percent), *_titles(x, y)]
    for number, line in enumerate(drawn):
        parts += _drawn(line, across, up, f"c{number % _COLOURS + 1}")
    return "".join(parts)


def _visible(line: Line, logarithmic: bool) -> Line:
    """The line without what cannot be drawn, and of not too many points."""
    intervals = [*line.intervals] or [0.0] * len(line.points)
    kept = [
        (point, interval if math.isfinite(interval) else 0.0)
        for point, interval in zip(line.points, intervals, strict=True)
        if all(map(math.isfinite, point)) and (point[1] > 0 or not logarithmic)
    ]
    points = [point for point, _ in kept]
    if (many := math.ceil(len(points) / _MOST_POINTS)) > 1:
        groups = [points[first : first + many] for first in range(0, len(points), many)]
        means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
        return Line(f"{line.name} (means of {many} lines of the log)", means, (), line.style)
    return line._replace(points=points, intervals=[interval for _, interval in kept] if line.intervals else ())


def _ends(line: Line) -> list[float]:
    """The values of a line, with the ends of its intervals."""
    values = [value for _, value in line.points]
    pairs = list(zip(values, line.intervals, strict=False))
    return [*values, *(value - half for value, half in pairs), *(value + half for value, half in pairs)]


def _linear(low: float, high: float, first: float, last: float, *, whole: bool = False) -> _Axis:
    """An axis from a round number to a round number."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = 0.5 if whole else max(abs(high), 1e-6) * 0.1
        low, high = low - pad, high + pad
    step = _round_step((high - low) / 5)
    if whole:
        step = max(1.0, step)
    ticks = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    room = 0.03 * (high - low)
    low, high = low - room, high + room
    return _Axis(lambda value: first + (last - first) * (value - low) / (high - low), ticks)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _logarithmic(low: float, high: float, first: float, last: float) -> _Axis:
    bottom, top = math.log10(low), math.log10(high)
    room = 0.04 * (top - bottom) or 0.1
    bottom, top = bottom - room, top + room
    powers = range(math.floor(bottom), math.ceil(top) + 1)
    every, ticks = max(1, round(len(powers) / 6)), list[float]()
    for factors in ((1,), (1, 2, 5), range(1, 10)):
        if len(ticks) < 3:
            ticks = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
            ticks = [tick for tick in ticks if bottom <= math.log10(tick) <= top]
    if len(ticks) < 2:
        ticks = [*_linear(low, high, 0, 1).ticks]
    place = lambda value: first + (last - first) * (math.log10(max(value, 10**bottom)) - bottom) / (top - bottom)  # noqa: E731
    return _Axis(place, ticks)


def _grid(across: _Axis, up: _Axis, percent: bool) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    names = [f"{100 * tick:.3g}%" if percent else _number(tick) for tick in up.ticks]
    return [
        *(f'<path class="grid" d="M{_LEFT} {up.place(tick):.1f}H{right}"/>' for tick in up.ticks),
        f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{up.place(tick) + 4:.1f}" text-anchor="end">{name}</text>'
            for tick, name in zip(up.ticks, names, strict=True)
        ),
        *(
            f'<text x="{across.place(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{_number(tick)}</text>'
            for tick in across.ticks
        ),
    ]


def _titles(x: str, y: str) -> list[str]:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x)}</text>',
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y)}</text>',
    ]


def _number(value: float) -> str:
    """A tick in few signs: 20,000 and 0.02, but 1e-05 and 1e+07."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def _drawn(line: Line, across: _Axis, up: _Axis, colour: str) -> list[str]:
    places = [(across.place(at), up.place(value)) for at, value in line.points]
    parts = []
    if line.style != "points":
        d = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in places)
        parts.append(f'<path class="{colour} {line.style}" d="{d}"/>')
    for (at, value), half in zip(line.points, line.intervals, strict=False):
        if half > 0:
            where, low, high = across.place(at), up.place(value - half), up.place(value + half)
            parts.append(f'<path class="{colour} bars" d="M{where:.1f} {low:.1f}V{high:.1f}"/>')
    if line.style in ("dots", "points") or len(places) == 1:  # a line of one point is nothing to see
        parts += [f'<circle class="{colour}" cx="{at:.1f}" cy="{height:.1f}" r="3"/>' for at, height in places]
    return parts
