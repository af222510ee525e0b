"""Every algorithm on a device that is not there: a tensor that stays on the CPU is found without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.gpu_check.learners import ALGORITHMS, WAYS, training_of
from metalearn.algorithms import reptile
from metalearn.types import Batch, Episode
from tests.runs import slow

DEVICE = "lazy"
"""A device whose tensors torch can imitate; those of `cuda` fail in the backward pass where there is no card."""

WAITS = {
    "one_hot": ("protonet", "matching", "r2d2", "metaoptnet", "simpleshot", "laplacian_shot", "baseline_pp", "tim"),
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


DEEP = ("metaoptnet", "maml_pp", "meta_sgd", "meta_curvature", "boil")
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
