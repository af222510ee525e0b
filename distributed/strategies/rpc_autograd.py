"""RPC map-reduce under a distributed autograd context: workers compute losses, and rank zero starts one backward
pass through all of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed import autograd
from distributed.api import remote_sync_call
from distributed.info import get_world_rank
from distributed.reduce import Subtree, Tensors, combine, partials, subtrees_of, tree_sum
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Flat, Windows, WorkPlan, flatten, unflatten, watch


def rpc_autograd(*, plan: WorkPlan, timeout: float) -> Connect:
    """As `rpc`, but the forward pass returns only losses, and the backward pass returns the gradients.

    If the reducer only adds, every subtree of chunks that a worker has (see `distributed.reduce`) has its own leaf
    copy of the parameters; else every chunk has one. So the gradients of the subtrees are separate, and are added in
    one order. Parameters and gradients travel once per copy, and every worker keeps the graphs of all its chunks until
    the backward pass.

    A worker may take `timeout` seconds for its part. Raises ValueError if the algorithm's loss has no graph, the
    partitioner would split chunks, or the time limit is not above 0.
    """
    if plan.work.loss is None:
        raise ValueError("strategy=rpc_autograd: this algorithm has no loss that a graph leads to; type strategy=rpc")

    def map_chunks(params: Flat, chunks: Sequence[Tensor], step: int) -> tuple[list[Any], Counter[int], Counter[int]]:
        count = len(chunks)
        leaves: dict[Subtree, list[Tensor]] = {}

        def args(numbers: list[int]) -> tuple[dict[Subtree, list[Tensor]], Any, int, int]:
            subtrees = subtrees_of(numbers, count) if plan.only_adds else [Subtree(0, number) for number in numbers]
            copies = {subtree: [b.clone().requires_grad_() for b in params.buffers] for subtree in subtrees}
            leaves.update(copies)
            return copies, params.form, count, step

        with autograd.context() as ctx:
            called, seconds = dealing.call(_losses, plan.partitioner, chunks, args)
            losses, rests, ranks = zip(*called.values(), strict=True)
            grads = _gradients(ctx, losses, ranks, leaves)
        if plan.only_adds:
            total, rest = combine(grads.items(), count), tree_sum(rests)
            ordered = [plan.work.result(unflatten(Flat(total, params.form)), rest)]
        else:
            by_number = {subtree.first(): unflatten(Flat(grad, params.form)) for subtree, grad in grads.items()}
            ordered = [plan.work.result(by_number[number], rest) for number, rest in enumerate(rests)]
        parts = [(rank, (step,), None) for rank in sorted(set(ranks))]
        of_backward = Counter(dict(remote_sync_call(_seconds_of, partitioner=lambda: parts)))
        return ordered, seconds + of_backward, _backward_traffic(params.buffers, ranks, leaves)

    return dealing.by_calls(plan, timeout, map_chunks)


Leaves = Mapping[Subtree, Sequence[Tensor]]  # copies of the parameters as flat buffers, by the chunks that use them


def _gradients(ctx: int, losses: Sequence[Tensor], ranks: Sequence[int], leaves: Leaves) -> dict[Subtree, list[Tensor]]:
    """The gradient of each subtree's losses by its own copy of the parameters.

    This process computes the gradients of its own losses in parallel to the distributed backward pass. Inside that
    pass torch would compute them first, and the other workers would wait.
    """

    def part(here: bool) -> tuple[list[Tensor], list[Subtree], list[Tensor]]:
        part_losses = [loss for loss, rank in zip(losses, ranks, strict=True) if (rank == get_world_rank()) == here]
        subtrees = [subtree for subtree in leaves if (ranks[subtree.first()] == get_world_rank()) == here]
        return part_losses, subtrees, [leaf for subtree in subtrees for leaf in leaves[subtree]]

    (own_losses, own_subtrees, own_leaves), (other_losses, other_subtrees, other_leaves) = part(True), part(False)
    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(autograd.grad, ctx, other_losses, other_leaves) if other_losses else None
        own_grads: Sequence[Any] = torch.autograd.grad(own_losses, own_leaves) if own_losses else ()
        gradients = iter([*own_grads, *(others.result() if others is not None else ())])
    return {subtree: [next(gradients) for _ in leaves[subtree]] for subtree in [*own_subtrees, *other_subtrees]}


class _Copies(torch.autograd.Function):
    """A copy of the parameters for each chunk of a subtree. Backward adds the chunks' gradients by `tree_sum`."""

    @staticmethod
    def forward(ctx: Any, form: Any, numbers: list[int], count: int, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.numbers, ctx.count = numbers, count
        return tuple(p for _ in numbers for p in pytree.tree_leaves(unflatten(Flat(list(buffers), form))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        each = len(grads) // len(ctx.numbers)
        terms = (flatten(grads[i : i + each]).buffers for i in range(0, len(grads), each))
        (total,) = partials(zip(ctx.numbers, terms, strict=True), ctx.count).values()
        return None, None, None, *total


def _losses(
    numbers: list[int], chunks: list[Tensor], leaves: Leaves, form: Any, count: int, step: int
) -> dealing.PartAnswer:
    """Runs on a worker: the loss of each of its chunks, the values beside the loss, and this worker's rank."""
    loss_of = dealing.current_work().loss
    assert loss_of is not None
    copies: dict[int, Tensors] = {}  # by chunk number, its own copy of the parameters
    for subtree, buffers in leaves.items():
        inside = sorted(n for n in numbers if n >> subtree.level == subtree.position)
        values = iter(_Copies.apply(form, inside, count, *buffers))
        copies |= {number: {name: next(values) for name in form} for number in inside}

    def losses() -> Iterator[tuple[Tensor, Any, int]]:
        for number, chunk in zip(numbers, chunks, strict=True):
            loss, rest = loss_of(copies[number], chunk, step)
            watch(_windows, step, (loss, *copies[number].values()))
            yield loss, rest, get_world_rank()

    return dealing.compute(numbers, losses(), flat=False)


_windows: Windows = {}  # by step, of the gradients that this worker computes


def _seconds_of(step: int) -> tuple[int, float]:
    """This worker's rank, and how long the backward pass of a step took on it."""
    began, ended = _windows.pop(step, (0.0, 0.0))
    return get_world_rank(), ended - began


def _backward_traffic(buffers: Sequence[Tensor], ranks: Sequence[int], leaves: Leaves) -> Counter[int]:
    """The bytes that each worker sends in the backward pass, an estimate, as torch counts none: for every chunk
    of another worker a gradient of the loss goes out, and for every copy of the parameters a gradient comes back."""
    here, size = get_world_rank(), sum(buffer.nbytes for buffer in buffers)
    sent = Counter({here: buffers[0].element_size() * sum(rank != here for rank in ranks)})
    for subtree in leaves:
        if (rank := ranks[subtree.first()]) != here:
            sent[rank] += size
    return sent
