"""Estimates from the pictures at hand of how good a classifier is on new ones."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.api.results import wilson
from metalearn.classifier.heads import HEADS, centred, class_means

FOLDS = 5
_BINS = 10
_PARTS = 20  # of the pictures, of which more and more are refused
LOST = 0.05  # the most of the pictures of known classes that an automatic threshold may refuse in cross-validation
SHARPEST = 1000.0  # the largest sharpness that is tried
_SHARP = 10.0  # the sharpness of scores where no picture is left to measure it with
_DRAWS = 5  # random choices of the pictures for each point of the learning curve

log = logging.getLogger("metalearn")


def report_of(
    features: Tensor, y: Tensor, *, classes: Sequence[str], names: Sequence[str], heads: Sequence[str],
    folds: int = FOLDS, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Chooses the head by the features [n, width] of the pictures, and says what to expect of it, as plain values.

    Args:
        y: the classes of the pictures, int64 [n].
        classes, names: the names of the classes, and of the pictures.
        heads: those to compare; of equal ones the first is taken.
        folds, seed: the parts of the cross-validation, and the seed of the division into them.
    """
    k = len(classes)
    fold = folds_of(y, k, most=folds, seed=seed)
    asked = fold >= 0
    if not asked.any():
        log.warning("every class has one picture, so there is none to measure the accuracy with; add pictures")
        nothing = {"head": heads[0], "accuracy": None, "sharpness": _SHARP, "threshold": None}
        return nothing | {"classes": k, "learned_from": len(y), "unknown": "every class has one picture; add pictures"}
    by_head, near = cross_validated(features, y, k, heads, fold)
    truth = y[asked]
    correct = {name: s[asked].argmax(dim=1) == truth for name, s in by_head.items()}
    head = max(correct, key=lambda name: int(correct[name].sum()))
    right, scores = correct[head], by_head[head][asked]
    answers, sharpness = scores.argmax(dim=1), sharpness_of(scores, truth)
    far_first = right[near[asked].argsort(stable=True)]
    refused = sorted({len(right) * part // _PARTS for part in range(_PARTS)})
    wrong = torch.nonzero(asked).flatten()[~right].tolist()
    threshold, caught, lost = strangers(features, y, k, near) or (None, None, None)
    curve = learning_curve(features, y, k, head, seed=seed)
    return {
        "head": head, "classes": k, "learned_from": len(y),
        "pictures": len(truth), "accuracy": _fraction(right),
        "interval95": [*wilson(int(right.sum()), len(truth))],
        "by_class": {classes[label]: _fraction(right[truth == label]) for label in truth.unique().tolist()},
        "by_refused": [[count / len(right), _fraction(far_first[count:])] for count in refused],
        "confusion": [torch.bincount(answers[truth == label], minlength=k).tolist() for label in range(k)],
        "wrong": [
            {"picture": names[place], "label": classes[label], "answer": classes[answer]}
            for place, label, answer in zip(wrong, truth[~right].tolist(), answers[~right].tolist(), strict=True)
        ],
        "by_head": {name: _fraction(value) for name, value in correct.items()},
        "sharpness": sharpness,
        "calibration_error": calibration_error(torch.softmax(scores * sharpness, dim=1), truth),
        "threshold": threshold, "strangers": None if threshold is None else {"found": caught, "wrong": lost},
        "by_shots": {str(shots): value for shots, value in curve.items()},
        "with_twice": with_twice(curve, _fraction(right)),
    }  # fmt: skip


def _fraction(right: Tensor) -> float:
    return right.double().mean().item()


def twice_in_words(report: Mapping[str, Any]) -> str:
    """What to expect of twice as many pictures, in words; else empty."""
    value = report.get("with_twice")
    return "" if value is None else f"with twice the pictures about {value:.1%}, if the curve goes on so"


def strangers_in_words(figures: Mapping[str, Any] | None, threshold: float | str | None) -> str:
    """The figures of `strangers` for an automatic threshold, in words; or what another one means."""
    if threshold is None:
        return "never said"
    if threshold != "auto":
        return f"said of pictures whose similarity to every class is below {threshold:g}"
    if figures is None:
        return "needs three classes or more"
    share = f"{figures['found']:.0%} of those of a class left out"
    return f"said of about {figures['wrong']:.0%} of new pictures of these classes, and of {share}"


# Cross-validation


def folds_of(y: Tensor, k: int, *, most: int = FOLDS, seed: int = 0) -> Tensor:
    """The fold of each picture: [n] int64. Every class is spread over the folds as evenly as it can be. A class with
    fewer pictures than folds misses in some; one with a single picture is never asked for."""
    folds = min(most, int(torch.bincount(y, minlength=k).max()))
    generator, fold = np.random.default_rng(seed), torch.full((len(y),), -1)
    first = 0
    for label in range(k):
        members = torch.nonzero(y == label).flatten()
        if len(members) < 2:
            continue
        shuffled = members[torch.from_numpy(generator.permutation(len(members)))]
        fold[shuffled] = (torch.arange(len(members)) + first) % folds
        first += len(members)  # so that the folds are equally large over all classes
    return fold


def cross_validated(
    features: Tensor, y: Tensor, k: int, heads: Sequence[str], fold: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The scores [n, k] of the pictures, by head, where it has learned from the other folds; NaN for a picture that is
    the only one of its class. And the cosine similarity of each to the nearest class mean."""
    scores = {head: torch.full((len(y), k), float("nan"), dtype=torch.float64) for head in heads}
    near = torch.full((len(y),), float("nan"), dtype=torch.float64)
    for number in range(int(fold.max()) + 1):
        asked = fold == number
        near[asked], of_heads = _asked_of_others(features, y, k, heads, fold != number, asked)
        for head, values in zip(heads, of_heads, strict=True):
            scores[head][asked] = values
    return scores, near


def _asked_of_others(
    features: Tensor, y: Tensor, k: int, heads: Sequence[str], learned: Tensor, asked: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Of the pictures that are `asked`: the similarity to the nearest class mean, and the scores by each head, where
    all is learned from the `learned` ones."""
    centre = features[learned].double().mean(dim=0)
    z, new = centred(features[learned], centre), centred(features[asked], centre)
    near = (new @ class_means(z, y[learned], k).T).amax(dim=1)
    return near, [HEADS[head].score(HEADS[head].fit(z, y[learned], k), new) for head in heads]


def sharpness_of(scores: Tensor, y: Tensor) -> float:
    """The factor of the scores before the softmax with the highest likelihood of the labels, by golden section over its
    logarithm.

    Labels are smoothed as Platt 1999 ("Probabilistic outputs for support vector machines") does: where all n answers
    are right, the mean probability of an answer is (n + 1) / (n + 2), and not 1. scikit-learn's temperature scaling
    does not smooth: there, the factor would have no bound.
    """
    n, k = scores.shape
    smoothing = k / ((k - 1) * (n + 2))

    def loss(power: float) -> float:
        return F.cross_entropy(scores * math.exp(power), y, label_smoothing=smoothing).item()

    low, high, ratio = -math.log(SHARPEST), math.log(SHARPEST), (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def calibration_error(probabilities: Tensor, y: Tensor) -> float:
    """The expected calibration error (Guo et al. 2017, equation 3): the difference of confidence and accuracy, over
    bins of confidence of equal width."""
    sure, answers = probabilities.max(dim=1)
    bins = (sure * _BINS).long().clamp(max=_BINS - 1)
    right = (answers == y).double()
    gaps = [(right[bins == b] - sure[bins == b]).sum().abs().item() for b in bins.unique().tolist()]
    return sum(gaps) / len(y)


def strangers(features: Tensor, y: Tensor, k: int, near: Tensor) -> tuple[float, float, float] | None:
    """Pictures of no class: the threshold, a similarity to the nearest class mean, below which a picture is one; and
    the fractions below it of pictures of a class left out, and of known classes. At the threshold most of the known
    stay and most of a class left out go (the mean of the two fractions), or it is a lower one that refuses at most
    `LOST` of the known. None for two classes, where one that is left out leaves nothing to compare.

    Args:
        near: the similarities that `cross_validated` gives.
    """
    if k < 3:
        return None
    left_out = [
        _asked_of_others(features, y - (y > label).long(), k - 1, (), y != label, y == label)[0] for label in range(k)
    ]
    away, here = torch.cat(left_out), near[near.isfinite()]
    between = torch.cat([away, here]).sort().values
    edges = (between[1:] + between[:-1]) / 2
    # The fraction below each edge, by sorting: a comparison of each with each would take memory that grows as n².
    caught, wrong = (
        torch.searchsorted(part.to(edges.dtype).sort().values, edges).double() / len(part) for part in (away, here)
    )
    best = max(0, min(int((caught - wrong).argmax()), int((wrong <= LOST).sum()) - 1))
    return edges[best].item(), caught[best].item(), wrong[best].item()


def learning_curve(features: Tensor, y: Tensor, k: int, head: str, *, seed: int = 0) -> dict[int, float]:
    """The accuracy by pictures a class: 1, 2, 4, … of them learned from, the others asked. Means over random draws."""
    least, generator = int(torch.bincount(y, minlength=k).min()), np.random.default_rng(seed)
    curve, shots = dict[int, float](), 1
    while shots < least:
        right = []
        for _ in range(_DRAWS):
            learned = torch.zeros(len(y), dtype=torch.bool)
            for label in range(k):
                members = torch.nonzero(y == label).flatten()
                learned[members[torch.from_numpy(generator.permutation(len(members))[:shots])]] = True
            _, (scores,) = _asked_of_others(features, y, k, [head], learned, ~learned)
            right.append(_fraction(scores.argmax(dim=1) == y[~learned]))
        curve[shots] = sum(right) / _DRAWS
        shots *= 2
    return curve


def with_twice(curve: Mapping[int, float], accuracy: float) -> float | None:
    """The accuracy to expect of twice as many pictures a class, if errors go on to fall as along the learning curve: as
    a power of the number of pictures (Hestness et al. 2017, arXiv 1712.00409). None if the curve has fewer than two
    points with errors."""
    points = [(math.log(shots), math.log(1 - value)) for shots, value in curve.items() if value < 1]
    if len(points) < 2:
        return None
    x, y = np.array(points).T
    slope = float(np.polyfit(x, y, deg=1)[0])
    return 1 - (1 - accuracy) * 2 ** min(slope, 0.0)
