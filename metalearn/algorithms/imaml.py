"""iMAML, Rajeswaran et al. 2019 (arXiv 1909.04630).

Inner steps solve φ(θ) = argmin L_support(φ) + λ/2 ‖φ − θ‖². The meta-gradient needs no graph of these steps: since
dφ/dθ = (I + ∇²L_support(φ) / λ)⁻¹ (lemma 1), it is the solution g of (I + ∇²L_support(φ) / λ) g = ∇L_query(φ).
Conjugate gradient solves this system (Algorithm 2), if its matrix is positive definite. The matrix of a network need
not be. A task where it is not keeps the g at which that shows; the first g is ∇L_query(φ), as in first-order MAML.
`cg_damping` c and `cg_strength` μ change the matrix to (1 + c) I + ∇²L_support(φ) / μ, as the authors' code does.

The metric `cg_residual` is ‖A g − b‖ / ‖b‖ for the matrix A and the right-hand side b.

Differences from the authors' code:

- Their matrix is (1 + δ) I + ∇²L / (λ + 10) with δ = 1; `cg_damping` and `cg_strength` make ours theirs.
- Their inner steps use the plain loss, followed by one step on the spring alone, and none in the test: `spring=after`
  and `eval_strength=0`. By default the spring is in every step, as in the paper's problem.
- Theirs begins conjugate gradient at zero, ours at ∇L_query(φ).
- Their test shuffles the characters by another seed than their training, so 310 of their 423 test characters were
  trained on.
- They draw 200,000 tasks beforehand. Their network flattens the last 2×2 map; ours averages it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from metalearn.algorithms.common.arithmetic import conjugate_gradient
from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    descent,
    evaluated_by_descent,
    last,
    support_descent,
)
from metalearn.errors import Invalid, counts, one_of, positive, real_number
from metalearn.nn.network import leaves
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Model, Params, summed


def imaml(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int, strength: float,
    eval_strength: float | None = None, spring: str = "every_step", cg_steps: int, cg_damping: float = 0.0,
    cg_strength: float | None = None,
) -> Algorithm:  # fmt: skip
    """MAML with implicit gradients. Its metric `cg_residual` is ‖A g − b‖ / ‖b‖ of a task's linear system A g = b.
    Raises ValueError for a rate or a strength that is not above 0, a negative damping, a number of steps out of range,
    or a step of the spring that is too long.

    Args:
        model, inner, inner_steps, eval_steps: as for `maml`.
        inner_lr: the rate of the inner steps on the regularised loss.
        strength: λ, the strength of the spring, the term that pulls φ to the meta-parameters.
        eval_strength: λ in validation and test, which may be 0; None: as in training.
        spring: `every_step`: the inner steps descend on the regularised loss. `after`: they descend on the plain loss,
            and one step of gradient descent on the spring alone comes after them, as in the authors' code. The rate
            times λ must be at most 1 then: a longer step would pass θ.
        cg_steps: steps of conjugate gradient.
        cg_damping: c, which is added to the diagonal of the linear system; the paper's is 0.
        cg_strength: μ, the λ of the linear system; None: λ itself.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    positive(strength=strength)
    one_of("spring", spring, ("every_step", "after"))
    if eval_strength is not None:
        real_number("eval_strength", eval_strength, at_least=0)
    for name, pull in (("strength", strength), ("eval_strength", eval_strength or 0)):
        if spring == "after" and inner_lr * pull > 1:
            reason = f"times inner_lr={inner_lr}, it must be at most 1: a longer step of the spring passes the start"
            raise Invalid(name, pull, reason, "type a smaller one, or GROUP.spring=every_step")
    counts(cg_steps=cg_steps)
    real_number("cg_damping", cg_damping, at_least=0)
    if cg_strength is not None:
        positive(cg_strength=cg_strength)

    def path(params: Params, support: Batch, steps: int, pull: float) -> Iterator[Params]:
        start = model.start(params, support.x.shape[0])

        def regularised(phi: Params, step: int) -> Tensor:
            """L(φ) + λ/2 ‖φ − θ‖² of every task."""
            away = [(phi[name] - start[name]).square().reshape(len(phi[name]), -1).sum(dim=1) for name in phi]
            return model.metrics(phi, support)["loss"] + pull / 2 * torch.stack(away).sum(dim=0)

        if spring == "every_step":
            yield from descent(regularised, start, optimizer=inner, rate=inner_lr, steps=steps, order=0)
            return
        for phi in support_descent(model, params, support, inner=inner, rate=inner_lr, steps=steps, order=0):
            # a step of gradient descent on the spring alone
            yield {name: torch.lerp(value, start[name], inner_lr * pull) for name, value in phi.items()}

    def eval_path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        return path(params, support, steps, strength if eval_strength is None else eval_strength)

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        (support, query) = episode
        at = leaves(last(path(params, support, inner_steps, strength)))
        with torch.enable_grad():
            values = model.metrics(at, query, support.x)
            grads = torch.autograd.grad(values["loss"].sum(), list(at.values()), materialize_grads=True)
        slopes = {name: slope for name, slope in model.gradient(at, support, twice=True).items() if slope.requires_grad}

        def product(v: Params) -> Params:
            """((1 + c) I + ∇²L / μ) v of every task; ∇²L v is 0 for parameters that the loss does not use."""
            curved = torch.autograd.grad(
                list(slopes.values()), list(at.values()), [v[name] for name in slopes], retain_graph=True,
                materialize_grads=True,
            )  # fmt: skip
            mu = cg_strength or strength
            return {name: (1 + cg_damping) * v[name] + h / mu for name, h in zip(at, curved, strict=True)}

        solution, residual = conjugate_gradient(product, dict(zip(at, grads, strict=True)), cg_steps)
        return ChunkResult(model.sums(solution), summed(values | {"cg_residual": residual}), len(residual))

    evaluated = evaluated_by_descent(model, eval_path, eval_steps)
    return Algorithm(model.init, meta_grad, *evaluated, loss=None, computes=model.loss)
