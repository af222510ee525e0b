"""The layers against formulas written out: value, first and second derivative, by compiled kernels and by torch."""

import gc
import importlib.util
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from metalearn.nn import backends, surroundings
from metalearn.nn.layers import LINEAR, batch_norm, conv2d, laid_out, linear, max_pool2d, shared_linear
from metalearn.storage import cache
from tests.kernels import require_kernels
from tests.runs import ROOT, slow

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""The largest error of values and derivatives, relative to the largest value of their tensor."""

many = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The compiled kernels, then torch's operations."""
    monkeypatch.setenv("METALEARN_KERNELS", request.param)
    backends.compiled.cache_clear()
    if request.param == "native":
        require_kernels()
    yield request.param
    backends.compiled.cache_clear()


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def derivatives(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The value, the gradient of a fixed quadratic form of it, and the gradient of a fixed linear form of that."""

    def fixed(like: Tensor) -> Tensor:
        return normal(*like.shape, seed=7).detach().to(like.dtype)

    value = function(*inputs)
    first = torch.autograd.grad((value.square() * fixed(value)).sum(), inputs, create_graph=True)
    second = torch.autograd.grad([(grad * fixed(grad)).sum() for grad in first], inputs)
    return [value, *first, *second]


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Ours, in float64 and in float32, against theirs in float64."""
    expected = derivatives(theirs, inputs)
    for dtype, tolerance in TOLERANCE.items():
        results = derivatives(ours, [x.detach().to(dtype).requires_grad_() for x in inputs])
        for result, reference in zip(results, expected, strict=True):
            assert result.shape == reference.shape
            worst = (result - reference).abs().max() / reference.abs().max().clamp(min=1)
            assert worst < tolerance, f"{dtype}: {worst}"


def per_task(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Applies torch's layer [n, c, h, w] of one task to images [t, n, h, w, c], with shared or separate parameters."""

    def all_tasks(x: Tensor, *parameters: Tensor) -> Tensor:
        shared = parameters[0].dim() in (1, 4)
        tasks = [
            layer(x[t].permute(0, 3, 1, 2), *(p if shared else p[t] for p in parameters)).permute(0, 2, 3, 1)
            for t in range(len(x))
        ]
        return torch.stack(tasks)

    return all_tasks


def spread(x: Tensor, parameter: Tensor, dims: int) -> Tensor:
    """A parameter for one task, of `dims` dimensions, is expanded over all tasks; others stay."""
    return laid_out(parameter).expand(len(x), *parameter.shape) if parameter.dim() == dims else parameter


@many
@given(
    tasks=st.integers(1, 3), images=st.sampled_from([1, 2, 3, 5, 7, 70]), channels=st.sampled_from([1, 3, 16, 32, 48]),
    filters=st.sampled_from([2, 16, 48, 112]), size=st.integers(3, 12),
    kernel=st.sampled_from([(1, 1), (2, 3), (3, 3), (5, 1)]), stride=st.integers(1, 3), padding=st.integers(0, 2),
    shared=st.booleans(),
)  # fmt: skip
def test_conv2d_is_one_convolution_a_task(
    way: str, tasks: int, images: int, channels: int, filters: int, size: int, kernel: tuple[int, int], stride: int,
    padding: int, shared: bool,
) -> None:  # fmt: skip
    height, width = size, size + 1 if images < 70 else 3
    if min(height, width) + 2 * padding < max(kernel):
        return
    x = normal(tasks, images, height, width, channels)
    lead, scale = () if shared else (tasks,), (channels * kernel[0] * kernel[1]) ** -0.5
    weight = (scale * normal(*lead, filters, channels, *kernel)).detach().requires_grad_()
    assert_same(
        lambda x, w: conv2d(x, spread(x, w, 4), stride=stride, padding=padding),
        per_task(lambda x, w: F.conv2d(x, w, None, stride, padding)),
        [x, weight],
    )


def test_conv2d_passes_gradcheck_twice(way: str) -> None:
    for channels in (2, 16):
        inputs = (normal(1, 2, 3, 4, channels), normal(1, 8, channels, 2, 2))
        call = lambda x, w: conv2d(x, w, stride=2, padding=1)  # noqa: E731
        assert gradcheck(call, inputs)
        assert gradgradcheck(call, inputs)


def test_conv2d_refuses_images_smaller_than_its_kernels() -> None:
    with pytest.raises(ValueError, match="images of 2×2 pixels are smaller than kernels of 3×3"):
        conv2d(normal(1, 1, 2, 2, 1), normal(1, 1, 1, 3, 3))


def test_what_does_not_fit_is_refused() -> None:
    """Compiled kernels would read beyond the memory of such tensors."""
    x, weight = normal(2, 1, 4, 4, 16), normal(2, 16, 16, 3, 3)
    for wrong in (weight[:, :, :8], weight[:1], weight.float()):
        with pytest.raises(ValueError, match="must have as many tasks and channels"):
            conv2d(x, wrong)
    for empty, kernels in ((x[:, :0], weight), (x[:0], weight[:0]), (x[0], weight), (x, weight[0])):
        with pytest.raises(ValueError, match="five dimensions, none of them 0"):
            conv2d(empty, kernels)
    for options in ({"stride": 0}, {"padding": -1}):
        with pytest.raises(ValueError, match="must be at least 1 and 0"):
            conv2d(x, weight, **options)
    for few in (x[:, :0], x[0]):
        with pytest.raises(ValueError, match="must have five dimensions"):
            batch_norm(few, normal(2, 16), normal(2, 16))
    for known in (0, -1, 2):
        with pytest.raises(ValueError, match=f"statistics_of={known}: must be from 1 to the number of samples, 1"):
            batch_norm(x, normal(2, 16), normal(2, 16), statistics_of=known)
    with pytest.raises(ValueError, match="a single number has no variance"):
        batch_norm(x[:, :, :1, :1], normal(2, 16), normal(2, 16))
    for wrong in (normal(2, 8), normal(1, 16), normal(2, 16).float()):
        with pytest.raises(ValueError, match="does not fit images"):
            batch_norm(x, wrong, normal(2, 16))


def written_out_norm(x: Tensor, weight: Tensor, bias: Tensor, measured: Tensor) -> Tensor:
    """Batch norm of one task by its definition; x and measured are [n, c, h, w]."""
    mean = measured.mean(dim=(0, 2, 3), keepdim=True)
    variance = ((measured - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
    return (x - mean) / (variance + 1e-5) ** 0.5 * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


@many
@given(
    tasks=st.integers(1, 3), images=st.integers(3, 9), size=st.integers(1, 7), channels=st.sampled_from([3, 16, 80]),
    known=st.sampled_from([0, 0, 1, 2]), slope=st.sampled_from([LINEAR, 0.0, 0.1]), shared=st.booleans(),
)  # fmt: skip
def test_batch_norm_is_the_formula(
    way: str, tasks: int, images: int, size: int, channels: int, known: int, slope: float, shared: bool
) -> None:
    x = (normal(tasks, images, size, size, channels) + 3).detach().requires_grad_()
    lead = () if shared else (tasks,)
    parameters = [normal(*lead, channels), normal(*lead, channels, seed=1)]

    def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.leaky_relu(written_out_norm(x, weight, bias, x[:known] if known else x), slope)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = spread(x, weight, 1), spread(x, bias, 1)
        return batch_norm(x, weight, bias, slope=slope, statistics_of=known or None)

    z = per_task(theirs)(x, *parameters).detach()
    kinks = slope != LINEAR and z.abs().min() < 1e-4  # float32 may take the other branch there
    variance = (x[:, :known] if known else x).detach().var(dim=(1, 2, 3), correction=0)
    tiny = variance.min() < 0.02  # its root amplifies any rounding: up to 0.0103 the bound is missed
    if not kinks and not tiny:
        assert_same(ours, per_task(theirs), [x, *parameters])


@pytest.mark.parametrize("known", [pytest.param(None, marks=slow), 2])
def test_batch_norm_passes_gradcheck_three_times(way: str, known: int | None) -> None:
    inputs = (normal(2, 3, 2, 2, 16), normal(2, 16), normal(2, 16, seed=1))
    call = lambda *given: batch_norm(*given, slope=0.1, statistics_of=known)  # noqa: E731
    assert gradcheck(call, inputs, atol=1e-6)
    assert gradgradcheck(call, inputs, atol=1e-6)

    def second(*given: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(call(*given).sin().sum(), given, create_graph=True)
        return torch.autograd.grad(first[0].sin().sum(), given[:2], create_graph=True)

    assert gradcheck(second, inputs, atol=1e-5)


def test_layers_take_tensors_that_are_not_dense(way: str) -> None:
    """If a layer copies a tensor, the copy must keep the graph."""
    x, weight = normal(16, 5, 6, 3, 2), normal(3, 3, 16, 32, 2)
    scale, shift = normal(32, 2), normal(32, 2, seed=1)

    def block(images: Tensor, kernels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        h = conv2d(images, kernels, stride=2, padding=1)
        h = batch_norm(h.transpose(2, 3), scale, shift, slope=0.1).transpose(1, 3)
        return batch_norm(h, scale, shift)

    def strided(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return block(x.permute(4, 3, 1, 2, 0), w.permute(4, 3, 2, 0, 1), a.t(), b.t())

    def dense(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        kernels = w.permute(4, 3, 2, 0, 1)
        images = x.permute(4, 3, 1, 2, 0)
        h = per_task(lambda x, w: F.conv2d(x, w, None, 2, 1))(images, kernels)
        norm = per_task(lambda x, s, t: written_out_norm(x, s, t, x))
        return norm(F.leaky_relu(norm(h.transpose(2, 3), a.t(), b.t()), 0.1).transpose(1, 3), a.t(), b.t())

    assert_same(strided, dense, [x, weight, scale, shift])


@pytest.fixture(params=["this", "Zen 3"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as GCC makes them for this processor, or for one of those for which it keeps products apart from sums;
    these are kept in a cache of their own."""
    found = cache.compiler_of_machine()
    if request.param == "this" or found is None:
        return
    if cache.GCC not in cache.version_of(found):
        pytest.skip("this compiler makes the same of a sum for every processor")
    monkeypatch.setenv("CC", shlex.join([*found, "--param=avoid-fma-max-bits=512"]))
    request.getfixturevalue("fresh_cache")


@pytest.mark.usefixtures("processor")
def test_threads_change_no_bit() -> None:
    require_kernels()
    before = torch.get_num_threads()
    inputs = [normal(1, 9, 14, 14, 64), normal(1, 64, 64, 3, 3), normal(1, 64), normal(1, 64, seed=1)]

    def block(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return batch_norm(conv2d(x, w, stride=2, padding=1), a, b, slope=0.0)

    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(derivatives(block, [x.detach().float().requires_grad_() for x in inputs]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_products_in_bf16_have_its_rounding_and_no_more() -> None:
    x, weight, bias = normal(2, 5, 6, 6, 16).detach(), normal(2, 16, 16, 3, 3).detach(), normal(2, 16).detach()
    shared = weight[0, :, :, 0, 0]
    exact = [conv2d(x, weight, padding=1), linear(x[:, :, 0, 0], weight[:, :, :, 0, 0], bias)]
    exact += [shared_linear(x[:, :, 0, 0], shared, bias[0]), shared_linear(x[:, :, 0, 0], shared)]
    try:
        surroundings.compute_with("bf16")
        assert "torch's" in backends.describe(torch.device("cpu"), torch.float32)
        rounded = [conv2d(x.float(), weight.float(), padding=1)]
        rounded.append(linear(x[:, :, 0, 0].float(), weight[:, :, :, 0, 0].float(), bias.float()))
        rounded.append(shared_linear(x[:, :, 0, 0].float(), shared.float(), bias[0].float()))
        rounded.append(shared_linear(x[:, :, 0, 0].float(), shared.float()))
    finally:
        surroundings.compute_with("float32")
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == torch.float32
        assert 1e-4 < (a - b).abs().max() / a.abs().max() < 2**-6


def test_no_layer_keeps_its_graph_alive() -> None:
    """Custom functions that save their own results would keep each other alive for ever."""
    x, weight = normal(1, 3, 4, 4, 16), normal(1, 16, 16, 3, 3)
    scale, shift = normal(1, 16), normal(1, 16)
    gc.collect()
    before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    for _ in range(3):
        derivatives(lambda x, w: batch_norm(conv2d(x, w), scale, shift, slope=0.0), [x, weight])
    gc.disable()
    try:
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before + 2
    finally:
        gc.enable()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder; the kernels are compiled again."""
    require_kernels()
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    backends.compiled.cache_clear()
    yield tmp_path / "cache"
    backends.compiled.cache_clear()


def start_and_compile() -> "subprocess.Popen[bytes]":
    program = "import torch; from metalearn.nn import backends; print(backends.compiled(torch.float32).lanes)"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)


def compiler_for(machine: str) -> list[str]:
    """The command of a C compiler for a kind of processor; skips the test where there is none."""
    if platform.machine() == machine:
        found = cache.compiler_of_machine() or pytest.skip("no C compiler")
        if "ziglang" in found:
            pytest.skip("zig has other names for processors")
        return found
    cross = f"{machine.replace('_', '-')}-linux-gnu-gcc"
    if not shutil.which(cross):
        pytest.skip(f"no C compiler for {machine}: apt-get install gcc-{machine.replace('_', '-')}-linux-gnu")
    return [cross]


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize(
    ("machine", "processor"),
    [
        ("x86_64", "x86-64"), ("x86_64", "haswell"), ("x86_64", "skylake-avx512"), ("x86_64", "sapphirerapids"),
        ("aarch64", "armv8-a"),
    ],
)  # fmt: skip
def test_the_kernels_compile_for_other_processors_than_this(real: str, machine: str, processor: str) -> None:
    found = compiler_for(machine)
    words = cache.command_of(found, cache.version_of(found))
    sources = [str(source) for source in backends.c.SOURCES if source.suffix == ".c"]
    options = [f"-march={processor}", f"-DREAL={real}", "-Wall", "-Wextra", "-fsyntax-only"]
    command = [*(word for word in words if word not in ("-march=native", "-shared")), *options, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "/kernels/" not in done.stderr, done.stderr  # no warning about a source


@slow
def test_processes_that_start_together_compile_once(fresh_cache: Path) -> None:
    together = [start_and_compile() for _ in range(3)]
    outputs = {process.communicate(timeout=100)[0] for process in together}
    assert len(outputs) == 1 and all(process.returncode == 0 for process in together)
    (library,) = fresh_cache.glob("*.so")
    assert len(list(fresh_cache.iterdir())) == 3  # the library, its record and its lock
    library.write_bytes(b"damaged")
    with start_and_compile() as another:
        assert another.wait(timeout=100) == 0
    assert library.stat().st_size > 10_000


def test_a_cache_that_cannot_be_written_is_not_needed(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh_cache.write_text("a file where the folder should be")
    assert backends.compiled(torch.float32) is not None
    assert f"the cache {fresh_cache} cannot be used" in caplog.text and "every start compiles them" in caplog.text


def test_a_compiler_that_fails_is_reported_and_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    backends.compiled.cache_clear()
    try:
        assert backends.compiled(torch.float32) is None
        assert "could not be made by false" in caplog.text
        assert "the C compiler failed" in backends.describe(torch.device("cpu"), torch.float32)
        conv2d(normal(1, 1, 4, 4, 16).float(), normal(1, 16, 16, 3, 3).float())
    finally:
        backends.compiled.cache_clear()


def test_without_gcc_the_compiler_is_that_of_ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for there in (None, object()):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there)
        assert cache.compiler_of_machine() == ([sys.executable, "-m", "ziglang", "cc"] if there else None)


def test_max_pool2d_takes_the_largest() -> None:
    assert_same(lambda x: max_pool2d(x, 2), pooled, [normal(2, 3, 5, 4, 3)])


def pooled(x: Tensor) -> Tensor:
    return torch.stack([F.max_pool2d(task.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) for task in x])


def test_linear_is_one_affine_map_a_task() -> None:
    inputs = [normal(3, 4, 5), normal(3, 2, 5), normal(3, 2)]
    assert_same(linear, lambda x, w, b: torch.stack([F.linear(x[t], w[t], b[t]) for t in range(3)]), inputs)
