"""Meta-Curvature, Park and Oliva 2019 (arXiv 1902.03356).

MAML whose inner gradients are transformed by learned matrices. The gradient G of a convolution is taken as a tensor
[outputs, inputs, pixels of the kernel]. Each of its modes has a square matrix: MC(G) = G ×₃ M_f ×₂ M_i ×₁ M_o, in other
words vec MC(G) = (M_o ⊗ M_i ⊗ M_f) vec G. A linear layer has M_o and M_i. A bias, scale or shift has one factor for
each number, the diagonal of a matrix. All matrices begin as the identity, and there the meta-gradient is MAML's.

The authors' code for Omniglot was not at hand. For vectors we have learn2learn's choice, one factor for each number.
"""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import State, part, prefixed, without
from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    by_tensor,
    check_descent,
    gradient_learner,
    support_descent,
)
from metalearn.types import Algorithm, Batch, Model, Params

CURVATURE = "curvature."  # the prefix of the names of the matrices; the name of the weight and that of the mode follow
MODES = ("outputs", "inputs", "pixels")


def meta_curvature(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    first_order: bool = False, checkpoint_steps: bool | str = False,
) -> Algorithm:  # fmt: skip
    """MAML with learned curvature. Raises ValueError for a rate that is not above 0, or a negative number of steps.

    Args:
        inner: the optimiser of the inner steps, which gets the transformed gradients.
        model, inner_lr, inner_steps, eval_steps, first_order, checkpoint_steps: as for `maml`.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, first_order=first_order,
        checkpoint_steps=checkpoint_steps,
    )  # fmt: skip

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        modes = {name: _identities(value) for name, value in weights.items()}
        matrices = {f"{name}.{mode}": m for name in modes for mode, m in modes[name].items()}
        return weights | prefixed(CURVATURE, matrices)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        weights = without(CURVATURE, params)
        modes = {name: part(f"{CURVATURE}{name}.", params) for name in weights}

        of_curved = by_tensor(inner, model)

        def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
            curved = {name: transformed(g, modes[name]) for name, g in model.by_name(grads).items()}
            return of_curved.direct(model.replaced(grads, curved), state, step)

        return support_descent(
            model, weights, support, inner=of_curved._replace(direct=direct, plain=False), rate=inner_lr,
            steps=steps, order=order, checkpoint=checkpoint_steps,
        )  # fmt: skip

    order = 1 if first_order else 2
    return gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order, init=init)


def transformed(gradient: Tensor, modes: Params) -> Tensor:
    """MC(G) of every task's gradient [t, *shape]; `modes` are the matrices of the weight, as in `MODES`, or its factors
    `entries` [n]."""
    if "entries" in modes:
        return gradient * modes["entries"]
    result = torch.einsum("pq,tq...->tp...", modes["outputs"], gradient.flatten(3) if "pixels" in modes else gradient)
    result = torch.einsum("pq,toq...->top...", modes["inputs"], result)
    if "pixels" in modes:
        result = torch.einsum("pq,toiq->toip", modes["pixels"], result)
    return result.view(gradient.shape)


def _identities(weight: Tensor) -> Params:
    """The matrices of a weight [outputs, inputs] or [outputs, inputs, height, width], or the factors of a vector."""
    if weight.dim() < 2:
        return {"entries": torch.ones_like(weight)}
    sizes = weight.flatten(2).shape if weight.dim() > 2 else weight.shape
    return {mode: torch.eye(size) for mode, size in zip(MODES, sizes, strict=False)}
