"""Distributed autograd: gradients through remote calls.

torch's engine assumes that every message sent under a context takes part in the backward pass. If a result is not
used, its message does not, and the engine waits until its time limit. So every remote call leaves an *anchor* here:
an empty sum that ties its messages to the caller. `backward` and `grad` add the anchors to the roots.
"""

import functools
import threading
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed import autograd

if autograd.is_available():
    from torch.distributed.autograd import DistAutogradContext

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "grad", "is_available"]

is_available = autograd.is_available

_lock = threading.Lock()
_anchors: dict[int, list[Tensor]] = {}

_MAIN_THREAD = threading.main_thread().ident
_ever_entered = False


def _note_first_entry() -> None:
    """Makes torch's context class record its first use. To ask torch instead takes a tenth of a small call's time."""
    enter = autograd.context.__enter__

    @functools.wraps(enter)
    def noted(self: autograd.context) -> int:
        global _ever_entered
        _ever_entered = True
        return enter(self)

    autograd.context.__enter__ = noted  # type: ignore[method-assign]


_note_first_entry()


class context:  # noqa: N801 (the name is the original's)
    """`with context() as ctx:` makes what is computed inside, here and on other workers, differentiable.

    A context belongs to one thread. Contexts do not nest.
    """

    def __init__(self) -> None:
        self._context = autograd.context()

    def __enter__(self) -> int:
        self._id: int = self._context.__enter__()
        return self._id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _anchors.pop(self._id, None)
        self._context.__exit__(kind, error, trace)


def current_context() -> int | None:
    """The id of the context that this thread is in, or None."""
    if not _ever_entered and threading.get_ident() == _MAIN_THREAD:
        return None  # in other threads a message may have opened one
    if autograd._get_debug_info()["num_autograd_contexts"] == "0":
        return None  # ten times as fast as the error below
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


def leave_anchor(ctx: int, anchor: Tensor) -> None:
    """Keeps the anchor of a remote call until the context ends."""
    with _lock:
        for other in [known for known in _anchors if known != ctx]:  # torch's own class may have ended them
            if not _is_open(other):
                del _anchors[other]
        _anchors.setdefault(ctx, []).append(anchor)


def get_gradients(ctx: int) -> dict[Tensor, Tensor]:
    """The gradients that the context has accumulated so far, by leaf.

    Raises:
        ValueError: there is no such context.
    """
    _check_open(ctx)
    gradients: dict[Tensor, Tensor] = autograd.get_gradients(ctx)
    return gradients


def backward(
    autograd_ctx_id: int,
    tensors: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Adds the gradients of the sum of `tensors` to `.grad` of the leaves on this worker.

    A second call in the same context adds its own gradients only.

    Args:
        autograd_ctx_id: the id that `context` gave.
        tensors: tensors with a graph; each is summed.
        retain_graph: whether the graph can be used again.
        inputs: the leaves whose `.grad` changes; default all.

    Raises:
        ValueError: no such context; no inputs; a tensor without a graph; an input that is no leaf.
        RuntimeError: a worker does not answer within the session's time limit.
    """
    wanted = None if inputs is None else _leaves(inputs)
    gradients = _new_gradients(autograd_ctx_id, _list(tensors), retain_graph)
    with _lock:
        for leaf, gradient in gradients.items():
            if wanted is None or any(leaf is chosen for chosen in wanted):
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def grad(
    autograd_ctx_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of the sum of `outputs`, one for each of `inputs`; `.grad` stays as it is.

    Args:
        autograd_ctx_id: the id that `context` gave.
        outputs: tensors with a graph; each is summed.
        inputs: leaves on this worker.
        retain_graph: whether the graph can be used again.
        allow_unused: give None for an input that no output depends on, instead of an error.

    Raises:
        ValueError: no such context; a tensor without a graph; an input that is no leaf, or that no output depends on.
        RuntimeError: a worker does not answer within the session's time limit.
    """
    wanted = _leaves(inputs)
    gradients = _new_gradients(autograd_ctx_id, _list(outputs), retain_graph)
    selected = [gradients.get(leaf) for leaf in wanted]
    unused = [i for i, gradient in enumerate(selected) if gradient is None]
    if unused and not allow_unused:
        raise ValueError(
            f"inputs: number {unused[0]} is not used by the outputs; type allow_unused=True to get None for it"
        )
    return tuple(selected)


def _new_gradients(ctx: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """The gradients that one backward pass adds to the context, as new tensors.

    torch adds to the context's tensors in place. So these are set to zero before the pass, and their old values are
    added after it.
    """
    _check_open(ctx)
    for i, root in enumerate(roots):
        if not root.requires_grad:
            raise ValueError(
                f"tensors: number {i}, of shape {tuple(root.shape)}, has no graph; compute it inside "
                "autograd.context(), from tensors that require a gradient"
            )
    before = {}
    with torch.no_grad():
        for leaf, total in autograd.get_gradients(ctx).items():
            before[leaf] = total.clone()
            total.zero_()
    untouched = {leaf: _state(total) for leaf, total in autograd.get_gradients(ctx).items()}
    summed = [root if root.ndim == 0 else root.sum() for root in roots]
    anchors = _anchors.get(ctx, [])
    try:
        autograd.backward(ctx, [*summed, *anchors], retain_graph=retain_graph)
        totals = autograd.get_gradients(ctx)
        return {leaf: t.clone() for leaf, t in totals.items() if untouched.get(leaf) != _state(t)}
    finally:
        if not retain_graph:  # the graphs of the calls are freed with those of the roots
            _anchors.pop(ctx, None)
        with torch.no_grad():
            for leaf, total in autograd.get_gradients(ctx).items():
                if leaf in before:
                    total.add_(before[leaf])


def _state(tensor: Tensor) -> tuple[int, int]:
    """A value that changes when the tensor is written to or replaced."""
    return tensor.data_ptr(), tensor._version


def _check_open(ctx: int) -> None:
    if not _is_open(ctx):
        raise ValueError(f"ctx={ctx}: there is no such context; type `with autograd.context() as ctx:`")


def _is_open(ctx: int) -> bool:
    try:
        autograd._retrieve_context(ctx)
    except RuntimeError:
        return False
    return True


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
