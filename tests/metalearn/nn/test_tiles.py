"""Convolution in bfloat16 by AMX tiles, against float64 on rounded operands."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metalearn.algorithms.maml import maml
from metalearn.models.conv4 import conv4
from metalearn.nn import columns, conv, conv2d, native, precision
from metalearn.nn.columns import Geometry
from metalearn.types import Algorithm, Batch, Episode, Params
from tests.kernels import require_kernels

TOLERANCE = 2e-6
"""The largest error of sums in float32, relative to the largest value of their tensor."""

many = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def bf16() -> Iterator[None]:
    """Products in bfloat16 by tiles; skips the test if there are none."""
    if require_kernels().tiles is None:
        pytest.skip("processor, compiler or operating system has no AMX tiles")
    precision.compute_with("bf16")
    yield
    precision.compute_with("float32")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def three(convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, gy: Tensor) -> list[Tensor]:
    """The product, the input gradient and the weight gradient."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = convolve(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), gy)]


def written_out(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """torch's convolution, task by task."""
    tasks = [F.conv2d(x[t].permute(0, 3, 1, 2), weight[t], None, stride, padding) for t in range(len(x))]
    return torch.stack(tasks).permute(0, 1, 3, 4, 2)


def in_float64(x: Tensor, weight: Tensor, gy: Tensor, stride: int, padding: int) -> list[Tensor]:
    """All three results, for operands that are rounded to bfloat16."""
    exact = [rounded(operand).double() for operand in (x, weight, gy)]
    return three(lambda x, w: written_out(x, w, stride, padding), *exact)


def assert_near(ours: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for result, theirs in zip(ours, expected, strict=True):
        assert result.shape == theirs.shape and result.dtype == torch.float32
        worst = (result - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)
        assert worst < tolerance, worst


CHANNELS = st.sampled_from([16, 32, 48, 64, 80, 128])


@many
@given(
    tasks=st.integers(1, 3), images=st.sampled_from([1, 2, 5, 25]), inputs=CHANNELS, outputs=CHANNELS,
    height=st.sampled_from([1, 2, 3, 4, 7, 14]), wider=st.sampled_from([0, 0, 1, 5]),
    kernel=st.sampled_from([(3, 3), (3, 3), (1, 1), (2, 3), (5, 1)]), stride=st.integers(1, 3),
    padding=st.integers(0, 2), shared=st.booleans(),
)  # fmt: skip
def test_sums_are_those_of_the_rounded_operands(
    bf16: None, tasks: int, images: int, inputs: int, outputs: int, height: int, wider: int, kernel: tuple[int, int],
    stride: int, padding: int, shared: bool,
) -> None:  # fmt: skip
    if height + 2 * padding < kernel[0] or height + wider + 2 * padding < kernel[1]:
        return
    x, weight = normal(tasks, images, height, height + wider, inputs), normal(tasks, outputs, inputs, *kernel)
    if shared:
        weight = weight[:1].expand_as(weight)
    gy = normal(tasks, images, *Geometry(*kernel, stride, padding).out(height, height + wider), outputs, seed=1)
    ours = three(lambda x, w: conv2d(x, w, stride=stride, padding=padding), x, weight, gy)
    assert_near(ours, in_float64(x, weight, gy, stride, padding))


def test_images_of_many_pixels(bf16: None) -> None:
    """A group of samples then has a single sample."""
    x, weight, gy = normal(1, 3, 40, 41, 16), normal(1, 32, 16, 3, 3), normal(1, 3, 40, 41, 32)
    ours = three(lambda x, w: conv2d(x, w, padding=1), x, weight, gy)
    assert_near(ours, in_float64(x, weight, gy, 1, 1))


def test_halves_are_rounded_to_even(bf16: None) -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]).repeat_interleave(16)
    one = torch.eye(64).view(1, 64, 64, 1, 1)
    expected = torch.tensor([1, 1 + 2**-6, -1, 1 + 2**-7]).repeat_interleave(16)
    assert torch.equal(conv2d(x.view(1, 1, 1, 1, 64), one).flatten(), expected)


