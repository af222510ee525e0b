"""The layers against formulas written out in float64, in value, first and second derivative."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from metalearn.nn import batch_norm, conv2d, from_groups, linear, to_groups


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def second_derivatives(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The gradient of a fixed scalar made of the first derivatives."""
    first = torch.autograd.grad((value.sin()).sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(sum(grad.cos().sum() for grad in first), inputs))


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    pairs = zip(second_derivatives(ours, inputs), second_derivatives(theirs, inputs), strict=True)
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=25)
@given(
    tasks=st.integers(1, 3), images=st.integers(1, 4), channels=st.integers(1, 3), filters=st.integers(1, 3),
    size=st.integers(3, 9), stride=st.integers(1, 2), padding=st.integers(0, 1),
)  # fmt: skip
def test_conv2d_is_one_convolution_a_task(
    tasks: int, images: int, channels: int, filters: int, size: int, stride: int, padding: int
) -> None:
    x, weight = normal(tasks, images, channels, size, size), normal(tasks, filters, channels, 3, 3)
    ours = from_groups(conv2d(to_groups(x), weight, stride=stride, padding=padding), tasks)
    theirs = torch.stack([F.conv2d(x[t], weight[t], None, stride, padding) for t in range(tasks)])
    assert_same(ours, theirs, [x, weight])


def test_conv2d_passes_gradcheck_twice() -> None:
    inputs = (normal(2, 4, 5, 5), normal(2, 3, 2, 3, 3))
    call = lambda x, w: conv2d(x, w, stride=2, padding=1)  # noqa: E731
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def written_out_norm(x: Tensor, weight: Tensor, bias: Tensor, measured: Tensor) -> Tensor:
    """Batch norm of one task from its definition: x, measured [n, c, h, w]."""
    mean = measured.mean(dim=(0, 2, 3), keepdim=True)
    variance = ((measured - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
    return (x - mean) / (variance + 1e-5) ** 0.5 * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


@settings(deadline=None, max_examples=15)
@given(tasks=st.integers(1, 3), images=st.integers(2, 5), channels=st.integers(1, 3), known=st.integers(0, 2))
def test_batch_norm_is_the_formula(tasks: int, images: int, channels: int, known: int) -> None:
    x = normal(tasks, images, channels, 3, 3)
    weight, bias = normal(tasks, channels), normal(tasks, channels, seed=1)
    ours = from_groups(batch_norm(to_groups(x), weight, bias, statistics_of=known or None), tasks)
    measured = x[:, :known] if known else x
    theirs = torch.stack([written_out_norm(x[t], weight[t], bias[t], measured[t]) for t in range(tasks)])
    assert_same(ours, theirs, [x, weight, bias])


def test_linear_is_one_affine_map_a_task() -> None:
    x, weight, bias = normal(3, 4, 5), normal(3, 2, 5), normal(3, 2)
    theirs = torch.stack([F.linear(x[t], weight[t], bias[t]) for t in range(3)])
    assert_same(linear(x, weight, bias), theirs, [x, weight, bias])


def test_torch_batch_norm_under_vmap_has_a_wrong_second_derivative() -> None:
    """Why nothing here runs under vmap. When the first assertion fails, torch has been mended."""
    tasks, rate = 3, 0.4
    x = normal(tasks, 5, 1, 6, 6).detach()
    params = (normal(3, 1, 3, 3), normal(3), normal(3, seed=1))

    def score(h: Tensor) -> Tensor:
        return h.relu().mean(dim=(2, 3)).sin().square().sum()

    def fused(theta: tuple[Tensor, ...], images: Tensor) -> Tensor:
        return score(F.batch_norm(F.conv2d(images, theta[0]), None, None, theta[1], theta[2], training=True))

    def written_out(theta: tuple[Tensor, ...], images: Tensor) -> Tensor:
        h = F.conv2d(images, theta[0])
        return score(written_out_norm(h, theta[1], theta[2], h))

    def by_vmap(inner: Callable[[tuple[Tensor, ...], Tensor], Tensor]) -> Tensor:
        def meta(theta: tuple[Tensor, ...], images: Tensor) -> Tensor:
            gradients = torch.func.grad(inner)(theta, images)
            return inner(tuple(p - rate * g for p, g in zip(theta, gradients, strict=True)), images)

        outer = torch.func.grad(lambda theta: torch.func.vmap(meta, in_dims=(None, 0))(theta, x).sum())
        return outer(tuple(p.detach() for p in params))[0]

    wrong, right = by_vmap(fused), by_vmap(written_out)
    assert (wrong - right).abs().max() > 1e-3 * right.abs().max()

    def ours(theta: Sequence[Tensor]) -> Tensor:
        h = batch_norm(conv2d(to_groups(x), theta[0]), theta[1], theta[2])
        return score(from_groups(h, tasks).flatten(0, 1))

    start = [p.expand(tasks, *p.shape) for p in params]
    gradients = torch.autograd.grad(ours(start), start, create_graph=True)
    adapted = [p - rate * g for p, g in zip(start, gradients, strict=True)]
    (good,) = torch.autograd.grad(ours(adapted), params[0])
    torch.testing.assert_close(good, right, rtol=1e-10, atol=1e-12)
