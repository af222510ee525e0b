"""Distributed autograd: gradients through remote calls.

torch's engine assumes that every message sent under a context takes part in the backward pass. If a result is not
used, its message does not, and the engine waits for ever. So every remote call leaves an *anchor*: an empty sum that
ties its messages to the caller. `backward` and `grad` wait for the context's calls, and add the anchors to the roots.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from distributed.calls import autograd, worker
from distributed.calls.session import current, default_timeout, is_started, missing_workers
from distributed.calls.worker import current_context
from distributed.errors import says_timeout
from distributed.launch.meeting import within

DistAutogradContext = autograd.DistAutogradContext

__all__ = ["DistAutogradContext", "backward", "context", "current_context", "get_gradients", "grad", "is_available"]

is_available = autograd.is_available

_lock = threading.Lock()


@contextmanager
def context() -> Iterator[int]:
    """`with context() as ctx:` makes what is computed inside, here and on other workers, differentiable.

    A context belongs to one thread. Contexts do not nest. The graphs of its remote calls stay until it ends, so any
    number of backward passes is possible. Each pass goes through all calls of the context: in a loop, open a context
    for each step.
    """
    with autograd.context() as ctx:
        try:
            yield ctx
        finally:
            worker.forget(ctx)


def get_gradients(ctx: int) -> dict[Tensor, Tensor]:
    """The gradients that the context has accumulated so far, by leaf. Raises ValueError if there is no such context."""
    _check_open(ctx)
    return autograd.get_gradients(ctx)


def backward(
    autograd_ctx_id: int, tensors: Tensor | Sequence[Tensor], retain_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Adds the gradients of the sum of `tensors` to `.grad` of the leaves on this worker.

    A second call in the same context adds its own gradients only. Raises ValueError for no such context, no inputs, a
    tensor without a graph, or an input that is no leaf; RuntimeError, which names the worker, if a call of the context
    was never answered, so that its graph is incomplete, or the pass failed on a worker; ConnectionError if a worker
    does not answer; TimeoutError if the pass did not end within the session's time limit.

    Args:
        autograd_ctx_id: the id that `context` gave.
        tensors: tensors with a graph; each is summed.
        retain_graph: whether the graph can be used again. That of remote calls always can, until the context ends.
        inputs: the leaves whose `.grad` changes; default all.
    """
    leaves = None if inputs is None else _leaves(inputs)
    gradients = _new_gradients(autograd_ctx_id, _list(tensors), retain_graph)
    with _lock:
        for leaf, gradient in gradients.items():
            if leaves is None or any(leaf is other for other in leaves):
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def grad(
    autograd_ctx_id: int, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor],
    retain_graph: bool = False, allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the sum of `outputs`, one for each of `inputs`; `.grad` stays as it is. Raises as `backward`.

    Args:
        autograd_ctx_id: the id that `context` gave.
        outputs: tensors with a graph; each is summed.
        inputs: leaves on this worker.
        retain_graph: whether the graph can be used again. That of remote calls always can, until the context ends.
        allow_unused: give None for an input that no output depends on, instead of a ValueError.
    """
    leaves = _leaves(inputs)
    gradients = _new_gradients(autograd_ctx_id, _list(outputs), retain_graph)
    selected = [gradients.get(leaf) for leaf in leaves]
    for i, gradient in enumerate(selected):
        if gradient is None and not allow_unused:
            advice = "type allow_unused=True to get None for it"
            raise ValueError(f"inputs: number {i} is not used by the outputs; {advice}")
    return tuple(selected)


def _new_gradients(ctx: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """The gradients that one backward pass adds to the context, as new tensors."""
    # torch adds to the context's tensors in place. So they begin at zero, and the old values are added after the pass.
    _check_open(ctx)
    for i, root in enumerate(roots):
        if not root.requires_grad:
            raise ValueError(
                f"tensors: number {i}, of shape {tuple(root.shape)}, has no graph; compute it inside "
                "autograd.context(), from tensors that require a gradient"
            )
    calls = worker.calls_of(ctx)
    calls.wait()
    reason = worker.reason_against(ctx)
    if reason is not None:
        raise RuntimeError(
            f"ctx={ctx}: its backward pass would wait for ever: {reason}; "
            "type `with autograd.context() as ctx:` and repeat the calls in it"
        )
    anchors = list(calls.anchors)
    before = {}
    with torch.no_grad():
        for leaf, total in autograd.get_gradients(ctx).items():
            before[leaf] = total.clone()
            total.zero_()
    # To write to a tensor changes its version, to replace it changes the address.
    untouched = {leaf: (total.data_ptr(), total._version) for leaf, total in autograd.get_gradients(ctx).items()}
    summed = [root if root.ndim == 0 else root.sum() for root in roots]
    try:
        _pass(ctx, [*summed, *anchors], retain_graph or bool(anchors))
        totals = autograd.get_gradients(ctx)
        return {leaf: t.clone() for leaf, t in totals.items() if untouched.get(leaf) != (t.data_ptr(), t._version)}
    finally:
        with torch.no_grad():
            for leaf, total in autograd.get_gradients(ctx).items():
                if leaf in before:
                    total.add_(before[leaf])


def _pass(ctx: int, roots: list[Tensor], retain_graph: bool) -> None:
    """A backward pass of torch's engine, with the session's time limit."""
    limit = default_timeout()
    try:  # the engine has no time limit of its own
        within(limit, partial(autograd.backward, ctx, roots, retain_graph=retain_graph))
    except TimeoutError:
        worker.spoil(ctx, f"an earlier pass did not end within {limit:g} s")
        if (lost := _lost_workers(limit, "the pass did not end")) is not None:
            raise lost from None
        raise TimeoutError(
            f"the backward pass did not end within {limit:g} s, and all workers answer: it needs more time, or a "
            "tensor that was sent takes no part; a function that fetches one by RRef.to_here() must use it"
        ) from None
    except RuntimeError as error:
        worker.spoil(ctx, "an earlier pass failed")
        parts = re.match(r"(?:Error on Node (\d+): )*(.*)", str(error))
        assert parts is not None
        number, cause = parts.groups()
        if (lost := _lost_workers(limit, cause)) is not None:
            raise lost from error
        if says_timeout(cause):
            raise TimeoutError(f"a worker did not answer within {limit:g} s in the backward pass: {cause}") from error
        where = current().workers[int(number)] if number is not None and is_started() else "a worker"
        raise RuntimeError(f"the backward pass failed on {where}: {cause}") from error


def _lost_workers(limit: float, cause: str) -> Exception | None:
    """The error that names the workers that do not answer after a pass has failed; None if all answer."""
    names, are_dead = missing_workers()
    if are_dead:
        return ConnectionError(f"{names} does not answer in the backward pass: {cause}")
    late = f"{names} did not answer within {limit:g} s in the backward pass: {cause}"
    return TimeoutError(late) if names else None


def _check_open(ctx: int) -> None:
    if not worker.is_open(ctx):
        raise ValueError(f"ctx={ctx}: there is no such context; type `with autograd.context() as ctx:`")


def _list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _leaves(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    leaves = _list(inputs)
    if not leaves:
        raise ValueError("inputs=(): at least one leaf is needed; leave `inputs` out to get all")
    for i, leaf in enumerate(leaves):
        if not (leaf.is_leaf and leaf.requires_grad):
            raise ValueError(f"inputs: number {i}, of shape {tuple(leaf.shape)}, is no leaf that requires a gradient")
    return leaves
