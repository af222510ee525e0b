"""A network as a sequence of stages, the last of which is its head."""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from metalearn.types import Apply, Model, Params, Stage


def one_after_the_other(stages: Sequence[Stage], *, ignores_support: bool) -> Apply:
    """The stages in sequence; normalised by the support set's statistics unless they ignore them."""

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        known = 0 if ignores_support or support_x is None else support_x.shape[1]
        h = torch.cat([support_x, x], dim=1) if known and support_x is not None else x
        for stage in stages:
            h = stage.apply(params, h, known)
        return h[:, known:]

    return apply


def staged_model(
    init: Callable[[Generator], Params],
    stages: Sequence[Stage],
    *,
    transductive: bool,
    activations: int,
    norms: Sequence[str] = (),
) -> Model:
    """A model of stages; the last one is the head, a linear layer.

    Args:
        init: draws the parameters.
        stages: from images to logits; the last but one gives features [t, n, d].
        transductive: normalise a batch by its own statistics, not by the support set's.
        activations: as in `Model`.
        norms: as in `Model`.
    """
    alone = transductive or not norms
    apply = one_after_the_other(stages, ignores_support=alone)
    features = one_after_the_other(stages[:-1], ignores_support=alone)
    return Model(
        init, apply, transductive, activations, tuple(stages), features=features, head=stages[-1], norms=tuple(norms)
    )
