"""What needs no training is worth on the drawn sets: class means of pixels, and of frozen features. Markdown tables.

    pip install 'metalearn-train[pictures]'
    metalearn data emoji && metalearn data kanji
    python -m benchmarks.drawn_pictures emoji kanji
    python -m benchmarks.drawn_pictures kanji --tasks 100 --only pixels
    python -m benchmarks.drawn_pictures --confusions outputs/protonet_emoji/seed0/checkpoints/best --tasks 2000

A query belongs to the class whose mean is nearest. The tasks are those of `metalearn train dataset=NAME` with the same
keys: the rows of trained learners in docs/results/drawn.md have the same test. With --confusions: a table of the pairs
of classes that a trained learner confuses most in its own test tasks.
"""

import argparse
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import metalearn
from metalearn.api.learner import Classification
from metalearn.classifier.backbones import backbone_of
from metalearn.cli.arguments import whole
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.reporting.provenance import made_with
from metalearn.tasks.common.identities import class_names_of
from metalearn.types import TaskSource

HELD = {
    "emoji": "noto-v1,emojione-v1,fxemoji",
    "kanji": "bizudgothic,cwfs,cwyen,dotum,ipaexm,kiloji,mona,reggaeone,setofont,trainone,vl-gothic",
}
"""Drawers that a test of unseen ones holds back: of emoji the older three designs; of kanji eleven fonts, chosen before
anything was measured."""

FULL = {"emoji": 84, "kanji": 56}
"""The pictures' height and width, for the frozen network; pixels are compared in the size of the trained networks."""


class Protocol(NamedTuple):
    """A test: its ways, shots and queries, and what it shows, as `dataset.test` says."""

    ways: int
    shots: int
    queries: int
    test: str = "all"

    @property
    def title(self) -> str:
        shown = "" if self.test == "all" else f" {self.test}"
        return f"{self.ways}w{self.shots}s{shown}"

    def keys(self, name: str) -> list[str]:
        """The overrides of a test on the set called `name`."""
        held = [] if self.test == "all" else [f"dataset.held_drawers=[{HELD[name]}]", f"dataset.test={self.test}"]
        return [f"dataset.ways={self.ways}", f"dataset.shots={self.shots}", f"dataset.queries={self.queries}", *held]


PROTOCOLS = {
    "emoji": (
        Protocol(5, 1, 3), Protocol(5, 5, 1), Protocol(20, 1, 3), Protocol(5, 1, 1, "held"), Protocol(5, 1, 1, "cross"),
        Protocol(5, 5, 1, "cross"),
    ),
    "kanji": (
        Protocol(5, 1, 5), Protocol(5, 5, 5), Protocol(20, 1, 5), Protocol(5, 1, 5, "held"), Protocol(5, 1, 5, "cross"),
        Protocol(20, 1, 5, "held"), Protocol(20, 1, 5, "cross"),
    ),
}  # fmt: skip

Features = Callable[[Tensor], Tensor]
"""From pictures [n, c, h, w] in [0, 1] to features [n, d]."""


def frozen_features() -> Features:
    """Those of EfficientNet-Lite0. Each picture is computed once, whatever task it is in."""
    backbone, known = backbone_of(), dict[bytes, Tensor]()

    def features(pictures: Tensor) -> Tensor:
        names = [hashlib.sha256(picture.numpy().tobytes()).digest() for picture in pictures.contiguous()]
        fresh = {name: number for number, name in enumerate(names) if name not in known}
        if fresh:
            shown = pictures[list(fresh.values())].expand(-1, 3, -1, -1)
            size = backbone.form.size
            large = torch.nn.functional.interpolate(
                shown, size=(size, size), mode="bicubic", align_corners=False, antialias=True
            )
            with torch.inference_mode():
                found = backbone.network(large.clamp(0, 1))
            known.update(zip(fresh, found.clone(), strict=True))
        return torch.stack([known[name] for name in names])

    return features


