"""CAVIA, Zintgraf et al. 2019 (arXiv 1810.03642).

Algorithm 1: the inner steps change context parameters φ only, φᵢ = φ₀ − α ∇φ L_support(φ₀, θ) from φ₀ = 0 in every
task; the outer step changes θ only, through the inner steps. φ is an input of one layer:

- a linear layer has φ beside its other inputs. That adds W φ to its bias, where W is part of θ;
- a batch norm is followed by FiLM, h ← γ ∘ h + β with γ = 1 + W_γ φ and β = W_β φ for every channel. That is the same
  norm with the scale γ ∘ scale and the shift γ ∘ shift + β.

So φ changes two parameters of the network for each task, and the network itself stays as it is.

Differences from the authors' code:

- Their FiLM has drawn biases b_γ and b_β, which would repeat the norm's own scale and shift. Both stand behind the
  norm; theirs behind the pooling, too. Ours is in one place.
- Their starting values are torch's; ours are Xavier's, for the network and for W.
- They clip the meta-gradient of every task to [−10, 10]. They report 100 waves at evenly spaced points, we 600 at
  random ones.
- They have no Omniglot.
"""

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import part, prefixed, without
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, check_descent, descent, gradient_learner
from metalearn.errors import Invalid, counts, switches
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Model, Params

WEIGHTS = "context."  # the prefix of the names of W, or of W_γ (`scale`) and W_β (`shift`)


def cavia(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int, contexts: int,
    layer: int = 1, first_order: bool = False, checkpoint_steps: bool = False,
) -> Algorithm:  # fmt: skip
    """Fast context adaptation. Raises ValueError for a rate that is not above 0, a number out of range, or a model
    without such a layer.

    Args:
        model: the network; what it computes depends on the context parameters.
        inner, inner_lr (α), inner_steps, eval_steps, first_order, checkpoint_steps: as for `maml`, without `nested`.
        contexts: the number of context parameters.
        layer: which layer takes them, from 1: of the batch norms, or of the linear layers of a model without norms.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    counts(contexts=contexts, layer=layer)
    switches(first_order=first_order, checkpoint_steps=checkpoint_steps)
    names = _layer(model, layer)

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        # Uniform as the weights of our linear layers (Glorot and Bengio 2010).
        outputs = len(weights[names[1]])
        bound = math.sqrt(6 / (contexts + outputs))
        kinds = ("scale", "shift") if model.norms else ("shift",)
        drawn = {kind: torch.empty(outputs, contexts).uniform_(-bound, bound, generator=generator) for kind in kinds}
        return weights | prefixed(WEIGHTS, drawn)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        tasks = support.x.shape[0]
        start = model.start(without(WEIGHTS, params), tasks)
        modulated = per_task({name: params[name] for name in names}, tasks)
        by_context = per_task(part(WEIGHTS, params), tasks)

        def in_context(phi: Tensor) -> Params:
            """The parameters under a context [t, contexts], which changes two of them [t, outputs]."""
            change = {kind: (weight @ phi.unsqueeze(2)).squeeze(2) for kind, weight in by_context.items()}
            first, second = names
            if "scale" not in change:
                return model.replaced(start, {second: modulated[second] + change["shift"]})
            gamma = 1 + change["scale"]
            film = {first: gamma * modulated[first], second: gamma * modulated[second] + change["shift"]}
            return model.replaced(start, film)

        def loss(context: Params, step: int) -> Tensor:
            return model.metrics(in_context(context["phi"]), support, twice=order == 2)["loss"]

        zero = support.x.new_zeros(tasks, contexts, requires_grad=order > 0)
        contexts_of = descent(
            loss, {"phi": zero}, optimizer=inner, rate=inner_lr, steps=steps, order=order, checkpoint=checkpoint_steps
        )
        for context in contexts_of:
            yield in_context(context["phi"])

    order = 1 if first_order else 2
    return gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order, init=init)


def _layer(model: Model, layer: int) -> tuple[str, str]:
    """The names of the scale and shift of a norm, or of the weight and bias of a linear layer."""
    if model.norms:
        layers = list(zip(model.norms[::2], model.norms[1::2], strict=True))
    else:
        layers = [(stage.params[0], stage.params[1]) for stage in model.stages if len(stage.params) == 2]
    if layer > len(layers):
        what = "batch norms" if model.norms else "linear layers"
        advice = f"type algorithm.layer={len(layers)} or less" if layers else "type model=conv4 or model=mlp"
        raise Invalid("layer", layer, f"this model has {len(layers)} {what} that can take a context", advice)
    return layers[layer - 1]
