"""What a classifier will be worth on new pictures, as the pictures that there are can tell."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.api.results import wilson
from metalearn.classifier.heads import HEADS, centred, class_means

FOLDS = 5
_BINS = 10
SHARPEST = 1000.0
"""The largest sharpness that is tried."""
_SHARP = 10.0
"""The sharpness of scores where no picture is left to measure it with."""
_DRAWS = 5
"""Random choices of the pictures for each point of the learning curve."""

_LONGEST = 200
"""Characters of a reason."""

_ONE_EACH = "every class has one picture; add pictures"
_OTHER_CLASSES = "its network was tuned on these pictures, so it would be too good; fit anew to measure it"

log = logging.getLogger("metalearn")


def report_of(
    features: Tensor,
    y: Tensor,
    classes: Sequence[str],
    names: Sequence[str],
    *,
    heads: Sequence[str],
    folds: int,
    seed: int,
) -> dict[str, Any]:
    """Chooses the head, and says what to expect of it, as plain values.

    Args:
        features: of the pictures, [n, width].
        y: their classes, [n] int64.
        classes, names: of the classes and of the pictures.
        heads: those to compare.
        folds: parts of the cross-validation.
        seed: of the division into them.
    """
    k = len(classes)
    fold = folds_of(y, k, most=folds, seed=seed)
    asked = fold >= 0
    if not asked.any():
        log.warning("every class has one picture, so there is none to measure the accuracy with; add pictures")
        nothing = {"head": heads[0], "accuracy": None, "sharpness": _SHARP, "threshold": None}
        return nothing | {"classes": k, "learned_from": len(y), "unknown": _ONE_EACH}
    found = cross_validated(features, y, k, heads, fold)
    head = chosen_head(found, y, asked)
    tuned, none = calibrated(found.scores[head][asked], y[asked]), strangers(features, y, k, found.near)
    curve = learning_curve(features, y, k, head, seed=seed)
    measured = _measured(found.scores[head].argmax(dim=1), y, asked, classes, names)
    return {
        "head": head, "classes": k, "learned_from": len(y), **measured,
        "by_head": _by_head(found, y, asked),
        "sharpness": tuned.sharpness, "calibration_error": tuned.error,
        "threshold": None if none is None else none.threshold,
        "strangers": None if none is None else {"found": none.found, "wrong": none.wrong},
        "by_shots": {str(shots): value for shots, value in curve.items()},
        "with_twice": with_twice(curve, measured["accuracy"]),
    }  # fmt: skip


def report_of_changed(report: Mapping[str, Any], y: Tensor, k: int) -> dict[str, Any]:
    """The report of a classifier whose network was tuned, after pictures came or went: it has no new figures.

    Args:
        report: the one before.
        y: the classes of its pictures, [n] int64, of `k`.
    """
    log.warning("accuracy: not known: %s", _OTHER_CLASSES)
    stays = {name: report[name] for name in ("head", "sharpness", "threshold", "tuning")}
    if k < 3:  # as in `strangers`
        stays["threshold"] = None
    return stays | {"accuracy": None, "classes": k, "learned_from": len(y), "unknown": _OTHER_CLASSES}


def why_unknown(report: Mapping[str, Any]) -> str:
    """Why a report, which may be of any origin, has no accuracy."""
    return str(report.get("unknown", _ONE_EACH))[:_LONGEST]


def compared(tuning: Mapping[str, Any]) -> str:
    """What the comparison of the frozen network with the tuned one has found, in words."""
    if "tuned" not in tuning:
        return "no step fitted into the time; the network stays as it is"
    return (
        f"{tuning['steps']} steps; nested cross-validation: frozen {tuning['frozen']:.1%}, tuned "
        f"{tuning['tuned']:.1%}; the {'tuned' if tuning['kept'] else 'frozen'} network is kept"
    )


def twice_in_words(report: Mapping[str, Any]) -> str:
    """What to expect of twice as many pictures, in words; empty if it is not known."""
    value = report.get("with_twice")
    return "" if value is None else f"with twice the pictures about {value:.1%}, if the curve goes on so"


def strangers_in_words(found: Mapping[str, Any]) -> str:
    """What `Strangers` has found, in words."""
    share = found["found"]
    told = f"found for {share:.0%} of the pictures of a class left out" if share is not None else (
        "how many it finds is not known, since its network was tuned on all classes"
    )  # fmt: skip
    return f"{told}; wrong for {found['wrong']:.0%} of the others"


def report_with_tuned(
    report: Mapping[str, Any],
    features: Tensor,
    by_fold: Sequence[Tensor],
    y: Tensor,
    classes: Sequence[str],
    names: Sequence[str],
    fold: Tensor,
    *,
    heads: Sequence[str],
    folds: int,
    seed: int,
) -> dict[str, Any]:
    """The report, after the frozen network was compared with tuned ones by nested cross-validation: for each fold, the
    others choose the head, and a network that they have tuned gives the features.

    Args:
        report: of the frozen network, by `report_of`, which has had the same other arguments.
        by_fold: for each fold the features [n, width] of its network.

    Returns:
        With `tuning`: the accuracy of both, and whether the tuned one is better by more than one standard error of the
        difference; if so, all other figures are of the tuned one.
    """
    k, asked = len(classes), fold >= 0
    frozen, tuned = (cross_validated(given, y, k, heads, fold) for given in (features, by_fold))
    chosen = [_chosen_by_others(features, y, k, heads, fold != n, folds=folds, seed=seed) for n in range(len(by_fold))]
    answers = [_scores_by_fold(found, chosen, fold).argmax(dim=1) for found in (frozen, tuned)]
    right = [(given == y)[asked] for given in answers]
    gained, lost = int((right[1] & ~right[0]).sum()), int((right[0] & ~right[1]).sum())
    better = gained - lost > math.sqrt(gained + lost)
    compared = {"frozen": _fraction(right[0]), "tuned": _fraction(right[1]), "kept": better}
    if not better:
        return dict(report) | {"tuning": compared}
    measured = calibrated(tuned.scores[report["head"]][asked], y[asked])
    # The network has learned every class, so that none is left to ask strangers of: as many of the known are lost.
    threshold, none = None, None
    if report["strangers"] is not None:
        near = tuned.near[asked]
        threshold = near.quantile(report["strangers"]["wrong"]).item()
        none = {"found": None, "wrong": (near < threshold).double().mean().item()}
    return dict(report) | _measured(answers[1], y, asked, classes, names) | {
        "by_head": _by_head(tuned, y, asked),
        "sharpness": measured.sharpness, "calibration_error": measured.error, "threshold": threshold,
        "strangers": none, "by_shots": {}, "with_twice": None, "tuning": compared,
    }  # fmt: skip


def _measured(
    answers: Tensor, y: Tensor, asked: Tensor, classes: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    """The figures of the answers [n] to the pictures that are `asked`."""
    places, k = torch.nonzero(asked).flatten().tolist(), len(classes)
    answers, truth = answers[asked], y[asked]
    right = answers == truth
    return {
        "pictures": len(truth), "accuracy": _fraction(right),
        "interval95": [*wilson(int(right.sum()), len(truth))],
        "by_class": {classes[label]: _fraction(right[truth == label]) for label in truth.unique().tolist()},
        "confusion": [
            torch.bincount(answers[truth == label], minlength=k).tolist() for label in range(k)
        ],
        "wrong": [
            {"picture": names[place], "label": classes[label], "answer": classes[answer]}
            for place, label, answer in zip(places, truth.tolist(), answers.tolist(), strict=True) if label != answer
        ],
    }  # fmt: skip


def _by_head(found: "CrossValidation", y: Tensor, asked: Tensor) -> dict[str, float]:
    return {name: _fraction(s[asked].argmax(dim=1) == y[asked]) for name, s in found.scores.items()}


def _chosen_by_others(
    features: Tensor, y: Tensor, k: int, heads: Sequence[str], others: Tensor, *, folds: int, seed: int
) -> str:
    """The head that cross-validation over the other pictures chooses."""
    inner = folds_of(y[others], k, most=folds, seed=seed)
    if len(heads) == 1 or not (inner >= 0).any():
        return heads[0]
    return chosen_head(cross_validated(features[others], y[others], k, heads, inner), y[others], inner >= 0)


def _scores_by_fold(found: "CrossValidation", heads: Sequence[str], fold: Tensor) -> Tensor:
    """For each picture the scores of the head of its fold: [n, k]."""
    scores = torch.full_like(found.scores[heads[0]], float("nan"))
    for number, head in enumerate(heads):
        scores[fold == number] = found.scores[head][fold == number]
    return scores


def _fraction(right: Tensor) -> float:
    return right.double().mean().item()


class CrossValidation(NamedTuple):
    """Scores of each picture by heads that have not learned from it.

    Attributes:
        scores: by head, [n, k].
        near: for each picture, the cosine similarity to the nearest class mean.
    """

    scores: Mapping[str, Tensor]
    near: Tensor


class Calibrated(NamedTuple):
    """The temperature by which scores are multiplied before the softmax, and the expected calibration error (Guo et
    al. 2017, equation 3) of the probabilities."""

    sharpness: float
    error: float


class Strangers(NamedTuple):
    """Pictures of no known class: below `threshold`, the similarity to the nearest class mean counts as none.

    Attributes:
        found: the fraction of pictures of a class left out that are told as strangers.
        wrong: the fraction of pictures of known classes that are.
    """

    threshold: float
    found: float
    wrong: float


def folds_of(y: Tensor, k: int, *, most: int = FOLDS, seed: int = 0) -> Tensor:
    """The fold of each picture: [n] int64. Every class is spread over the folds as evenly as it can be. A class with
    fewer pictures than folds misses in some; one with a single picture is never asked for."""
    folds = min(most, int(torch.bincount(y, minlength=k).max()))
    generator, found = np.random.default_rng(seed), torch.full((len(y),), -1)
    first = 0
    for label in range(k):
        members = torch.nonzero(y == label).flatten()
        if len(members) < 2:
            continue
        shuffled = members[torch.from_numpy(generator.permutation(len(members)))]
        found[shuffled] = (torch.arange(len(members)) + first) % folds
        first += len(members)  # so that the folds are equally large over all classes
    return found


def cross_validated(
    features: Tensor | Sequence[Tensor], y: Tensor, k: int, heads: Sequence[str], fold: Tensor
) -> CrossValidation:
    """Each picture scored by heads that have learned from the other folds.

    Args:
        features: [n, width], or these for each fold.
    """
    scores = {head: torch.full((len(y), k), float("nan"), dtype=torch.float64) for head in heads}
    near = torch.full((len(y),), float("nan"), dtype=torch.float64)
    for number in range(int(fold.max()) + 1):
        asked, known = fold == number, fold != number
        given = features if isinstance(features, Tensor) else features[number]
        centre = given[known].double().mean(dim=0)
        z, new = centred(given[known], centre), centred(given[asked], centre)
        near[asked] = (new @ class_means(z, y[known], k).T).amax(dim=1)
        for head in heads:
            rule = HEADS[head]
            scores[head][asked] = rule.score(rule.fit(z, y[known], k), new)
    return CrossValidation(scores, near)


def chosen_head(found: CrossValidation, y: Tensor, asked: Tensor) -> str:
    """The head that is right most often; of equal ones the first."""
    right = {head: int((s[asked].argmax(dim=1) == y[asked]).sum()) for head, s in found.scores.items()}
    return max(right, key=lambda head: right[head])


def calibrated(scores: Tensor, y: Tensor) -> Calibrated:
    """The sharpness with the highest likelihood of the labels, by golden section over its logarithm.

    Labels are smoothed as Platt 1999 ("Probabilistic outputs for support vector machines") does: where all n answers
    are right, the mean probability of an answer is (n + 1) / (n + 2), and not 1.
    """
    n, k = scores.shape
    smoothing = k / ((k - 1) * (n + 2))

    def loss(power: float) -> float:
        return F.cross_entropy(scores * math.exp(power), y, label_smoothing=smoothing).item()

    low, high, ratio = -math.log(SHARPEST), math.log(SHARPEST), (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    sharpness = math.exp((low + high) / 2)
    return Calibrated(sharpness, calibration_error(torch.softmax(scores * sharpness, dim=1), y))


def calibration_error(probabilities: Tensor, y: Tensor) -> float:
    """The expected difference of confidence and accuracy, over bins of confidence of equal width."""
    sure, answers = probabilities.max(dim=1)
    bins = (sure * _BINS).long().clamp(max=_BINS - 1)
    right = (answers == y).double()
    gaps = [(right[bins == b] - sure[bins == b]).sum().abs().item() for b in bins.unique().tolist()]
    return sum(gaps) / len(y)


def strangers(features: Tensor, y: Tensor, k: int, near: Tensor) -> Strangers | None:
    """The threshold at which most pictures of known classes stay and most of a class left out go (the mean of the two
    fractions); None for two classes, where one that is left out leaves nothing to compare.

    Args:
        near: of each picture, as in `CrossValidation`.
    """
    if k < 3:
        return None
    unknown = []
    for label in range(k):
        others, out = y != label, y == label
        centre = features[others].double().mean(dim=0)
        z = centred(features[others], centre)
        relabelled = y[others] - (y[others] > label).long()
        unknown.append((centred(features[out], centre) @ class_means(z, relabelled, k - 1).T).amax(dim=1))
    away, here = torch.cat(unknown), near[near.isfinite()]
    between = torch.cat([away, here]).sort().values
    edges = (between[1:] + between[:-1]) / 2
    # The fraction below each edge, by sorting: a comparison of each with each would take memory that grows as n².
    found, wrong = (
        torch.searchsorted(part.to(edges.dtype).sort().values, edges).double() / len(part) for part in (away, here)
    )
    best = int((found - wrong).argmax())
    return Strangers(edges[best].item(), found[best].item(), wrong[best].item())


def learning_curve(features: Tensor, y: Tensor, k: int, head: str, *, seed: int = 0) -> dict[int, float]:
    """The accuracy by pictures a class: 1, 2, 4, … of them learned from, the others asked. Means over random draws."""
    least, rule = int(torch.bincount(y, minlength=k).min()), HEADS[head]
    generator, curve = np.random.default_rng(seed), dict[int, float]()
    shots = 1
    while shots < least:
        right = []
        for _ in range(_DRAWS):
            known = torch.zeros(len(y), dtype=torch.bool)
            for label in range(k):
                members = torch.nonzero(y == label).flatten()
                known[members[torch.from_numpy(generator.permutation(len(members))[:shots])]] = True
            centre = features[known].double().mean(dim=0)
            state = rule.fit(centred(features[known], centre), y[known], k)
            answers = rule.score(state, centred(features[~known], centre)).argmax(dim=1)
            right.append((answers == y[~known]).double().mean().item())
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
