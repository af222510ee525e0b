"""A network whose weights are fixed: it only gives features, and a head learns from them.

It runs in eval mode, so batch norm uses the statistics that came with the weights. All tasks of a chunk go through it
together, without a graph. What is learned is the head, and one factor for each feature, which starts at 1: learners
without a head, such as prototypical networks, adjust their metric by it.
"""

import copy
import threading
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from metalearn.models.common.stages import HEAD, draw_head, staged_model
from metalearn.types import Model, Params, Stage

SCALE = "features.scale"
"""The learned factor of each feature."""


def frozen_model(
    body: nn.Module, *, prepare: Callable[[Tensor], Tensor], ways: int, width: int, activations: int
) -> Model:
    """Features of a fixed network, and a linear head.

    Args:
        body: takes what `prepare` gives, and gives features [n, width].
        prepare: makes of pictures [n, c, h, w] what the network takes.
        ways: outputs of the head.
        width: number of features.
        activations: as in `Model`.
    """
    copies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
    making = threading.Lock()
    body.eval().requires_grad_(False)

    def on(x: Tensor) -> nn.Module:
        """The network on the device and in the type of its inputs."""
        with making:
            key = (x.device, x.dtype)
            if key not in copies:
                copies[key] = copy.deepcopy(body).to(*key)
            return copies[key]

    def features(params: Params, x: Tensor, known: int) -> Tensor:
        with torch.no_grad():
            fixed: Tensor = on(x)(prepare(x.flatten(0, 1)))
            fixed = fixed.view(*x.shape[:2], width)
        return fixed * params[SCALE].unsqueeze(1)

    def init(generator: Generator) -> Params:
        return {SCALE: torch.ones(width)} | draw_head(ways, width, generator)

    stages = (Stage("features", (SCALE,), features), HEAD)
    return staged_model(init, stages, transductive=False, activations=activations)
