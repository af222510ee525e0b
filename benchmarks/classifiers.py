"""What few pictures of a dozen classes are worth, by several ways to learn them: a table in Markdown.

    python benchmarks/classifiers.py --seeds 20 --easyfsl /path/to/python
    python benchmarks/classifiers.py --folder my_pictures --minutes 5

Without --folder, the twelve classes of tests/drawn_pictures.py are drawn, anew for each seed: eight pictures of each to
learn from, ten to be asked. --easyfsl is a Python that has easyfsl (python -m venv V; V/bin/pip install easyfsl). All
but the network trained from scratch have the same features, those of EfficientNet-Lite0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metalearn.api.pictures import all_seen
from metalearn.api.results import wilson
from metalearn.classifier.backbones import features_of
from metalearn.classifier.classifier import PictureClassifier
from metalearn.classifier.heads import HEADS, centred
from metalearn.cli.arguments import real, whole
from metalearn.reporting.provenance import made_with
from tests import drawn_pictures

KNOWN, ASKED = 8, 10
"""Pictures of a class."""

_SIDE, _EPOCHS, _BATCH = 64, 40, 24
"""Of the network that is trained from scratch."""

_EASYFSL_SECONDS = 600

OURS = "ours: `metalearn fit`"


class Pictures(NamedTuple):
    """Pictures [n] with the numbers of their classes [n]."""

    images: list[Image.Image]
    y: Tensor


class Problem(NamedTuple):
    """Pictures to learn from, and pictures to be asked; of both, the features [n, width]."""

    known: Pictures
    asked: Pictures
    z: Tensor
    q: Tensor


def drawn(seed: int) -> tuple[Pictures, Pictures]:
    parts = tuple[list[tuple[Image.Image, int]], list[tuple[Image.Image, int]]](([], []))
    for label, thing in enumerate(drawn_pictures.THINGS):
        for part, count, start in zip(parts, (KNOWN, ASKED), (seed, 1000 + seed), strict=True):
            generator = np.random.default_rng([start, label])
            part += [(drawn_pictures.drawn(thing, generator), label) for _ in range(count)]
    known, asked = (Pictures([x for x, _ in part], torch.tensor([y for _, y in part])) for part in parts)
    return known, asked


def of_folder(root: Path, seed: int) -> tuple[Pictures, Pictures]:
    """Of each class, `KNOWN` of its pictures, drawn at random, and the others."""
    generator, parts = np.random.default_rng(seed), (list[tuple[Path, int]](), list[tuple[Path, int]]())
    for label, folder in enumerate(sorted(path for path in root.iterdir() if path.is_dir())):
        files = generator.permutation(sorted(map(str, folder.iterdir()))).tolist()
        parts[0].extend((Path(file), label) for file in files[:KNOWN])
        parts[1].extend((Path(file), label) for file in files[KNOWN:])
    known, asked = (
        Pictures([Image.open(x).convert("RGB") for x, _ in part], torch.tensor([y for _, y in part])) for part in parts
    )
    return known, asked


# The ways to learn: each gives the answers to the pictures that are asked


def by_head(name: str) -> Callable[[Problem], Tensor]:
    def answers(problem: Problem) -> Tensor:
        centre, k = problem.z.double().mean(dim=0), int(problem.known.y.max()) + 1
        state = HEADS[name].fit(centred(problem.z, centre), problem.known.y, k)
        return HEADS[name].score(state, centred(problem.q, centre)).argmax(dim=1)

    return answers


def from_scratch(problem: Problem) -> Tensor:
    """Four blocks of 32 filters on 64 × 64 pixels, and Adam."""
    torch.manual_seed(0)
    blocks = [
        [nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
        for width in (3, 32, 32, 32)
    ]
    network = nn.Sequential(*(layer for block in blocks for layer in block), nn.Flatten(), nn.LazyLinear(1000))
    x, q = (
        torch.stack([
            torch.from_numpy(np.asarray(image.resize((_SIDE, _SIDE)), np.float32) / 255).permute(2, 0, 1)
            for image in part.images
        ])
        for part in (problem.known, problem.asked)
    )  # fmt: skip
    network(x[:2])  # gives the last layer its width
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(len(x)).split(_BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(x[chosen]), problem.known.y[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        answers: Tensor = network.eval()(q).argmax(dim=1)
    return answers


def by_easyfsl(python: str, problems: Sequence[Problem]) -> list[dict[str, Tensor]]:
    """For each problem the answers by method; in one process, whose start takes longer than the answers."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{number}.npz" for number in range(len(problems))]
        for file, problem in zip(files, problems, strict=True):
            np.savez(file, known=problem.z.numpy(), labels=problem.known.y.numpy(), asked=problem.q.numpy())
        done = subprocess.run(
            [python, str(Path(__file__).with_name("with_easyfsl.py")), *files], capture_output=True, text=True,
            timeout=_EASYFSL_SECONDS, check=False,
        )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"error: --easyfsl={python}: {last[0]}; type a Python that has easyfsl")
    found = json.loads(done.stdout.splitlines()[-1])
    return [{name: torch.tensor(answers) for name, answers in each.items()} for each in found]


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
    found, promised = defaultdict[str, Measured](lambda: Measured([], [])), list[Promise]()
    problems = list[Problem]()
    try:
        for seed in range(options.seeds):
            of_seed, promise, problem = measure_seed(options, seed)
            promised.append(promise)
            problems.append(problem)
            for name, (right, seconds) in of_seed.items():
                found[name].right.append(right)
                found[name].seconds.append(seconds)
            print(f"seed {seed}: {promise}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(promised)} of {options.seeds} seeds are complete", file=sys.stderr)
    if options.easyfsl is not None and problems:
        for problem, answers in zip(problems, by_easyfsl(options.easyfsl, problems), strict=True):
            for name, given in answers.items():
                of_method = found[f"easyfsl, {name}, the same features"]
                of_method.right.append(int((given == problem.asked.y).sum()))
                of_method.seconds.append(float("nan"))
    return found, promised


