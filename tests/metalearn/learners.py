"""Every algorithm, on a small network and small tasks: the rows of the property table."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from metalearn.algorithms.anil import anil
from metalearn.algorithms.baseline_pp import baseline_pp
from metalearn.algorithms.bd_cspn import bd_cspn
from metalearn.algorithms.boil import boil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.common import inner
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
from metalearn.types import Algorithm, Batch, Episode, Model, Params, Unit

FLOAT64 = torch.float64
WAYS, SIZE = 3, 12
STEPS = {"inner_lr": 0.3, "inner_steps": 2, "eval_steps": 3}
PP = {"multi_step_until": 10, "first_order_until": 0, "learned_rates": True, "per_step_norm": True}

TIM = {"inner_lr": 0.1, "eval_steps": 3, "temperature": 8.0, "support_weight": 0.4, "conditional_weight": 0.2}
LAPLACIAN = {"strength": 0.7, "neighbours": 2, "eval_steps": 3}

OPTIMIZERS = {
    "momentum": inner.momentum(momentum=0.8),
    "rmsprop": inner.rmsprop(decay=0.9, eps=1e-3),
    "adam": inner.adam(beta1=0.9, beta2=0.99, eps=1e-3),
}

LEARNERS: dict[str, Callable[[Model], Algorithm]] = {
    "maml": lambda model: maml(model=model, **STEPS),
    "fomaml": lambda model: maml(model=model, **STEPS, first_order=True),
    "anil": lambda model: anil(model=model, **STEPS),
    "protomaml": lambda model: protomaml(model=model, **(STEPS | {"inner_lr": 0.05})),
    "boil": lambda model: boil(model=model, **STEPS),
    "meta_sgd": lambda model: meta_sgd(model=model, **STEPS),
    "maml_pp": lambda model: maml_pp(model=model, **STEPS, **PP),
    "cavia": lambda model: cavia(model=model, **STEPS, contexts=3, layer=2),
    "meta_curvature": lambda model: meta_curvature(model=model, **STEPS),
    "checkpointed": lambda model: maml(model=model, **STEPS, checkpoint_steps=True),
    "reptile": lambda model: reptile(model=model, **STEPS, inner_batch=3, eval_batch=None),
    "reptile_carried": lambda model: reptile(
        model=model,
        inner=OPTIMIZERS["adam"],
        **(STEPS | {"inner_lr": 0.05}),
        inner_batch=2,
        eval_batch=2,
        inner_state="carried",
        meta_batch=4,
    ),
    "imaml": lambda model: imaml(model=model, **(STEPS | {"inner_lr": 0.1}), strength=5.0, cg_steps=60),
    "imaml_damped": lambda model: imaml(
        model=model, **(STEPS | {"inner_lr": 0.1}), strength=2.0, cg_steps=40, cg_damping=1.0, cg_strength=12.0
    ),
    "imaml_after": lambda model: imaml(
        model=model,
        **(STEPS | {"inner_lr": 0.1}),
        strength=3.0,
        spring="after",
        eval_strength=0.5,
        cg_steps=40,
        cg_damping=1.0,
        cg_strength=12.0,
    ),
    "protonet": lambda model: protonet(model=model),
    "deepbdc": lambda model: deepbdc(model=model, channels=4),
    "feat": lambda model: feat(model=model, temperature=2.0),
    "matching": lambda model: matching(model=model, scale=2.0),
    "oml": lambda model: oml(model=model, inner_lr=0.5, scale=4.0),
    "r2d2": lambda model: r2d2(model=model, strength=0.5, scale=2.0),
    "in_context": lambda model: in_context(model=model, width=8, heads=2, layers=2),
    "metaoptnet": lambda model: metaoptnet(model=model, cost=0.3, ridge=0.5, scale=2.0),
    "finetune": lambda model: finetune(model=model, inner_lr=0.3, eval_steps=3, ways=WAYS, whole=False),
    "finetune_whole": lambda model: finetune(model=model, inner_lr=0.3, eval_steps=3, ways=WAYS, whole=True),
    "baseline_pp": lambda model: baseline_pp(model=model, inner_lr=0.3, eval_steps=3, scale=10.0, task_scale=2.0),
    "simpleshot": lambda model: simpleshot(model=model),
    "simpleshot_centred": lambda model: simpleshot(model=model, centred=True),
    "tim": lambda model: tim(model=model, **TIM),
    "tim_centred": lambda model: tim(model=model, **TIM, centred=True),
    "bd_cspn": lambda model: bd_cspn(model=model, eval_steps=3, scale=10.0),
    "laplacian_shot": lambda model: laplacian_shot(model=model, **LAPLACIAN, rectified=False, centred=False),
    "laplacian_shot_rectified": lambda model: laplacian_shot(model=model, **LAPLACIAN, rectified=True, centred=True),
    "scratch": lambda model: scratch(model=model, inner_lr=0.3, eval_steps=3),
    "supervised": lambda model: supervised(model=model),
    **{
        f"maml_{name}": lambda model, chosen=chosen: maml(model=model, inner=chosen, **(STEPS | {"inner_lr": 0.05}))
        for name, chosen in OPTIMIZERS.items()
    },
}


def network(*, transductive: bool = True, size: int = SIZE, filters: int = 8) -> Model:
    """A smooth network: finite differences then agree with its gradients."""
    return conv4(
        ways=WAYS, channels=1, image_size=size, filters=filters, activation="softplus", transductive=transductive
    )


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=FLOAT64, generator=Generator().manual_seed(seed))


def start_of(learner: Algorithm, dtype: torch.dtype = FLOAT64) -> Params:
    """Parameters away from the symmetric start, where many derivatives are zero; rates and state stay above 0."""

    def moved(name: str, value: Tensor, seed: int) -> Tensor:
        away = random(*value.shape, seed=seed)
        if name.startswith("state."):
            return value + 7 * away.abs()
        return value + (0.02 if name.startswith("inner_lr.") else 0.2) * away

    drawn = learner.init(Generator().manual_seed(0)).items()
    return {name: moved(name, value, seed).to(dtype) for seed, (name, value) in enumerate(drawn)}


def tasks(count: int, *, seed: int = 0, size: int = SIZE) -> Episode:
    """Random pictures of `WAYS` classes, two of each in the support set and two in the query set."""

    def batch(seed: int) -> Batch:
        y = torch.arange(WAYS).repeat_interleave(2).repeat(count, 1)
        return Batch(random(count, WAYS * 2, 1, size, size, seed=seed).abs(), y)

    return Episode(batch(seed), batch(seed + 1))


def training_episode(learner: Algorithm, count: int, seed: int = 0) -> Episode:
    """`count` tasks, or `count` samples in one episode, as the learner is trained on them."""
    if learner.trained_on == "tasks":
        return tasks(count, seed=seed)
    x = random(1, count, 1, SIZE, SIZE, seed=seed).abs()
    samples = Batch(x, torch.arange(count).remainder(WAYS).unsqueeze(0))
    return Episode(Batch(x[:, :0], samples.y[:, :0]), samples)


def evaluation_episode(learner: Algorithm, count: int, seed: int = 0) -> Episode:
    return tasks(count, seed=seed) if learner.evaluated_on == "tasks" else training_episode(learner, count, seed)


class Tasks:
    """A source of `tasks`, or of samples for a learner that takes samples."""

    def __init__(self, learner: Algorithm) -> None:
        self._samples = learner.trained_on == "samples", learner.evaluated_on == "samples"

    def classes(self, split: str) -> int:
        return WAYS

    def unit(self, split: str) -> Unit:
        return "samples" if self._samples[split != "train"] else "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        made = [tasks(1, seed=3 * index + (0 if split == "train" else 10_000)) for index in indices.tolist()]
        episode = Episode(*(Batch(*map(torch.cat, zip(*batches, strict=True))) for batches in zip(*made, strict=True)))
        if not self._samples[split != "train"]:
            return episode
        x, y = (value[:, :1].transpose(0, 1) for value in episode.query)
        return Episode(Batch(x[:, :0], y[:, :0]), Batch(x, y))


def linear_model(size: int) -> Model:
    """y = x · θ: its mean squared error is a quadratic in θ."""

    def init(generator: Generator) -> Params:
        return {"theta": torch.randn(size, dtype=FLOAT64, generator=generator)}

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return torch.einsum("tnd,td->tn", x, params["theta"]).unsqueeze(2)

    return Model(init, apply, transductive=False, activations=1)


def part_of(learner: Algorithm, episode: Episode, chosen: list[int]) -> Episode:
    """The chosen tasks, or samples, in the chosen order."""
    if learner.trained_on == "tasks":
        return Episode(*(Batch(batch.x[chosen], batch.y[chosen]) for batch in episode))
    return Episode(episode.support, Batch(episode.query.x[:, chosen], episode.query.y[:, chosen]))


def close(ours: Params, expected: Params, *, atol: float, rtol: float = 0.0) -> None:
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
