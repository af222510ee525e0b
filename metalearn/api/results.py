"""Predictions for many pictures: a table, a confusion matrix, and the accuracy with its interval."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metalearn.api.folders import TABLE

if TYPE_CHECKING:  # a classifier needs `wilson` alone
    from metalearn.api.learner import Label, Prediction

_NORMAL = 1.959964
"""The standard normal distribution has 95% of its mass within this distance of 0."""


class Accuracy(NamedTuple):
    """`correct` of `pictures`, and the 95% interval of the fraction."""

    correct: int
    pictures: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.correct / self.pictures

    def __str__(self) -> str:
        return f"{self.value:.2%} (95% interval {self.low:.2%} to {self.high:.2%}, {self.pictures} pictures)"


def accuracy(predictions: "Sequence[Prediction]", truth: "Sequence[Label]") -> Accuracy:
    """The fraction of right predictions, with Wilson's interval (1927), which also holds near 0 and 1.

    It counts the pictures as independent draws, and the support set as given: another support set has another accuracy.
    """
    correct = sum(prediction.label == label for prediction, label in zip(predictions, truth, strict=True))
    return Accuracy(correct, len(truth), *wilson(correct, len(truth)))


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The ends of Wilson's 95% interval for a fraction."""
    fraction, square = correct / count, _NORMAL**2
    middle = (fraction + square / (2 * count)) / (1 + square / count)
    half = _NORMAL / (1 + square / count) * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def confusion(
    predictions: "Sequence[Prediction]", truth: "Sequence[Label]", labels: "Sequence[Label]"
) -> list[list[int]]:
    """The number of pictures by true label (rows) and predicted label (columns)."""
    place = {label: number for number, label in enumerate(labels)}
    table = [[0] * len(labels) for _ in labels]
    for prediction, label in zip(predictions, truth, strict=True):
        table[place[label]][place[prediction.label]] += 1
    return table


def write_predictions(
    path: Path, files: Sequence[str], predictions: "Sequence[Prediction]", labels: Sequence[str]
) -> None:
    """Writes a line for each picture: file, label, its probability, and the probability of each label."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow([*TABLE, *labels])
        for name, (label, by_label) in zip(files, predictions, strict=True):
            values = [by_label[label], *(by_label[other] for other in labels)]
            writer.writerow([name, label, *(f"{value:.6f}" for value in values)])


def write_confusion(path: Path, table: Sequence[Sequence[int]], labels: Sequence[str]) -> None:
    """Writes a line for each true label, with a column for each predicted one."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["true label", *labels])
        writer.writerows([label, *row] for label, row in zip(labels, table, strict=True))
