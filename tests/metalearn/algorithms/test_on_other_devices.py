"""Every algorithm on a device that is not there: a tensor that stays on the CPU is found without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_check.learners import ALGORITHMS, WAYS, training_of
from metalearn.algorithms import reptile
from metalearn.algorithms.pfn import pfn
from metalearn.models.common.adapter import model_of
from metalearn.models.common.pretrained import preparing
from metalearn.models.table import HEADS, table
from metalearn.nn.surroundings import constant, of_reals, surrounded
from metalearn.types import Batch, Episode
from tests.metalearn.learners import SIZE
from tests.metalearn.own_network import Net
from tests.runs import slow

DEVICE = "lazy"
"""A device whose tensors torch can imitate; those of `cuda` fail in the backward pass where there is no card."""

WAITS = {
    "one_hot": (
        "protomaml",
        "deepbdc",
        "feat",
        "bd_cspn",
        "protonet",
        "matching",
        "r2d2",
        "metaoptnet",
        "simpleshot",
        "laplacian_shot",
        "baseline_pp",
        "tim",
        "oml",
    ),
    "a decision": ("reptile", "metaoptnet"),
}
"""Where the host waits for the device: to count classes; to see whether they are evenly many, or a task is solved."""


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers in place of the device where the host would wait for it, and notes it."""
    waited: list[str] = []

    def one_hot(y: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes == -1:
            waited.append("one_hot")
            num_classes = WAYS
        return real(y, num_classes)

    def evenly(labels: Tensor, count: int) -> bool:
        waited.append("a decision")
        return True

    def decided(value: Tensor) -> bool:
        waited.append("a decision")
        return True

    real = F.one_hot
    monkeypatch.setattr(F, "one_hot", one_hot)
    monkeypatch.setattr(reptile, "_evenly", evenly)
    monkeypatch.setattr(FakeTensor, "__bool__", decided, raising=False)
    monkeypatch.setenv("METALEARN_KERNELS", "torch")
    return waited


def there(mode: FakeTensorMode, value: Tensor) -> Tensor:
    with mode:
        return mode.from_tensor(value).to(DEVICE)


def test_a_tensor_of_another_device_is_found() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


DEEP = ("metaoptnet", "maml_pp", "meta_sgd", "meta_curvature", "boil", "protomaml", "imaml")
"""Take seconds each; maml has most of their operations."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in DEEP else ()) for name in ALGORITHMS])
def test_all_is_computed_on_the_device(name: str, waiting: list[str]) -> None:
    algorithm, source, _ = training_of(name)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    start = algorithm.init(torch.Generator().manual_seed(0))
    params = {key: there(mode, value) for key, value in start.items()}

    def episode(split: str, count: int) -> Episode:
        made = source.episodes(split, torch.arange(count))
        return Episode(*(Batch(*(there(mode, value) for value in batch)) for batch in made))

    training = episode("train", 2 if algorithm.trained_on == "tasks" else 4)
    evaluation = episode("val" if algorithm.evaluated_on == "samples" else "test", 2)
    with mode:
        result = algorithm.meta_grad(params, training, 1)
        found = [*result.grads.values(), *result.metrics.values()]
        found += algorithm.evaluate(params, evaluation).values()
        found.append(algorithm.adapt(params, evaluation.support)(evaluation.query.x))
    assert {value.device.type for value in found} == {DEVICE}
    assert set(waiting) <= {where for where, names in WAITS.items() if name in names}, waiting


# What a pass brings to the device


class HostTensors(TorchDispatchMode):
    """Notes operations with a tensor of the host: on a GPU it would be copied, and waited for. Single numbers go along
    with an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        if any(isinstance(leaf, Tensor) and leaf.dim() and leaf.device.type == "cpu" for leaf in leaves):
            self.seen.append(str(func))
        return result


def prepared() -> Callable[[], object]:
    pictures = torch.zeros(2, 3, 8, 8, device="meta")
    prepare = preparing(16, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "bilinear")
    return lambda: prepare(pictures)


def with_buffers() -> Callable[[], object]:
    model = model_of(
        lambda: Net(first="buffer"), name="Net", inputs=of_reals((1, SIZE, SIZE)), transductive=True, advice="",
        running_statistics=True,
    )  # fmt: skip
    start = model.init(torch.Generator().manual_seed(0))
    params = {name: value.to("meta").expand(2, *value.shape) for name, value in start.items()}
    images = torch.zeros(2, 3, 1, SIZE, SIZE, device="meta")
    return lambda: model.apply(params, images)


def of_table(**options: Any) -> Callable[[], object]:
    algorithm = pfn(model=table(width=8, heads=2, layers=2, bins=10, **options))
    start = algorithm.init(torch.Generator().manual_seed(0))
    params = {name: value.to("meta") for name, value in start.items()}
    x = torch.zeros(2, 6, 3, device="meta")
    y = torch.zeros(2, 6, dtype=torch.int64, device="meta") if options["head"] == "classes" else x[..., :1]

    def computed() -> object:
        with surrounded(ways=2):
            return algorithm.meta_grad(params, Episode(Batch(x, y), Batch(x, y)), 1)

    return computed


TABLES = [partial(of_table, head=head, form=form) for head in HEADS for form in ("rows", "cells")]


@pytest.mark.parametrize(
    "made",
    [prepared, with_buffers, *TABLES, partial(of_table, head="classes", form="rows", linear=True, kernels=True)],
)
def test_the_second_pass_brings_nothing_to_the_device(made: Callable[[], Callable[[], object]]) -> None:
    """The first one brings constants, before a step is recorded."""
    computed, found = made(), []
    for _ in range(2):
        with HostTensors() as host:
            computed()
        found.append(host.seen)
    assert found[1] == []


def test_copies_of_a_constant_serve_all_later_passes() -> None:
    placed = constant(torch.tensor([0.1, 0.2], dtype=torch.float64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(placed(torch.device("cpu"), torch.float32)) is not Tensor
    with torch.inference_mode():
        first = placed(torch.device("cpu"), torch.float32)
    x = torch.ones(2, requires_grad=True)
    (x * first).sum().backward()
    assert x.grad is not None and x.grad.equal(torch.tensor([0.1, 0.2]))
    assert placed(torch.device("cpu"), torch.float32) is first
