"""Checkpointed inner steps: the same bits, and memory that grows by the parameters alone."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

from metalearn.algorithms.boil import boil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.common import inner
from metalearn.algorithms.maml import maml
from metalearn.algorithms.maml_pp import maml_pp
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.meta_sgd import meta_sgd
from metalearn.models.common.adapter import model_of
from metalearn.models.conv4 import conv4
from metalearn.nn.surroundings import of_reals
from metalearn.types import Algorithm, Batch, Episode, Model
from tests.metalearn.learners import FLOAT64, OPTIMIZERS, PP, SIZE, STEPS, WAYS, network, random, start_of, tasks

Make = Callable[..., Algorithm]

LEARNERS: dict[str, Make] = {
    "maml": lambda **options: maml(**STEPS, **options),
    "boil": lambda **options: boil(**STEPS, **options),
    "meta_sgd": lambda **options: meta_sgd(**STEPS, **options),
    "maml_pp": lambda **options: maml_pp(**STEPS, **PP, **options),
    "cavia": lambda **options: cavia(**STEPS, contexts=3, layer=2, **options),
    "meta_curvature": lambda **options: meta_curvature(**STEPS, **options),
    **{
        name: lambda chosen=chosen, **options: maml(inner=chosen, **(STEPS | {"inner_lr": 0.05}), **options)
        for name, chosen in OPTIMIZERS.items()
    },
}


def torchs_network() -> torch.nn.Module:
    body = [torch.nn.Conv2d(1, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.Softplus(), torch.nn.Flatten()]
    return torch.nn.Sequential(*body, torch.nn.Linear(8 * 25, WAYS))


MODELS: dict[str, Callable[[], Model]] = {
    "compiled": network,
    "compiled, inductive": lambda: network(transductive=False),
    "layers": lambda: network()._replace(network=None),
    "module": lambda: model_of(
        torchs_network, name="net", inputs=of_reals((1, SIZE, SIZE)), transductive=True, advice=""
    ),
}


BY_STEPS = ("maml_pp", "cavia")
"""Learners without nested checkpoints: they use the parameters after every step, or carry few from step to step."""


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_meta_gradient_is_that_of_kept_steps(name: str, kind: str) -> None:
    if kind == "module" and name == "cavia":
        pytest.skip("this network has one norm, and the learner of the table takes the second")
    model, episode = MODELS[kind](), tasks(3)
    nested: list[bool | str] = ["nested"] if kind in ("compiled", "layers") and name not in BY_STEPS else []
    kept = LEARNERS[name](model=model)
    params = start_of(kept)
    expected = kept.meta_grad(params, episode, 3)
    for choice in [True, *nested]:
        result = LEARNERS[name](model=model, checkpoint_steps=choice).meta_grad(params, episode, 3)
        for key, value in expected.grads.items():
            torch.testing.assert_close(result.grads[key], value, rtol=0, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
        assert all(torch.equal(result.metrics[key], value) for key, value in expected.metrics.items())


@pytest.mark.parametrize("optimizer", [inner.SGD, OPTIMIZERS["adam"]], ids=["sgd", "adam"])
def test_nested_checkpoints_of_steps_that_do_not_halve_evenly(optimizer: inner.InnerOptimizer) -> None:
    grads = []
    choices: list[bool | str] = [False, "nested"]
    for choice in choices:
        learner = maml(
            model=network(), inner=optimizer, inner_lr=0.05, inner_steps=7, eval_steps=1, checkpoint_steps=choice
        )
        grads.append(learner.meta_grad(start_of(learner), tasks(3), 1).grads)
    for key, value in grads[0].items():
        torch.testing.assert_close(grads[1][key], value, rtol=0, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


class LivePeak(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and result.untyped_storage() not in self._known:
                storage = result.untyped_storage()
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return results

    def _freed(self, count: int) -> None:
        self.now -= count


def peak_of(model: Model, steps: int, *, optimizer: inner.InnerOptimizer = inner.SGD, checkpoint: bool | str) -> int:
    learner = maml(
        model=model, inner=optimizer, inner_lr=0.1, inner_steps=steps, eval_steps=1, checkpoint_steps=checkpoint
    )
    params = {name: value.to(FLOAT64) for name, value in learner.init(Generator().manual_seed(0)).items()}
    y = torch.arange(WAYS).repeat(2, 2)
    episode = Episode(*(Batch(random(2, 2 * WAYS, 1, 28, 28, seed=seed), y) for seed in (0, 1)))
    with LivePeak() as live:
        learner.meta_grad(params, episode, 1)
    return live.peak


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("optimizer", "carried"), [("sgd", 1), ("adam", 3)])
def test_memory_grows_by_no_more_than_what_steps_carry(whole: bool, optimizer: str, carried: int) -> None:
    """From 3 to 9 steps: the parameters of the 2 tasks, and Adam's two moments; without checkpoints, the activations of
    every step too. With nested ones, of a network that is computed as a whole, from 4 to 16 steps: what two carry."""
    model = conv4(ways=WAYS, channels=1, image_size=28, filters=16)
    model = model if whole else model._replace(network=None)
    chosen = {"sgd": inner.SGD, "adam": OPTIMIZERS["adam"]}[optimizer]
    start = model.start({k: v.double() for k, v in model.init(Generator()).items()}, 2)
    carries = carried * 8 * sum(value.numel() for value in start.values())

    def growth(few: int, many: int, checkpoint: bool | str) -> float:
        peaks = [peak_of(model, steps, optimizer=chosen, checkpoint=checkpoint) for steps in (few, many)]
        return (peaks[1] - peaks[0]) / carries

    grown, kept = growth(3, 9, True), growth(3, 9, False)
    assert grown <= 6.06 < kept / 4, (grown, kept)
    if whole:
        assert growth(4, 16, "nested") <= 2.02
