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

from metalearn.checks import first_line
from metalearn.models.common.stages import HEAD, draw_head, staged_model
from metalearn.nn.attention import second_order_attention
from metalearn.nn.precision import computing_with
from metalearn.types import Model, Params, Stage

SCALE = "features.scale"
"""The learned factor of each feature."""

_SHARE = 0.25
"""Of the weights, at least so many are in the last layers of `cut`."""


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


# Where a network is cut: what comes before stays fixed, and its last layers learn


def cut(network: nn.Module, shape: tuple[int, int, int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A network from pictures [n, *shape] in two parts: from these to what the last layers take, and from there. The
    parameters have the names of the network. It must be in eval mode.

    Raises:
        ValueError: torch cannot export it, or it has no place that all of its last layers depend on alone.
    """
    try:
        # torch.export asks a flag that torch cannot tell after a run in full precision; on a CPU it has no effect.
        with computing_with("tf32"), torch.no_grad():
            batch = ({0: torch.export.Dim("n", min=1)},)
            whole = torch.export.export(network, (torch.zeros(2, *shape),), dynamic_shapes=batch).module()
        assert isinstance(whole, fx.GraphModule)
        return _parts(whole, _place(whole))
    except Exception as error:  # torch raises many types for what it cannot export
        raise ValueError(first_line(error)) from error


def _place(network: fx.GraphModule) -> fx.Node:
    """The last node which all that follows depends on, and which leaves enough weights after it."""
    nodes = list(network.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    first = {node: min((place[user] for user in node.users), default=-1) for node in nodes}
    sizes = {name: value.numel() for name, value in network.named_parameters()}
    weights = [node for node in nodes if node.op == "get_attr" and node.target in sizes and node.users]
    wanted = _SHARE * sum(sizes[node.target] for node in weights)
    computed = [node for node in nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]
    node: fx.Node
    for node in reversed(computed):
        here = place[node]
        after = sum(sizes[weight.target] for weight in weights if first[weight] > here)
        if after >= wanted and all(last[other] <= here for other in computed if place[other] < here):
            return node
    raise ValueError("no place lies between its first and its last layers")


def _parts(network: fx.GraphModule, at: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What the network computes up to a node, and from there."""
    graphs = fx.Graph(), fx.Graph()
    before, after = dict[fx.Node, fx.Node](), {at: graphs[1].placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        """A node of the second part. Numbers, all of them made of that of the pictures, are computed there anew."""
        if node not in after:
            if node.target is torch.ops.aten.sym_size.int and node.args[0] not in after:
                after[node] = graphs[1].call_function(torch.ops.aten.sym_size.int, (after[at], 0))
            else:
                after[node] = graphs[1].node_copy(node, copied)
        return after[node]

    for node in network.graph.nodes:
        if node.op == "call_module":
            continue  # checks of the shape, which are for users of the whole program
        if node.op == "output":
            (outputs,) = node.args
            graphs[1].output(copied(outputs[0]))
        elif at in before:
            if node.op == "call_function":
                copied(node)
        else:
            before[node] = graphs[0].node_copy(node, lambda other: before[other])
    graphs[0].output(before[at])
    for graph in graphs:
        graph.eliminate_dead_code()
    first, second = (fx.GraphModule(network, graph) for graph in graphs)
    return first, second
