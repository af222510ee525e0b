"""One table for every back end: what algorithms ask of a model, beside its definition in float64."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from metalearn.nn import backends
from tests.kernels import require_kernels
from tests.metalearn.nn.parity import ATTENTION, CASES, LARGE, errors
from tests.runs import ROOT, slow


def by(kernels: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The errors of a back end on a network of the table."""
    if kernels == "triton":
        result = printed_by("tests.metalearn.nn.parity", name, str(dtype).removeprefix("torch."),
                            TRITON_INTERPRET="1", METALEARN_KERNELS="triton")  # fmt: skip
        assert all(result["alone"].values()), "a task has other bits alone than beside another one"
        return dict(result["errors"])
    monkeypatch.setenv("METALEARN_KERNELS", kernels)
    backends.compiled.cache_clear()
    try:
        return errors(name.removeprefix(LARGE), dtype)
    finally:
        backends.compiled.cache_clear()


def printed_by(module: str, *arguments: str, **variables: str) -> Any:
    """What a program of these tests prints, in a process of its own: Triton decides at its import who computes."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


QUICK = ("strided", ATTENTION)
BY_TRITON = [
    pytest.param("triton", name, marks=[pytest.mark.thorough, *([] if name in QUICK else [slow])])
    for name in [*CASES, ATTENTION, *(f"{LARGE}{name}" for name in ("pooled", "residual"))]
]


@pytest.mark.parametrize("name", [*CASES, ATTENTION])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_float64_is_the_definition(kernels: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "native":
        require_kernels(torch.float64)
    for figure, error in by(kernels, name, torch.float64, monkeypatch).items():
        assert error < 1e-11, (figure, error)


@pytest.mark.parametrize(("kernels", "name"), [*(("native", name) for name in [*CASES, ATTENTION]), *BY_TRITON])
def test_float32_loses_no_more_than_torchs(kernels: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum turns with rounding, and a norm's slopes cancel, so some networks have no figure to 1e-6 in float32.
    Torch's operations say how much of float64 is left: other back ends may lose ten times that (it was four times on a
    processor with AVX-512, and less than three on others)."""
    if kernels == "native":
        require_kernels(torch.float32)
    elif importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    usual, ours = (by(way, name, torch.float32, monkeypatch) for way in ("torch", kernels))
    assert max(usual.values()) < 1e-3 and usual != ours, "no other kernels have computed"
    for figure, error in ours.items():
        assert error < max(1e-6, 10 * usual[figure]), (figure, error, usual[figure])


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "allowed"),
    [("dense", 1e-6), *(pytest.param(*case, marks=slow) for case in (("strided", 1e-6), (f"{LARGE}residual", 2e-4)))],
)
def test_bf16_rounds_the_operands_of_products_alone(name: str, allowed: float) -> None:
    """By Triton, beside torch's products of operands rounded alike. Where the last bits of an operand turn its
    rounding, some figures have larger errors."""
    errors = printed_by("tests.metalearn.nn.parity", name, "bf16", TRITON_INTERPRET="1",
                        METALEARN_KERNELS="triton")["errors"]  # fmt: skip
    assert {figure: error for figure, error in errors.items() if error >= allowed} == {}


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("precision", [*(pytest.param(name, marks=slow) for name in ("float32", "tf32")), "bf16"])
def test_products_of_photographs_are_those_of_torch(precision: str) -> None:
    """TF32 and bf16 have tiles of their own; TF32 does not round in the interpreter."""
    results = printed_by("tests.metalearn.nn.parity", "products", precision, TRITON_INTERPRET="1",
                         METALEARN_KERNELS="triton")  # fmt: skip
    for figure, error in (item for each in results for item in each.items()):
        assert error < 1e-6, (figure, error)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_pictures_are_gathered_as_the_host_turns_them() -> None:
    assert printed_by("tests.metalearn.nn.parity", "pictures", TRITON_INTERPRET="1") == [True, True]
