"""What few pictures of a dozen classes are worth, by several ways to learn them: a table in Markdown.

    python benchmarks/classifiers.py --seeds 20

The twelve classes of tests/drawn_pictures.py are drawn for each seed: eight pictures of each to learn from, ten to be
asked. All ways have the same features, those of EfficientNet-Lite0.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metalearn.api.pictures import all_seen
from metalearn.api.results import wilson
from metalearn.classifier.classifier import PictureClassifier
from metalearn.classifier.heads import HEADS, centred
from metalearn.cli.arguments import whole
from metalearn.reporting.provenance import made_with
from tests import drawn_pictures

KNOWN, ASKED = 8, 10
"""Pictures of a class."""

OURS = "ours: `metalearn fit`"


class Pictures(NamedTuple):
    """Pictures [n] with the numbers of their classes [n]."""

    images: list[Image.Image]
    y: Tensor


class Problem(NamedTuple):
    """Pictures to learn from, and pictures to be asked; of both, the features [n, width]."""

    support: Pictures
    asked: Pictures
    z: Tensor
    q: Tensor


def drawn(seed: int) -> tuple[Pictures, Pictures]:
    parts = tuple[list[tuple[Image.Image, int]], list[tuple[Image.Image, int]]](([], []))
    for label, thing in enumerate(drawn_pictures.THINGS):
        for part, count, start in zip(parts, (KNOWN, ASKED), (seed, 1000 + seed), strict=True):
            generator = np.random.default_rng([start, label])
            part += [(drawn_pictures.drawn(thing, generator), label) for _ in range(count)]
    support, asked = (Pictures([x for x, _ in part], torch.tensor([y for _, y in part])) for part in parts)
    return support, asked


# The ways to learn: each gives the answers to the pictures that are asked


def by_head(name: str) -> Callable[[Problem], Tensor]:
    def answers(problem: Problem) -> Tensor:
        centre, k = problem.z.double().mean(dim=0), int(problem.support.y.max()) + 1
        state = HEADS[name].fit(centred(problem.z, centre), problem.support.y, k)
        return HEADS[name].score(state, centred(problem.q, centre)).argmax(dim=1)

    return answers


class Measured(NamedTuple):
    """For each seed the number of right answers, and the seconds of a core that it took."""

    right: list[int]
    seconds: list[float]


class Promise(NamedTuple):
    """What cross-validation of a seed has promised, with its interval of 95%, and how many of the pictures that were
    asked are right."""

    accuracy: float
    interval: tuple[float, float]
    right: int
    asked: int

    @property
    def within(self) -> bool:
        """Whether the promised interval has what was reached."""
        return self.interval[0] <= self.right / self.asked <= self.interval[1]

    @property
    def covers(self) -> bool:
        """Whether one of the two lies within the interval of the other: what was reached is a sample, too."""
        low, high = wilson(self.right, self.asked)
        return self.within or low <= self.accuracy <= high


def measure(options: argparse.Namespace) -> tuple[dict[str, Measured], list[Promise]]:
    """What each way has reached, and what ours has promised for each seed. Ctrl-C leaves out the seeds that are not
    complete."""
    results, promised = defaultdict[str, Measured](lambda: Measured([], [])), list[Promise]()
    try:
        for seed in range(options.seeds):
            of_seed, promise = measure_seed(options, seed)
            promised.append(promise)
            for name, (right, seconds) in of_seed.items():
                results[name].right.append(right)
                results[name].seconds.append(seconds)
            print(f"seed {seed}: {promise}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(promised)} of {options.seeds} seeds are complete", file=sys.stderr)
    return results, promised


def measure_seed(options: argparse.Namespace, seed: int) -> tuple[dict[str, tuple[int, float]], Promise]:
    """For each way the right answers and the seconds; the rest as of `measure`."""
    support, asked = drawn(seed)
    began = time.process_time()
    ours = PictureClassifier(seed=seed).fit(support.images, support.y.tolist())
    seconds = time.process_time() - began
    backbone = ours.opened()
    q = backbone.features(all_seen(asked.images, backbone.form, "X"))
    z = ours._features
    problem = Problem(support, asked, z, q)
    predicted = _asked(ours, q)
    right = int((torch.from_numpy(np.asarray(predicted)) == asked.y).sum())
    results = {OURS: (right, seconds)}
    low, high = ours.report_["interval95"]
    ways: dict[str, Callable[[Problem], Tensor]] = {
        "linear head, the same features": by_head("logistic 0.001"),
        "class means, the same features": by_head("class means"),
    }
    for name, way in ways.items():
        began = time.process_time()
        answers = way(problem)
        results[name] = int((answers == asked.y).sum()), time.process_time() - began
    return results, Promise(ours.report_["accuracy"], (low, high), right, len(asked.y))


def _asked(ours: PictureClassifier, q: Tensor) -> Sequence[int]:
    return [int(ours.classes_[answer.probabilities.argmax()]) for answer in ours.answers_of(q)]


def table(results: dict[str, Measured], asked: int) -> Iterator[str]:
    yield "| way | accuracy | lowest | seconds of a core |"
    yield "| --- | --- | --- | --- |"
    for name, (right, seconds) in sorted(results.items(), key=lambda pair: -sum(pair[1].right)):
        low, high = wilson(sum(right), asked * len(right))
        reached = f"{np.mean(right) / asked:.1%} ({low:.1%} to {high:.1%})"
        yield f"| {name} | {reached} | {min(right) / asked:.1%} | {np.median(seconds):.1f} |"


def promises(promised: Sequence[Promise]) -> Iterator[str]:
    yield "| seed | promised | its interval | reached | within | each other's |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for seed, one in enumerate(promised):
        interval = f"{one.interval[0]:.1%} to {one.interval[1]:.1%}"
        words = " | ".join("yes" if fulfilled else "no" for fulfilled in (one.within, one.covers))
        yield f"| {seed} | {one.accuracy:.1%} | {interval} | {one.right / one.asked:.1%} | {words} |"
    within, covers = (sum(getattr(one, name) for one in promised) for name in ("within", "covers"))
    of = f"of {len(promised)} seeds"
    yield f"\nWhat was reached lies within what was promised: {within} {of}; within each other's intervals: {covers}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=whole(1), default=3, help="how many times (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["METALEARN_CACHE"] = cache  # features of an earlier run would cost no seconds
        results, promised = measure(options)
    if not promised:
        return
    print("\n".join([*table(results, promised[0].asked), "", *promises(promised)]))
    origin = made_with()
    print(f"{origin['date']}, {origin['hardware']}, {origin['versions']}; load {load:.1f} at the start.")


if __name__ == "__main__":
    main()
