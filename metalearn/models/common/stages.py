"""A network as a sequence of stages; the last stage is its head."""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from metalearn.nn.layers import Layer, Linear, apply_layers, parameters_of
from metalearn.nn.network import CompiledNetwork, is_packed
from metalearn.types import Apply, Model, Params, Stage


def stage_of(name: str, *layers: Layer) -> Stage:
    """A stage made of layers."""

    def apply(params: Params, x: Tensor, support_size: int) -> Tensor:
        return apply_layers(layers, params, x, support_size)

    return Stage(name, tuple(parameters_of(layers)), apply, layers)


HEAD = stage_of("head", Linear("head.weight", "head.bias"))  # a linear head for features [t, n, d]


def draw_head(ways: int, features: int, generator: Generator) -> Params:
    """The parameters of `HEAD`."""
    weight = torch.empty(ways, features).normal_(0, 0.01, generator=generator)
    return {"head.weight": weight, "head.bias": torch.zeros(ways)}


def one_after_the_other(stages: Sequence[Stage], *, ignores_support: bool) -> Apply:
    """Applies the stages in sequence. The support set's statistics normalise, unless the stages ignore them."""

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        support_size = 0 if ignores_support or support_x is None else support_x.shape[1]
        h = torch.cat([support_x, x], dim=1) if support_size and support_x is not None else x
        for stage in stages:
            h = stage.apply(params, h, support_size)
        return h[:, support_size:]

    return apply


def staged_model(
    init: Callable[[Generator], Params], stages: Sequence[Stage], *, transductive: bool, activations: int,
    norms: Sequence[str] = (),
) -> Model:  # fmt: skip
    """A model of stages; the last stage is the head, a linear layer.

    Args:
        init: draws the parameters.
        stages: from inputs to outputs; the last but one gives features [t, n, d].
        transductive: normalise a batch by its own statistics, not by the support set's.
        activations: as in `Model`.
        norms: as in `Model`.
    """
    alone = transductive or not norms
    apply = one_after_the_other(stages, ignores_support=alone)
    body = one_after_the_other(stages[:-1], ignores_support=alone)

    def features(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return body(params, x, support_x).flatten(2)

    model = Model(
        init, apply, transductive, activations, tuple(stages), features=features, head=stages[-1], norms=tuple(norms)
    )
    if not all(stage.layers for stage in stages):
        return model

    def compiled(stages: Sequence[Stage]) -> CompiledNetwork:
        return CompiledNetwork([layer for stage in stages for layer in stage.layers], ignores_support=alone)

    network = compiled(stages)

    def packed(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return (network.outputs if is_packed(params) else apply)(params, x, support_x)

    return model._replace(apply=packed, network=network, body=compiled(stages[:-1]) if len(stages) > 1 else None)
