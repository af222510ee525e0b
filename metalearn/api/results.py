"""Predictions for many pictures: tables, the accuracy with its interval, a confusion matrix, and a page of queries
beside the support pictures of their label."""

import csv
import math
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metalearn.api.pictures import TABLE, Found
from metalearn.tasks.common.pictures import decoded

if TYPE_CHECKING:  # a classifier needs `wilson` alone
    from metalearn.api.learner import Label, Prediction

_NORMAL = 1.959964  # the standard normal distribution has 95% of its mass within this distance of 0
MOST_ROWS, MOST_SUPPORT, MOST_QUERIES = 30, 3, 10  # of a page: labels, and support pictures and queries of each
_LONGEST = 24  # the most characters of a name that are drawn
_MARGIN, _ROW = 2.4, 1.35  # the left margin of a page, for names, and the distance between rows, in inches
_THUMBNAIL = 96  # pixels of the longer side of a picture on a page
_COLOURS = {None: "0.3", True: "#1a7f37", False: "#cf222e"}  # of a query: not known whether it is right, right, wrong


def accuracy(predictions: "Sequence[Prediction]", truth: "Sequence[Label]") -> dict[str, Any]:
    """The fraction of right predictions, as accuracy.json has it. Its interval counts the pictures as independent draws
    and the support set as fixed: another support set has another accuracy."""
    correct, count = sum(one.label == label for one, label in zip(predictions, truth, strict=True)), len(truth)
    interval = [*wilson(correct, count)]
    return {"accuracy": correct / count, "interval95": interval, "correct": correct, "pictures": count}


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The ends of Wilson's 95% interval (1927) for a fraction, which also holds near 0 and 1."""
    fraction, square = correct / count, _NORMAL**2
    middle = (fraction + square / (2 * count)) / (1 + square / count)
    half = _NORMAL / (1 + square / count) * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def confusion(
    predictions: "Sequence[Prediction]", truth: "Sequence[Label]", labels: "Sequence[Label]"
) -> list[list[int]]:
    """The number of pictures by true label (rows) and predicted label (columns)."""
    counts = Counter((label, prediction.label) for prediction, label in zip(predictions, truth, strict=True))
    return [[counts[label, answer] for answer in labels] for label in labels]


def write_predictions(
    path: Path, files: Sequence[str], predictions: "Sequence[Prediction]", labels: Sequence[str]
) -> None:
    """Writes a line for each picture: file, label, its probability, and the probability of each label."""
    each = zip(files, predictions, strict=True)
    rows = [[name, label, *(f"{by_label[one]:.6f}" for one in (label, *labels))] for name, (label, by_label) in each]
    write_csv(path, [*TABLE, *labels], rows)


def write_csv(path: Path, head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Writes a table."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:  # names may be no UTF-8
        csv.writer(file).writerows([head, *rows])


def confusion_matrix(path: Path, table: Sequence[Sequence[int]], labels: Sequence[str]) -> Path:
    """Draws the numbers of pictures by true (rows) and predicted label (columns)."""
    from matplotlib.figure import Figure  # takes half a second, and no display, as pyplot may

    size = min(4 + 0.35 * len(labels), 24)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes, counts = figure.subplots(), np.asarray(table)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    names = [_short(label) for label in labels]
    axes.set_xticks(range(len(labels)), names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(range(len(labels)), names, parse_math=False)
    axes.set_xlabel("predicted label")
    axes.set_ylabel("true label")
    if len(labels) <= 40:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, counts[row, column], ha="center", va="center", color=colour)
    return _save(figure, path)


def page(path: Path, support: Found, queries: Found, predictions: "Sequence[Prediction]") -> Path:
    """Draws a row for each label: its support pictures, and behind them the queries that got it, with its probability.

    A query's frame is green if its label is right, red if it is wrong, grey if that is not known.
    """
    from matplotlib.figure import Figure

    assert support.classes is not None
    labels = list(dict.fromkeys(support.classes))
    rows = [
        (
            label,
            [file for file, name in zip(support.paths, support.classes, strict=True) if name == label],
            [number for number, prediction in enumerate(predictions) if prediction.label == label],
        )
        for label in labels[:MOST_ROWS]
    ]
    shots = min(MOST_SUPPORT, max(len(files) for _, files, _ in rows))
    most = min(MOST_QUERIES, max(len(numbers) for _, _, numbers in rows))
    # The unit of the axes is an inch; y goes down.
    width, height = _MARGIN + shots + 1 + max(most, 5), _ROW * len(rows) + 0.5
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-_MARGIN, width - _MARGIN), ylim=(height - 0.5, -0.5), autoscale_on=False)
    axes.axis("off")
    rest = f"; the first {len(rows)} of {len(labels)} labels" if len(rows) < len(labels) else ""
    title = f"support pictures of each label, and the queries that got it, with its probability{rest}"
    axes.text(0, -0.25, title, fontsize=11)
    drawn = [
        file for _, files, numbers in rows for file in [*files[:shots], *(queries.paths[i] for i in numbers[:most])]
    ]
    thumbnails = decoded(drawn, _THUMBNAIL)

    def show(left: float, top: float, colour: str) -> None:
        """Draws the next picture into a square of side 1, with a frame."""
        picture = next(thumbnails)
        assert not isinstance(picture, str), picture  # it was read before
        height, width = (0.92 * side / max(picture.shape[:2]) for side in picture.shape[:2])
        x, y = left + (1 - width) / 2, top + (1 - height) / 2
        axes.imshow(picture, extent=(x, x + width, y + height, y), aspect="auto")
        corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
        axes.plot(*zip(*corners, strict=True), color=colour, linewidth=1.6)

    for row, (label, files, numbers) in enumerate(rows):
        top = row * _ROW
        axes.text(-0.15, top + 0.5, _short(label), ha="right", va="center", fontsize=10, parse_math=False)
        for column in range(min(shots, len(files))):
            show(column, top, "black")
        for column, query in enumerate(numbers[:most]):
            left = shots + 0.5 + column
            colour = _COLOURS[None if queries.classes is None else queries.classes[query] == label]
            show(left, top, colour)
            text = f"{predictions[query].probabilities[label]:.0%}"
            axes.text(left + 0.5, top + 1.14, text, ha="center", va="center", fontsize=8, color=colour)
        for left, more in ((shots, len(files) - shots), (shots + 0.5 + most, len(numbers) - most)):
            if more > 0:
                axes.text(left + 0.05, top + 0.5, f"+{more}", ha="left", va="center", fontsize=9)
    return _save(figure, path)


def _short(name: str) -> str:
    """A name that can be drawn: one line, its end if it is long."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in os.fsencode(name).decode(errors="replace"))
    return clean if len(clean) <= _LONGEST else "…" + clean[-_LONGEST + 1 :]


def _save(figure: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a sign that the font lacks is drawn as a box
        figure.savefig(path, dpi=100)
    return path
