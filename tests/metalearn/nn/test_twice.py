"""Attention with fast second derivatives, against torch's plain way."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from metalearn.bilevel import descent, forward, implicit
from metalearn.nn import attention as attentions
from metalearn.nn import backends
from metalearn.nn.attention import attention, second_order_attention, torchs_attention
from metalearn.nn.backends import torch_ops

DOUBLE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed + 100 * sum(shape)))


def plain(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torchs_attention(q, k, v, *args, **kwargs)


def largest_error(found: Any, wanted: Any) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30)) for a, b in pairs)


def derivatives(of: Callable[..., Tensor], parts: list[Tensor], **settings: Any) -> list[Tensor]:
    """The value, and derivatives of the first to the fourth order."""
    values: tuple[Tensor, ...] = (of(*parts, **settings),)
    results = list(values)
    for order in range(1, 5):
        ways = [drawn(*value.shape, seed=order) for value in values]
        values = torch.autograd.grad(values, parts, ways, create_graph=order < 4)
        results += values
    return results


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "all": {"attn_mask": (6, 6)},
    "keys": {"attn_mask": (6,)},
    "batch": {"attn_mask": (2, 1, 1, 6)},
    "heads": {"attn_mask": (3, 6, 6)},
    "each": {"attn_mask": (2, 3, 1, 6)},
}


@pytest.fixture(params=["kernels", "operations", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: the kernels in C, or torch's operations, at once or in several blocks."""
    if request.param == "kernels":
        if backends.compiled(DOUBLE) is None:
            pytest.skip("there is no C compiler")
    else:
        monkeypatch.setattr(attentions, "kernels_for", lambda x: None)
        if request.param == "blocks":
            monkeypatch.setattr(torch_ops, "BLOCK_NUMBERS", {"cpu": 16})
    return str(request.param)


@pytest.mark.parametrize("kind", ["truth", "numbers"])
@pytest.mark.parametrize("name", MASKS)
def test_all_derivatives_are_those_of_the_plain_way(name: str, kind: str, way: str) -> None:
    parts = [drawn(2, 3, 6, width, seed=width).requires_grad_() for width in (4, 4, 5)]
    settings: dict[str, Any] = dict(MASKS[name])
    if "attn_mask" in settings:
        mask = drawn(*settings["attn_mask"])
        settings["attn_mask"] = mask if kind == "numbers" else mask > -0.3
    found, wanted = (derivatives(of, parts, **settings) for of in (attention, plain))
    assert largest_error(found, wanted) <= 1e-11


@pytest.mark.parametrize(("n", "m", "width"), [(1, 1, 1), (130, 300, 24), (5, 7, 16)])
def test_blocks_and_padding_change_nothing(n: int, m: int, width: int, way: str) -> None:
    parts = [drawn(2, rows, width, seed=rows).requires_grad_() for rows in (n, m, m)]
    settings = {"scale": 0.3}
    found, wanted = (derivatives(of, parts, **settings) for of in (attention, plain))
    assert largest_error(found, wanted) <= 1e-10


def test_a_row_that_is_hidden_whole_gives_zeros(way: str) -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    parts = [drawn(1, 2, 6, 4, seed=place).requires_grad_() for place in range(3)]
    found = derivatives(attention, parts, attn_mask=mask)
    assert not found[0][:, :, 2].any()
    assert largest_error(found, derivatives(plain, parts, attn_mask=mask)) <= 1e-11


