"""The GPU's kernels without a GPU: their sizes and streams, and compiled for processors that are not here."""

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from metalearn.models.resnet12 import resnet12
from metalearn.nn.network import CompiledNetwork
from tests.metalearn.nn.test_backends import printed_by
from tests.runs import slow

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

ARCHITECTURES = {80: "A100", 90: "H100", 100: "B200"}
"""Compute capabilities, and a card of each."""


def test_photographs_fit_the_offsets_of_the_kernels() -> None:
    """A task of 75 queries of 84×84 pixels takes more numbers than 32 bits count; each of its layers takes fewer."""
    from metalearn.nn.backends.triton_ops import GpuKernels

    model = resnet12(ways=5, channels=3, image_size=84, widths=(64, 160, 320, 640))
    params = model.init(torch.Generator().manual_seed(0))
    assert isinstance(model.network, CompiledNetwork)
    shaped = model.network._of([params[name] for name in model.network._names])
    plan = shaped.plan(GpuKernels(), 75, (3, 84, 84)).compiled
    assert plan.scratch > 2**31 > max(place.size for place in plan.places)
    with pytest.raises(ValueError, match=r"a layer of a task has .* METALEARN_KERNELS=torch"):
        shaped.plan(GpuKernels(), 5000, (3, 84, 84))


@pytest.mark.parametrize("forked", [True, False])
def test_after_an_error_the_second_stream_is_joined(forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the recording of a CUDA graph could not be ended, and torch would go on with it."""
    from metalearn.nn.backends.triton_ops import _Beside

    waits = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            waits.append((self.name, other.name))

    first = Stream("first")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: first)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    beside = _Beside(Stream("second"))
    with pytest.raises(torch.cuda.OutOfMemoryError), beside.joined():
        if forked:
            with beside.after_all():
                pass
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert waits == ([("second", "first"), ("first", "second")] if forked else [])


KERNELS = (
    "product", "input_gradient", "weight_gradient", "sum_splits", "norm", "norm_backward", "norm_second", "loss",
    "loss_change", "sum_rows", "mean", "spread", "gather", "attention", "attention_rows", "attention_columns",
)  # fmt: skip
SMALL = ("sum_splits", "sum_rows", "mean", "gather", "attention")


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [(90, SMALL), *(pytest.param(capability, KERNELS, marks=slow) for capability in ARCHITECTURES)],
)
def test_kernels_compile_for_cards_that_are_not_here(
    capability: int, kernels: tuple[str, ...], tmp_path: Any, record_property: Any
) -> None:
    """The registers, spills, shared memory and occupancy of every kernel are in the report of the test."""
    own = () if kernels == KERNELS else kernels
    rows = printed_by("tests.metalearn.nn.gpu.compiled", str(capability), *own, TRITON_CACHE_DIR=str(tmp_path))
    assert {row["kernel"] for row in rows} == set(kernels)
    for row in rows:
        record_property(
            f"{row['kernel']} {row['of']}",
            f"{row['registers']} registers, {row['spilled']} bytes spilled, {row['shared']} bytes of shared memory, "
            f"{row['warps']} of 64 warps",
        )
        assert row["spilled"] <= 128, row


@pytest.mark.parametrize("precision", ["tf32", pytest.param("bf16", marks=slow)])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=slow)])
def test_products_of_photographs_fill_the_tensor_cores(capability: int, precision: str, tmp_path: Any) -> None:
    """By their instructions, from copies of 16 bytes that run ahead."""
    place, most = str(tmp_path), {(80, "tf32"): 56, (80, "bf16"): 80}.get((capability, precision), 0)
    rows = printed_by(
        "tests.metalearn.nn.gpu.compiled", str(capability), "photographs", precision, TRITON_CACHE_DIR=place
    )
    assert {row["kernel"] for row in rows} == {"product", "input_gradient", "weight_gradient"}
    for row in rows:
        assert row["tensor"] and row["copies"] == [16], row
        assert not row["spilled"] or ("PAIRS 2" in row["of"] and row["spilled"] <= most), row
        assert row["instructions"] == ["wgmma" if capability == 90 else "mma.sync"], row
