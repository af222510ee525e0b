"""Gradients through remote calls, against those of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed as todist
from distributed.api import remote_async_call, remote_sync_call
from tests.distributed import remote_functions as functions
from tests.distributed.worlds import WORLD

pytestmark = pytest.mark.usefixtures("workers")

autograd = todist.autograd


def everywhere(*args: object) -> list[tuple[int, tuple[object, ...], None]]:
    return [(worker, args, None) for worker in range(WORLD)]


def grads_of(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=1e-12, atol=1e-12)


X = torch.arange(6, dtype=torch.float64).view(2, 3) / 6


def test_all_workers_compute_a_backward_pass_at_the_same_time() -> None:
    x = torch.ones((), requires_grad=True)
    with autograd.context() as ctx:
        losses = remote_sync_call(functions.slow_backward, args=(x,), partitioner=everywhere)
        autograd.backward(ctx, losses)
    times = remote_sync_call(functions.backward_times, partitioner=everywhere)
    assert max(began for began, _ in times) < min(ended for _, ended in times)
    assert x.grad == WORLD


def test_torchs_own_context_is_seen(net: nn.Linear) -> None:
    assert autograd.current_context() is None
    with torch.distributed.autograd.context() as ctx:
        assert autograd.current_context() == ctx
        losses = remote_sync_call(functions.product, args=(net, X), partitioner=everywhere)
        autograd.backward(ctx, losses)
    expected = torch.autograd.grad(WORLD * functions.product(net, X), list(net.parameters()))
    assert_equal(grads_of(net), list(expected))
    assert autograd.current_context() is None


def test_a_parameter_hidden_in_an_object_keeps_its_graph() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    for worker in range(WORLD):
        with autograd.context() as ctx:
            (loss,) = remote_sync_call(
                functions.of_holder, args=(functions.Holder(parameter), torch.ones(2)), partitioner=worker
            )
            (gradient,) = autograd.grad(ctx, loss, parameter)
        assert gradient is not None and gradient.tolist() == [2.0, 4.0]


def test_calls_nested_three_deep_carry_gradients(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product_elsewhere, args=(net, X, 2), partitioner=1)
        ours = autograd.grad(ctx, loss, tuple(net.parameters()))
    assert_equal(ours, torch.autograd.grad(functions.product(net, X), tuple(net.parameters())))


def test_second_order_inner_steps_on_workers_are_exact(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        losses = remote_async_call(functions.inner_sgd, args=(net, X), partitioner=everywhere).wait()
        ours = autograd.grad(ctx, losses, list(net.parameters()))
    expected = torch.autograd.grad(WORLD * functions.inner_sgd(net, X), list(net.parameters()))
    assert_equal(list(ours), list(expected))


def test_backward_twice_gives_twice_the_gradient(net: nn.Linear) -> None:
    (expected, _) = torch.autograd.grad(functions.product(net, X), list(net.parameters()))
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=1)
        autograd.backward(ctx, loss, retain_graph=True)
        assert_equal(net.weight.grad, expected)
        autograd.backward(ctx, loss, retain_graph=True, inputs=net.weight)
        assert_equal(net.weight.grad, 2 * expected)
        (gradient, _) = autograd.grad(ctx, loss, list(net.parameters()))
        assert gradient is not None
        assert_equal(gradient, expected)
        assert_equal(net.weight.grad, 2 * expected)
        assert_equal(autograd.get_gradients(ctx)[net.weight], 3 * expected)


def test_the_original_names_its_arguments_so(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        losses = remote_sync_call(functions.product, args=(net, X), partitioner=everywhere)
        autograd.backward(autograd_ctx_id=ctx, tensors=losses, retain_graph=True)
        ours = autograd.grad(autograd_ctx_id=ctx, outputs=losses, inputs=list(net.parameters()))
    assert_equal(list(ours), grads_of(net))


def test_results_that_are_not_used_do_not_block(net: nn.Linear) -> None:
    """torch's own engine waits for them until its time limit."""
    with autograd.context() as ctx:
        x = 2 * net.weight
        remote_sync_call(functions.total, args=(x,), partitioner=everywhere)
        remote_sync_call(functions.constant, args=(x,), partitioner=1)
        with pytest.raises(functions.OwnError):
            remote_sync_call(functions.fail, args=(x,), partitioner=1)
        autograd.backward(ctx, x.sum())
    assert net.weight.grad is not None and (net.weight.grad == 2).all()


def test_mistakes_are_named(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=1)
        with pytest.raises(ValueError, match=r"number 0, of shape \(\), has no graph"):
            autograd.backward(ctx, torch.ones(()))
        with pytest.raises(ValueError, match="at least one leaf"):
            autograd.backward(ctx, loss, inputs=[])
        with pytest.raises(ValueError, match="no leaf that requires a gradient"):
            autograd.grad(ctx, loss, 2 * net.weight)
        other = torch.ones(1, requires_grad=True)
        with pytest.raises(ValueError, match="number 1 is not used"):
            autograd.grad(ctx, loss, [net.weight, other], retain_graph=True)
        assert autograd.grad(ctx, loss, [net.weight, other], allow_unused=True)[1] is None
    with pytest.raises(ValueError, match="there is no such context"):
        autograd.backward(ctx, loss)


# Copies of modules


def test_module_clone_shares_copies_and_detaches() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.append(net[0])  # the same layer twice
    reference = todist.module_clone(net)
    assert [id(p) for p in reference.parameters()] == [id(p) for p in net.parameters()] and reference is not net
    assert reference[1].running_mean is net[1].running_mean
    detached = todist.module_clone(net, detach_buffers=True)
    assert detached[1].running_mean is not net[1].running_mean and detached[0].weight is net[0].weight
    for by in ("clone", "copy"):
        clone = todist.module_clone(net, by=by)
        assert type(clone[0].weight) is Tensor and "Clone" in type(clone[0].weight.grad_fn).__name__
        assert clone[0].weight is clone[2].weight
        clone[0].weight.sum().backward()
        assert net[0].weight.grad is not None and (net[0].weight.grad == 1).all()
        net.zero_grad()
    separate = todist.module_clone(net, by="deepcopy")
    assert isinstance(separate[0].weight, nn.Parameter) and separate[0].weight is not net[0].weight
    assert separate[0].weight is separate[2].weight and separate[0].weight.is_leaf
    assert (separate[0].weight == net[0].weight).all() and separate[0].weight.requires_grad
    assert all(p.device.type == "meta" for p in todist.module_clone(net, by="deepcopy", device="meta").parameters())
    tree = todist.module_clone({"a": [torch.ones(2, requires_grad=True)]}, by="clone")
    assert tree["a"][0].grad_fn is not None
    with pytest.raises(ValueError, match="by='deep': must be reference, clone"):
        todist.module_clone(net, by="deep")
    with pytest.raises(TypeError, match="must be a module, or tensors"):
        todist.module_clone("net")