@pytest.mark.parametrize("shape", [(6, 6), (2, 1, 1, 6), (1, 3, 6, 6)])
def test_a_mask_that_learns_outside_and_maps_over_tasks(shape: tuple[int, ...]) -> None:
    """The inner gradient does not depend on the mask, the outer one does."""

    def outer(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def inner(w: Tensor, o: dict[str, Tensor], x: Tensor) -> Tensor:
            q, k, v = (part.view(2, 3, 6, 4) for part in (x * w, x * w * o["s"], x - w))
            return of(q, k, v, o["mask"]).square().sum()

        def end(o: dict[str, Tensor], w: Tensor, x: Tensor) -> Tensor:
            for _ in range(2):
                w = w - 0.01 * grad(inner)(w, o, x)
            return inner(w, o, x)

        return end

    o, w, x = {"s": drawn(144), "mask": drawn(*shape)}, drawn(144, seed=1), drawn(144, seed=2)
    tasks = torch.stack([w, x]), torch.stack([x, w])
    masks = o | {"mask": torch.stack([o["mask"], o["mask"] + 1], dim=1)}

    def all_of(of: Callable[..., Tensor]) -> list[Any]:
        slope = grad(outer(of))
        return [
            slope(o, w, x),
            grad(lambda w: slope(o, w, x)["mask"].sum() + slope(o, w, x)["s"].sum())(w),
            vmap(slope, in_dims=(None, 0, 0))(o, *tasks),
            vmap(slope, in_dims=({"s": None, "mask": 1}, 0, 0))(masks, *tasks),
        ]

    assert largest_error(all_of(attention), all_of(plain)) <= 1e-12


def test_no_graph_keeps_the_weights() -> None:
    kept = list[int]()
    parts = [torch.randn(1, 2, 200, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        grads = torch.autograd.grad(attention(*parts).square().sum(), parts, create_graph=True)
        torch.autograd.grad(sum(value.square().sum() for value in grads), parts)
    assert kept
    assert max(kept) <= parts[0].numel()


def test_threads_change_no_bit() -> None:
    parts = [torch.randn(3, 2, 70, 8, requires_grad=True) for _ in range(3)]

    def of_threads(count: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            grads = torch.autograd.grad(attention(*parts).square().sum(), parts, create_graph=True)
            return [*grads, *torch.autograd.grad(sum(value.square().sum() for value in grads), parts)]
        finally:
            torch.set_num_threads(before)

    one, two = of_threads(1), of_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def through(network: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """A second-order meta-gradient of one step."""
    params = dict(network.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(network, values, (x,))
        return y.square().sum()

    slopes = torch.autograd.grad(loss(params), list(params.values()), create_graph=True)
    moved = {name: value - 0.1 * d for (name, value), d in zip(params.items(), slopes, strict=True)}
    return torch.autograd.grad(loss(moved), list(params.values()))


def test_torchs_own_layers_use_it_in_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, dtype=DOUBLE)
    x = drawn(3, 5, 16)
    calls, others = list[int](), list[Any]()
    monkeypatch.setattr(attentions, "attention", lambda *args, **kwargs: calls.append(1) or attention(*args, **kwargs))
    q = drawn(1, 2, 3)
    with second_order_attention():
        found = through(network, x)
        count = len(calls)
        thread = threading.Thread(target=lambda: others.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join(60)
    assert count == 2
    assert len(others) == 1
    assert len(calls) == count
    assert F.scaled_dot_product_attention is torchs_attention
    with sdpa_kernel(SDPBackend.MATH):
        wanted = through(network, x)
    assert largest_error(found, wanted) <= 1e-11


def test_contexts_of_two_threads_leave_torchs_choice_as_it_was() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with second_order_attention():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with second_order_attention():
        thread.start()
        assert entered.wait(10)
    assert not torch.backends.cuda.flash_sdp_enabled()  # the other thread still computes
    left.set()
    thread.join(10)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_what_it_cannot_compute_goes_torchs_way() -> None:
    q = drawn(1, 4, 6, 8)
    half, few = q.bfloat16(), q[:, :2]
    for parts, settings in (
        ((q, q, q), {"dropout_p": 0.5}),
        ((q, few, few), {"enable_gqa": True}),
        ((half, half, half), {}),
    ):
        torch.manual_seed(0)
        with second_order_attention():
            found = F.scaled_dot_product_attention(*parts, **settings)
        torch.manual_seed(0)
        assert torch.equal(found, plain(*parts, **settings))
    for scale in (0.0, -0.3):
        torch.testing.assert_close(attention(q, q, q, scale=scale), plain(q, q, q, scale=scale))
    for parts, settings in (
        ((q, q, q), {"attn_mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True}),
        ((q, q, q[:, :, :3]), {}),
        ((q, q[..., :3], q), {}),
        ((q, q.float(), q), {}),
        ((q, q, q), {"attn_mask": torch.zeros(4, 6, dtype=DOUBLE)}),
    ):
        with pytest.raises(RuntimeError), sdpa_kernel(SDPBackend.MATH):
            attention(*parts, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_what_is_no_number_stays_so_in_its_rows(dtype: torch.dtype) -> None:
    q, k, v = (drawn(1, 2, 6, 4, seed=place).to(dtype) for place in range(3))
    q[0, 1, 2, 0] = torch.nan
    k[0, 0, 4] = torch.inf
    found, wanted = attention(q, k, v), plain(q, k, v)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert found[0, 1, 2].isnan().all()
    assert found[0, 1, :2].isfinite().all()


def test_bilevel_programs_need_no_word_about_attention() -> None:
    x = drawn(1, 2, 6, 4)

    def inner(w: Any, outer: Any, step: int) -> Tensor:
        y = F.scaled_dot_product_attention(x * w["q"], x * outer["k"], x)
        return y.square().sum() + w["q"].square().sum()

    start, outer = {"q": drawn(4)}, {"k": drawn(4, seed=1)}

    def slope(memory: str) -> Tensor:
        k = outer["k"].clone().requires_grad_()
        end = descent(inner, start, {"k": k}, steps=4, rate=0.05, memory=memory)
        (of_k,) = torch.autograd.grad(end["q"].square().sum(), k)
        return of_k

    whole = slope("all")
    for memory in ("points", "log"):
        torch.testing.assert_close(slope(memory), whole, rtol=1e-10, atol=1e-12)
    way = {"k": drawn(4, seed=2)}
    end, moved = forward(inner, start, outer, way, steps=4, rate=0.05)
    torch.testing.assert_close((2 * end["q"] * moved["q"]).sum(), (whole * way["k"]).sum(), rtol=1e-10, atol=1e-12)
    far = descent(inner, start, outer, steps=400, rate=0.05)
    of_end = implicit(inner, lambda w, outer: w["q"].square().sum(), far, outer, steps=8)
    k = outer["k"].clone().requires_grad_()
    long = descent(inner, start, {"k": k}, steps=400, rate=0.05, memory="log")
    torch.testing.assert_close(of_end["k"], torch.autograd.grad(long["q"].square().sum(), k)[0], rtol=1e-6, atol=1e-9)
