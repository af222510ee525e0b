"""iMAML, Rajeswaran et al. 2019 (arXiv 1909.04630).

The inner problem is φ(θ) = argmin L_support(φ) + λ/2 ‖φ − θ‖², solved by inner steps. Its meta-gradient needs no graph
of them: dφ/dθ = (I + ∇²L_support(φ) / λ)⁻¹ (lemma 1), so that it is the solution g of
(I + ∇²L_support(φ) / λ) g = ∇L_query(φ), found by conjugate gradient (Algorithm 2). That needs a positive definite
matrix, which a network's need not be: `cg_damping` c and `cg_strength` μ make it (1 + c) I + ∇²L_support(φ) / μ, as the
authors' code does.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from metalearn.algorithms.common.functional import conjugate_gradient, leaves, objective, per_task, summed
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, TaskLoss, constant, descent, last
from metalearn.algorithms.common.learners import check_descent, evaluated_by_descent, support_loss
from metalearn.checks import real_number, whole_number
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Metrics, Model, Params


def imaml(
    *,
    model: Model,
    inner: InnerOptimizer = SGD,
    inner_lr: float,
    inner_steps: int,
    eval_steps: int,
    strength: float,
    cg_steps: int,
    cg_damping: float = 0.0,
    cg_strength: float | None = None,
) -> Algorithm:
    """MAML with implicit gradients. `cg_residual` among its metrics is ‖A g − b‖ / ‖b‖ of a task's linear system; above
    1, g is worse than none.

    Args:
        model: the network to be adapted.
        inner: the optimiser of the inner steps.
        inner_lr: the rate of the inner steps on the regularised loss.
        inner_steps: inner steps in meta-training.
        eval_steps: inner steps in validation and test.
        strength: λ, how much the inner problem holds on to the meta-parameters.
        cg_steps: steps of conjugate gradient.
        cg_damping: c, what is added to the diagonal of the linear system; 0: the paper's.
        cg_strength: μ, the λ of the linear system; None: the same.

    Raises:
        ValueError: a rate or a strength that is not above 0, a negative damping, or a number of steps out of range.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    real_number("strength", strength, above=0)
    whole_number("cg_steps", cg_steps, at_least=1)
    real_number("cg_damping", cg_damping, at_least=0)
    if cg_strength is not None:
        real_number("cg_strength", cg_strength, above=0)

    def inner_loss(start: Params, support: Batch) -> TaskLoss:
        plain = support_loss(model, support)

        def loss(phi: Params, step: int) -> Tensor:
            away = [(phi[name] - start[name]).square().flatten(1).sum(dim=1) for name in phi]
            return plain(phi, step) + strength / 2 * torch.stack(away).sum(dim=0)

        return loss

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        start = per_task(params, support.x.shape[0])
        loss = inner_loss(start, support)
        return descent(loss, start, optimizer=inner, rate=constant(inner_lr), steps=steps, order=0)

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        support = episode.support
        start = per_task(params, support.x.shape[0])
        rate = constant(inner_lr)
        phi = last(descent(inner_loss(start, support), start, optimizer=inner, rate=rate, steps=inner_steps, order=0))
        found, gradient = query_gradient(phi, episode)
        curvature = hessian_product(support_loss(model, support), phi)

        def product(v: Params) -> Params:
            share = cg_strength or strength
            return {name: (1 + cg_damping) * v[name] + h / share for name, h in curvature(v).items()}

        solution, residual = conjugate_gradient(product, gradient, cg_steps)
        grads = {name: value.sum(dim=0) for name, value in solution.items()}
        return ChunkResult(grads, summed(found | {"cg_residual": residual}), len(residual))

    def query_gradient(phi: Params, episode: Episode) -> tuple[Metrics, Params]:
        (support, query) = episode
        phi = leaves(phi)
        with torch.enable_grad():
            found = objective(model.apply(phi, query.x, support.x), query.y)
            grads = torch.autograd.grad(found["loss"].sum(), list(phi.values()))
        return found, dict(zip(phi, grads, strict=True))

    return Algorithm(model.init, meta_grad, *evaluated_by_descent(model, path, eval_steps), loss=None)


def hessian_product(loss: TaskLoss, params: Params) -> Callable[[Params], Params]:
    """v ↦ ∇²L v of every task's own loss, at per-task parameters."""
    at = leaves(params)
    with torch.enable_grad():
        slope = torch.autograd.grad(loss(at, 0).sum(), list(at.values()), create_graph=True)

    def product(v: Params) -> Params:
        found = torch.autograd.grad(
            slope, list(at.values()), [v[name] for name in at], retain_graph=True, materialize_grads=True
        )
        return dict(zip(at, found, strict=True))

    return product