def test_the_three_functions_are_adjoint(bf16: None) -> None:
    """⟨gy, x ∗ w⟩ = ⟨gx, x⟩ = ⟨gw, w⟩ for operands that need no rounding."""
    for stride, size in ((1, 7), (2, 7), (2, 14)):
        out = (size - 1) // stride + 1
        shapes = (2, 5, size, size, 48), (2, 64, 48, 3, 3), (2, 5, out, out, 64)
        x, weight, gy = (rounded(normal(*shape)) for shape in shapes)
        y, gx, gw = three(lambda x, w, s=stride: conv2d(x, w, stride=s, padding=1), x, weight, gy)
        forms = [(a.double() * b.double()).sum() for a, b in ((gy, y), (gx, x), (gw, weight))]
        scale = (gy.double() * y).square().sum().sqrt()
        assert max(forms) - min(forms) < TOLERANCE * scale


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_threads_change_no_bit(bf16: None, tasks: int, shared: bool) -> None:
    before = torch.get_num_threads()
    x, weight, gy = normal(tasks, 23, 14, 14, 64), normal(tasks, 48, 64, 3, 3), normal(tasks, 23, 7, 7, 48)
    weight = weight[:1].expand_as(weight) if shared else weight
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(three(lambda x, w: conv2d(x, w, stride=2, padding=1), x, weight, gy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_channels_that_fill_no_tile_are_computed_as_float32_is(bf16: None) -> None:
    for inputs, outputs in ((3, 32), (24, 32)):
        x, weight = normal(2, 3, 6, 6, inputs), normal(2, outputs, inputs, 3, 3)
        rounding = conv2d(x, weight)
        precision.compute_with("float32")
        assert torch.equal(rounding, conv2d(x, weight))
        precision.compute_with("bf16")


def test_without_tiles_torch_rounds(bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, g = normal(2, 3, 6, 6, 16), normal(2, 32, 16, 3, 3), Geometry(3, 3, 1, 0)
    assert not torch.equal(conv2d(x, weight), columns.product(x, weight, g))
    monkeypatch.setattr(native.compiled(torch.float32), "tiles", None)
    assert torch.equal(conv2d(x, weight), columns.product(x, weight, g))
    assert "which are torch's" in native.describe(torch.device("cpu"), torch.float32)


def test_the_log_names_what_computes(bf16: None) -> None:
    assert "AMX tiles" in native.describe(torch.device("cpu"), torch.float32)
    x = normal(1, 1, 4, 4, 16)
    assert conv._native(x, 16, 16) is native.compiled(torch.float32).tiles  # type: ignore[union-attr]
    assert conv._native(x.double(), 16, 16) is None  # rounded by torch's operations


def test_meta_gradients_are_near_those_of_float32(bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To first and second order; torch's operations are farther off, since they round results, too."""
    model = conv4(ways=5, channels=1, image_size=28, filters=32, activation="softplus")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 2, 10, 1, 28, 28, generator=generator), torch.arange(10).remainder(5).expand(2, 2, 10)
    episodes = Episode(Batch(x[0], y[0]), Batch(x[1], y[1]))
    for first_order in (True, False):
        algorithm = maml(model=model, inner_lr=0.1, inner_steps=2, eval_steps=2, first_order=first_order)
        start = algorithm.init(generator)

        def gradient(kind: str, algorithm: Algorithm = algorithm, start: Params = start) -> Tensor:
            precision.compute_with(kind)
            return torch.cat([g.flatten() for g in algorithm.meta_grad(start, episodes, 1)[0].values()])

        exact, by_tiles = gradient("float32"), gradient("bf16")
        with monkeypatch.context() as without:
            without.setattr(native.compiled(torch.float32), "tiles", None)
            by_torch = gradient("bf16")
        gap, wider = ((gradients - exact).norm() / exact.norm() for gradients in (by_tiles, by_torch))
        assert 1e-4 < gap < 0.02
        assert gap < wider
