"""Every algorithm on a small network and small tasks, made without a config: the machine may have no Hydra."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.ways import SEED, character_source
from metalearn.algorithms.anil import anil
from metalearn.algorithms.baseline_pp import baseline_pp
from metalearn.algorithms.bd_cspn import bd_cspn
from metalearn.algorithms.boil import boil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.deepbdc import deepbdc
from metalearn.algorithms.feat import feat
from metalearn.algorithms.finetune import finetune
from metalearn.algorithms.imaml import imaml
from metalearn.algorithms.in_context import in_context
from metalearn.algorithms.laplacian_shot import laplacian_shot
from metalearn.algorithms.maml import maml
from metalearn.algorithms.maml_pp import maml_pp
from metalearn.algorithms.matching import matching
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.meta_sgd import meta_sgd
from metalearn.algorithms.metaoptnet import metaoptnet
from metalearn.algorithms.oml import oml
from metalearn.algorithms.protomaml import protomaml
from metalearn.algorithms.protonet import protonet
from metalearn.algorithms.r2d2 import r2d2
from metalearn.algorithms.reptile import reptile
from metalearn.algorithms.scratch import scratch
from metalearn.algorithms.simpleshot import simpleshot
from metalearn.algorithms.supervised import supervised
from metalearn.algorithms.tim import tim
from metalearn.models.conv4 import conv4
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.glyphs import glyph_characters
from metalearn.types import Algorithm, Model, TaskSource

WAYS, FILTERS, IMAGE_SIZE = 5, 16, 28
ACTIVATION = "softplus"
"""A smooth one: at a kink, two correct programs may differ."""

CHARACTERS = 20
"""The classes of the samples that some algorithms are trained on."""

DESCENT: dict[str, Any] = {"inner_lr": 0.1, "inner_steps": 2, "eval_steps": 2}

ALGORITHMS: dict[str, Callable[[Model], Algorithm]] = {
    "maml": lambda model: maml(model=model, **DESCENT),
    "fomaml": lambda model: maml(model=model, **DESCENT, first_order=True),
    "anil": lambda model: anil(model=model, **DESCENT),
    "protomaml": lambda model: protomaml(model=model, **DESCENT),
    "boil": lambda model: boil(model=model, **DESCENT),
    "meta_sgd": lambda model: meta_sgd(model=model, **DESCENT),
    "maml_pp": lambda model: maml_pp(
        model=model, **DESCENT, multi_step_until=10, first_order_until=0, learned_rates=True, per_step_norm=True
    ),
    "cavia": lambda model: cavia(model=model, **DESCENT, contexts=5, layer=3),
    "meta_curvature": lambda model: meta_curvature(model=model, **DESCENT),
    "reptile": lambda model: reptile(model=model, **DESCENT, inner_batch=5, eval_batch=5),
    "imaml": lambda model: imaml(model=model, **DESCENT, strength=5.0, cg_steps=5),
    "protonet": lambda model: protonet(model=model),
    "deepbdc": lambda model: deepbdc(model=model, channels=4),
    "feat": lambda model: feat(model=model, temperature=64.0),
    "matching": lambda model: matching(model=model, scale=1.0),
    "oml": lambda model: oml(model=model, inner_lr=0.05, scale=40.0),
    "r2d2": lambda model: r2d2(model=model, strength=1.0, scale=1.0),
    "in_context": lambda model: in_context(model=model, width=32, heads=4, layers=2),
    "metaoptnet": lambda model: metaoptnet(model=model, cost=0.1, ridge=1.0, scale=1.0),
    "scratch": lambda model: scratch(model=model, inner_lr=0.1, eval_steps=2),
    "finetune": lambda model: finetune(model=model, inner_lr=0.1, eval_steps=2, ways=WAYS, whole=False),
    "baseline_pp": lambda model: baseline_pp(model=model, inner_lr=0.1, eval_steps=2, scale=2.0, task_scale=2.0),
    "simpleshot": lambda model: simpleshot(model=model, centred=True),
    "tim": lambda model: tim(
        model=model, inner_lr=0.01, eval_steps=2, temperature=15.0, support_weight=0.1, conditional_weight=0.1
    ),
    "bd_cspn": lambda model: bd_cspn(model=model, eval_steps=2, scale=10.0),
    "laplacian_shot": lambda model: laplacian_shot(
        model=model, strength=1.0, neighbours=2, eval_steps=2, rectified=True, centred=True
    ),
    "supervised": lambda model: supervised(model=model),
}

ON_SAMPLES = ("finetune", "baseline_pp", "simpleshot", "tim", "bd_cspn", "laplacian_shot", "supervised")
"""The algorithms that are trained on samples."""


class CheckedTraining(NamedTuple):
    """An algorithm, the source of its training tasks or samples, and how many of them a step takes."""

    algorithm: Algorithm
    source: TaskSource
    batch: int


def training_of(name: str) -> CheckedTraining:
    """The training of an algorithm of the table."""
    classes = CHARACTERS if name in ON_SAMPLES else WAYS
    model = conv4(ways=classes, channels=1, image_size=IMAGE_SIZE, filters=FILTERS, activation=ACTIVATION)
    return CheckedTraining(ALGORITHMS[name](model), *((_samples(), 32) if name in ON_SAMPLES else (_tasks(), 4)))


def _tasks() -> TaskSource:
    return character_source(WAYS, queries=3)[1]


def _samples() -> TaskSource:
    return glyph_characters(
        ways=CHARACTERS, train_drawings=14, val_drawings=1, image_size=IMAGE_SIZE, channels=1, known=20,
        seeds=Seeds(SEED, SEED),
    )  # fmt: skip