def measure_seed(options: argparse.Namespace, seed: int) -> tuple[dict[str, tuple[int, float]], Promise, Problem]:
    """For each way the right answers and the seconds; the rest as of `measure`."""
    known, asked = drawn(seed) if options.folder is None else of_folder(options.folder, seed)
    began = time.process_time()
    ours = PictureClassifier(seed=seed, minutes=options.minutes or 0).fit(known.images, known.y.tolist())
    seconds = time.process_time() - began
    tuned = ours.report_.get("tuning", {}).get("kept", False)
    backbone = PictureClassifier().opened() if tuned else ours.opened()
    q = features_of(backbone, all_seen(asked.images, backbone.form, "X"))
    z = features_of(backbone, all_seen(known.images, backbone.form, "X")) if tuned else ours._features
    problem = Problem(known, asked, z, q)
    given = ours.predict(asked.images) if tuned else _asked(ours, q)
    right = int((torch.from_numpy(np.asarray(given)) == asked.y).sum())
    found = {OURS: (right, seconds)}
    low, high = ours.report_["interval95"]
    ways: dict[str, Callable[[Problem], Tensor]] = {
        "linear head, the same features": by_head("logistic 0.001"),
        "class means, the same features": by_head("class means"),
    }
    if not options.without_scratch:
        ways["trained from scratch"] = from_scratch
    for name, way in ways.items():
        began = time.process_time()
        answers = way(problem)
        found[name] = int((answers == asked.y).sum()), time.process_time() - began
    return found, Promise(ours.report_["accuracy"], (low, high), right, len(asked.y)), problem


def _asked(ours: PictureClassifier, q: Tensor) -> Sequence[int]:
    return [int(ours.classes_[answer.probabilities.argmax()]) for answer in ours.answers_of(q)]


def table(found: dict[str, Measured], asked: int) -> Iterator[str]:
    yield "| way | accuracy | lowest | seconds of a core |"
    yield "| --- | --- | --- | --- |"
    for name, (right, seconds) in sorted(found.items(), key=lambda pair: -sum(pair[1].right)):
        low, high = wilson(sum(right), asked * len(right))
        time_of = "" if np.isnan(seconds[0]) else f"{np.median(seconds):.1f}"
        reached = f"{np.mean(right) / asked:.1%} ({low:.1%} to {high:.1%})"
        yield f"| {name} | {reached} | {min(right) / asked:.1%} | {time_of} |"


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
    parser.add_argument("--folder", type=Path, help="has a folder of pictures for each class, more than eight in each")
    parser.add_argument("--easyfsl", metavar="PYTHON", help="a Python that has easyfsl")
    parser.add_argument("--minutes", type=real, help="of tuning, as for metalearn fit")
    parser.add_argument("--without-scratch", action="store_true", help="train no network from scratch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["METALEARN_CACHE"] = cache  # features of an earlier run would cost no seconds
        found, promised = measure(options)
    if not promised:
        return
    print("\n".join([*table(found, promised[0].asked), "", *promises(promised)]))
    if options.easyfsl is None:
        print("easyfsl: left out; type --easyfsl PYTHON.")
    origin = made_with()
    print(f"{origin['date']}, {origin['hardware']}, {origin['versions']}; load {load:.1f} at the start.")


if __name__ == "__main__":
    main()
