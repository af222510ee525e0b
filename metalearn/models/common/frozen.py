"""A network whose weights are fixed: it only gives features, and a head learns from them. Or all but its last layers
are fixed, and these learn, too, in the inner loop and outside.

It runs in eval mode, so batch norm uses the statistics that came with the weights. All tasks of a chunk go through it
together, without a graph. What is learned is the head, and one factor for each feature, which starts at 1: learners
without a head, such as prototypical networks, adjust their metric by it.
"""

import copy
import threading
from collections.abc import Callable

import torch
from torch import Generator, Tensor, fx, nn
from torch.func import functional_call

from metalearn.models.common.stages import HEAD, draw_head, staged_model
from metalearn.nn.twice import second_order_attention
from metalearn.types import Model, Params, Stage

SCALE = "features.scale"
"""The learned factor of each feature."""


def frozen_model(
    body: nn.Module,
    *,
    prepare: Callable[[Tensor], Tensor],
    ways: int,
    width: int,
    activations: int,
    last: fx.GraphModule | None = None,
) -> Model:
    """Features of a fixed network, and a linear head.

    Args:
        body: takes what `prepare` gives, and gives features [n, width]; or what `last` takes.
        prepare: makes of pictures [n, c, h, w] what the network takes.
        ways: outputs of the head.
        width: number of features.
        activations: as in `Model`.
        last: the layers that learn, which give features [n, width].
    """
    copies: dict[tuple[torch.device, torch.dtype], nn.ModuleList] = {}
    making, busy = threading.Lock(), threading.Lock()
    for part in (body, last or nn.Identity()):
        part.eval().requires_grad_(False)  # of the last layers, copies learn
    own = {} if last is None else {name: value.detach().clone() for name, value in last.named_parameters()}

    def on(x: Tensor) -> nn.ModuleList:
        """The networks on the device and in the type of their inputs."""
        with making:
            key = (x.device, x.dtype)
            if key not in copies:
                copies[key] = nn.ModuleList(copy.deepcopy(part).to(*key) for part in (body, last or nn.Identity()))
            return copies[key]

    def fixed(x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = on(x)[0](prepare(x.flatten(0, 1)))
        of_tasks: Tensor = found.unflatten(0, x.shape[:2])
        return of_tasks

    def scaled(params: Params, x: Tensor, known: int) -> Tensor:
        return fixed(x) * params[SCALE].unsqueeze(1)

    def learned(params: Params, x: Tensor, known: int) -> Tensor:
        layers = on(x)[1]
        weights = zip(*(params[name].unbind() for name in own), strict=True)
        # `functional_call` puts the weights into the module while it runs.
        with busy, second_order_attention():
            # Clones, since layers may work in place.
            of_tasks = [
                functional_call(layers, dict(zip(own, of_task, strict=True)), (maps.clone(),))
                for of_task, maps in zip(weights, fixed(x), strict=True)
            ]
        return torch.stack(of_tasks)

    def init(generator: Generator) -> Params:
        first = {name: value.clone() for name, value in own.items()} if own else {SCALE: torch.ones(width)}
        return first | draw_head(ways, width, generator)

    features = Stage("features", tuple(own), learned) if own else Stage("features", (SCALE,), scaled)
    stages = (features, HEAD)
    return staged_model(init, stages, transductive=False, activations=activations)
