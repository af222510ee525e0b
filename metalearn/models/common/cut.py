"""Cuts a network in two: its last layers, which learn, and what comes before them."""

import torch
from torch import Tensor, fx, nn

from metalearn.checks import first_line
from metalearn.nn.precision import computing_with

_SHARE = 0.25
"""Of the weights, at least so many are in the last layers."""


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
