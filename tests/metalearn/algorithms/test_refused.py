"""Settings, networks and targets that a learner cannot take: the message names the key."""

from collections.abc import Callable
from typing import Any

import pytest

from metalearn.algorithms.anil import anil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.common import inner
from metalearn.algorithms.common.losses import measured_by, squared
from metalearn.algorithms.imaml import imaml
from metalearn.algorithms.in_context import in_context
from metalearn.algorithms.laplacian_shot import laplacian_shot
from metalearn.algorithms.maml_pp import maml_pp
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.metaoptnet import metaoptnet
from metalearn.algorithms.pfn import pfn
from metalearn.algorithms.reptile import reptile
from metalearn.algorithms.simpleshot import simpleshot
from metalearn.algorithms.tim import tim
from metalearn.models.mlp import mlp
from metalearn.models.table import table
from metalearn.types import Batch
from tests.metalearn.learners import LAPLACIAN, LEARNERS, PP, STEPS, TIM, linear_model, network, random, start_of

MAKES: dict[Callable[..., object], dict[str, Any]] = {
    imaml: {**STEPS, "strength": 1.0, "cg_steps": 1},
    cavia: {**STEPS, "contexts": 2},
    maml_pp: {**STEPS, **PP},
    meta_curvature: STEPS,
    reptile: {**STEPS, "inner_batch": None, "eval_batch": None},
    inner.adam: {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8},
    metaoptnet: {"cost": 0.1, "ridge": 1.0, "scale": 1.0},
    in_context: {"width": 8, "heads": 2, "layers": 1},
    tim: TIM,
    laplacian_shot: {**LAPLACIAN, "rectified": False, "centred": False},
    simpleshot: {"centred": False},
}
"""Learners, and settings that are right."""


@pytest.mark.parametrize(
    ("factory", "changed"),
    [
        (maml_pp, {"inner_steps": 0}), (maml_pp, {"per_step_norm": True, "model": linear_model(3)}),
        (imaml, {"strength": 0}), (imaml, {"spring": "once"}),
        (imaml, {"strength": 10.0, "inner_lr": 0.4, "spring": "after"}),
        (imaml, {"eval_strength": 3.0, "strength": 2.0, "inner_lr": 0.4, "spring": "after"}),
        (cavia, {"contexts": 0}), (cavia, {"layer": 5}), (cavia, {"layer": 1, "model": linear_model(3)}),
        (meta_curvature, {"first_order": 1}), (reptile, {"inner_batch": 0}), (inner.adam, {"beta1": 1.0}),
        (metaoptnet, {"cost": 0}), (metaoptnet, {"ridge": 0.0}), (metaoptnet, {"scale": -1}),
        (in_context, {"heads": 5}), (in_context, {"heads": 16}), (in_context, {"layers": 0}),
        (in_context, {"width": 8.0}),
        (tim, {"temperature": 0}), (tim, {"support_weight": -1}), (tim, {"conditional_weight": "x"}),
        (tim, {"eval_steps": -1}),
        (laplacian_shot, {"neighbours": 0}), (laplacian_shot, {"rectified": 1}), (laplacian_shot, {"strength": -0.5}),
        (simpleshot, {"centred": "no"}),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(factory: Callable[..., object], changed: dict[str, Any]) -> None:
    model = {} if factory is inner.adam else {"model": network()}
    factory(**(model | MAKES[factory]))
    with pytest.raises(ValueError, match=f"^{next(iter(changed))}="):
        factory(**(model | MAKES[factory] | changed))


def test_a_spring_may_come_to_the_start_and_no_further() -> None:
    right = MAKES[imaml] | {"model": linear_model(1), "inner_lr": 0.15, "spring": "after"}
    imaml(**right | {"strength": 6.66})
    with pytest.raises(ValueError, match=r"^strength=10\.0: "):
        imaml(**right | {"strength": 10.0})


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: anil(model=linear_model(3), **STEPS), "model=conv4"),
        (lambda: tim(model=network()._replace(head=None), **TIM), "model=conv4"),
        (lambda: in_context(model=linear_model(3), **MAKES[in_context]), "model=conv4"),
        (lambda: pfn(model=mlp(inputs=1, outputs=1)), "type model=table"),
        (lambda: pfn(model=measured_by(table(head="bars"), squared())), "type loss=auto"),
    ],
)
def test_a_network_that_does_not_fit_is_named(make: Callable[[], object], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


@pytest.mark.parametrize("name", ["protonet", "tim"])
def test_real_numbers_are_no_classes(name: str) -> None:
    learner, waves = LEARNERS[name](network()), Batch(random(1, 4, 1, 12, 12, seed=1), random(1, 4, 1, seed=2))
    with pytest.raises(ValueError, match="type algorithm=maml"):
        learner.adapt(start_of(learner), waves)(waves.x)