def accuracy_of(source: TaskSource, features: Features, tasks: int) -> tuple[float, float]:
    """Mean and 95% interval of the accuracy over test tasks."""
    right = []
    for number in range(tasks):
        support, query = source.episodes("test", torch.tensor([number]))
        known, asked = (features(batch.x[0]) for batch in (support, query))
        ways = int(support.y.max()) + 1
        means = torch.stack([known[support.y[0] == label].mean(0) for label in range(ways)])
        right.append((torch.cdist(asked, means).argmin(1) == query.y[0]).double().mean())
    values = torch.stack(right)
    return values.mean().item(), 1.96 * values.std().item() / math.sqrt(tasks)


def source_of(name: str, protocol: Protocol, *keys: str) -> TaskSource:
    """The tasks of `metalearn train dataset=NAME` with the keys of a protocol."""
    found: TaskSource = build(compose_config([f"dataset={name}", *protocol.keys(name), *keys]).config, "dataset")
    return found


def confusions(checkpoint: str, tasks: int) -> list[tuple[int, int, str, str]]:
    """Of each pair of classes that were in a task together: how many queries were taken for one of the other class, and
    of how many; and both names. The most frequent come first."""
    learner = metalearn.load(checkpoint)
    wrong, asked_of = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for number in range(tasks):
        names = class_names_of(learner.taught.source, "test", number)
        support, query = learner.taught.source.episodes("test", torch.tensor([number]))
        known, asked = ([*(batch.x[0] * 255).round().byte().movedim(1, -1).numpy()] for batch in (support, query))
        adapted = learner.adapt(known, [names[label] for label in support.y[0].tolist()])
        assert isinstance(adapted, Classification)
        for found, label in zip(adapted.predict(asked), query.y[0].tolist(), strict=True):
            pairs = [tuple(sorted((names[label], other))) for other in names if other != names[label]]
            asked_of.update(pairs)
            if found.label != names[label]:
                wrong[tuple(sorted((names[label], str(found.label))))] += 1
    return [(count, asked_of[pair], *pair) for pair, count in wrong.most_common()]  # type: ignore[misc]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*sorted(PROTOCOLS), []])
    parser.add_argument("--confusions", metavar="CHECKPOINT", help="the pairs of classes that this learner confuses")
    parser.add_argument("--tasks", type=whole(2), default=600, help="test tasks of a figure")
    parser.add_argument("--only", choices=["pixels", "frozen", "frozen, of length 1"], help="one row")
    options = parser.parse_args(arguments)
    if options.confusions:
        print("| taken for each other | queries | of |\n| --- | --- | --- |")
        for count, of, one, other in confusions(options.confusions, options.tasks)[:20]:
            print(f"| {one}, {other} | {count} | {of} |")
        print("\n" + "; ".join(map(str, made_with().values())))
        return
    frozen = frozen_features()
    rows: dict[str, Features] = {
        "pixels": lambda pictures: pictures.flatten(1),
        "frozen": frozen,
        "frozen, of length 1": lambda pictures: torch.nn.functional.normalize(frozen(pictures)),
    }
    for name in options.sets:
        protocols = PROTOCOLS[name]
        print(
            f"\n| {name} | {' | '.join(one.title for one in protocols)} | minutes |\n|{' --- |' * (len(protocols) + 2)}"
        )
        for row in [options.only] if options.only else rows:
            began = time.perf_counter()
            size = [f"dataset.image_size={FULL[name]}"] if row != "pixels" else []
            cells = [
                "{:.2%} ± {:.2%}".format(*accuracy_of(source_of(name, one, *size), rows[row], options.tasks))
                for one in protocols
            ]
            print(f"| {row} | {' | '.join(cells)} | {(time.perf_counter() - began) / 60:.1f} |", flush=True)
    print("\n" + "; ".join(map(str, made_with().values())))


if __name__ == "__main__":
    main()
