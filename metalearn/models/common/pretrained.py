"""Pretrained weights: how they are read, and the pictures that they expect; and networks whose weights are fixed.

A fixed network only gives features, and a head learns from them. Or all but its last layers are fixed, and these learn,
too, in the inner loop and outside. It runs in eval mode, so batch norm uses the statistics that came with the weights.
All tasks of a chunk go through it together, without a graph. What is learned is the head, and one factor for each
feature, which starts at 1: learners without a head, such as prototypical networks, adjust their metric by it.
"""

import copy
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Generator, Tensor, fx, nn
from torch.func import functional_call

from metalearn.errors import Invalid, first_line
from metalearn.models.common.stages import HEAD, draw_head, staged_model
from metalearn.nn.attention import second_order_attention
from metalearn.nn.surroundings import computing_with, constant
from metalearn.saved.form import digest_of
from metalearn.types import Model, Params, Stage

# The networks that take pretrained weights, and the name of the last linear layer of each.
HEADS = {
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_large": "classifier.3",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet18": "fc",
    "resnet34": "fc",
    "resnet50": "fc",
    "resnet101": "fc",
    "swin_t": "head",
    "vit_b_16": "heads.head",
}

_NAME = re.compile(r"(\w+_Weights)\.(\w+)")  # torchvision's names of weights, such as ResNet18_Weights.IMAGENET1K_V1
NAMED, LICENCE = "weights", "licence"  # entries of a safetensors file's header: _NAME of its weights, and their licence

# Names of layers in torchvision's published file of densenet121, which its function for that file changes so.
_FORMER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")
_INSIDE = ("state_dict", "model_state_dict", "model")  # entries of training checkpoints that hold a state dict
_WRAPPERS = ("module.", "_orig_mod.", "model.")  # what DataParallel, torch.compile and Lightning put before the names
UNUSED = "num_batches_tracked"  # the buffer of a batch norm that its outputs do not depend on; not every file has it
_LARGEST_SIZE = 224  # height and width that torchvision's networks are made for, in pixels

Prepare = Callable[[Tensor], Tensor]


def pretrained(name: str, weights: str, input_size: int | None) -> tuple[dict[str, Tensor], Prepare, str]:
    """Pretrained weights, checked against the network. Raises ValueError if there are no such weights, they cannot be
    read or downloaded, or belong to another network.

    Gives the weights of the network without its head, by name; a function from pictures [n, 1 or 3, h, w] in [0, 1] to
    the inputs that the network was trained on; and a line for the log.

    Args:
        name: a key of `HEADS`.
        weights: the path of a state dict, saved by torch.save or safetensors; or torchvision's name of weights, which
            are downloaded unless torch's own cache has them.
        input_size: height and width to which pictures are scaled; None: those that the weights were trained with.
    """
    from torchvision import models  # takes a second

    published = models.get_model_weights(name)
    # Some weights of vit_b_16 are for larger pictures than its network takes.
    small = [one for one in published if max(one.meta.get("min_size", (1, 1))) <= _LARGEST_SIZE]
    members = {f"{published.__name__}.{one.name}": one for one in small}
    if weights in members:
        enum, note = members[weights], f"{name}: weights {weights} of torchvision"
        try:
            state = enum.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:  # no connection, or a file that is damaged
            advice = "bring the file to this disk and type KEY=/path/to/file"
            raise _invalid(weights, f"cannot be downloaded ({error})", advice) from error
    elif _NAME.fullmatch(weights):
        advice = f"type one of {', '.join(members)}, or weights=/path"
        raise _invalid(weights, f"are not those of name={name}", advice)
    else:
        state, unpacked = read_state(weights)
        enum = members.get(meant_as(weights), published.DEFAULT)
        note = f"{name}: weights of {weights}{unpacked}, SHA-256 {digest_of(Path(weights))[:12]}…"
    transforms = enum.transforms()
    size, head = input_size or transforms.crop_size[0], f"{HEADS[name]}."
    prepare = preparing(size, tuple(transforms.mean), tuple(transforms.std), transforms.interpolation.value)
    with torch.device("meta"):
        network = models.get_model(name, weights=None)
    load_whole(network, state, weights, name, f"type the name=… of their network, one of {', '.join(HEADS)}", (head,))
    whole = network.state_dict().items()
    body = {key: value for key, value in whole if not (key.startswith(head) or key.endswith(UNUSED))}
    return body, prepare, note


def meant_as(weights: str) -> str:
    """torchvision's name of weights, which asks for its own preparation of pictures: as it was typed, or as the header
    of a safetensors file has it; else empty."""
    name = header_of(weights).get(NAMED, weights)
    return name if _NAME.fullmatch(name) else ""


def header_of(weights: str) -> dict[str, str]:
    """The notes in the header of a safetensors file; of other files, none."""
    if not weights.endswith(".safetensors"):
        return {}
    with safe_open(weights, "pt") as file:
        return dict(file.metadata() or {})


def cut_head(network: nn.Module, name: str) -> int:
    """Cuts the head off the network called `name`, which then gives its inputs: the features; returns their number."""
    parent, _, last = HEADS[name].rpartition(".")
    head = network.get_submodule(HEADS[name])
    assert isinstance(head, nn.Linear)
    setattr(network.get_submodule(parent), last, nn.Identity())
    return head.in_features


def load_whole(
    network: nn.Module, state: Mapping[str, Tensor], weights: str, name: str,
    advice: str = "type the name of their network", but: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Copies all weights of a network, but those whose names begin so; a network on the meta device takes over the
    tensors. Raises ValueError, with this advice, if they are those of another network."""
    body = {_FORMER.sub(r"\1\2.", key): value for key, value in state.items() if not key.startswith(but)}
    try:
        assign = next(network.parameters()).is_meta
        missing, unexpected = network.load_state_dict(body, strict=False, assign=assign)
        wrong = [f"{key} is missing" for key in missing if not key.startswith(but)]
        wrong += [f"{key} is of no layer" for key in unexpected]
    except RuntimeError as error:  # a line for each wrong shape
        wrong = [line.strip() for line in str(error).splitlines()[1:]] or [first_line(error)]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _invalid(weights, f"are not those of {name}: {', '.join(wrong[:3])}{more}", advice)


def read_state(path: str) -> tuple[dict[str, Tensor], str]:
    """The state dict in a file of torch.save or safetensors, or in a checkpoint there, of a network in a wrapper; and a
    note on what was unpacked. Nothing in the file is run. Raises ValueError for a file that is not there, or has
    something else."""
    if not Path(path).is_file():
        advice = "or a name of torchvision's such as weights=ResNet18_Weights.IMAGENET1K_V1"
        raise _invalid(path, "there is no such file", f"type the path of a state dict, {advice}")
    state: Any
    try:
        if path.endswith(".safetensors"):
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise many types for what they cannot read
        reason = first_line(error).partition(". ")[0]
        advice = "type the path of a state dict that torch.save or safetensors has saved"
        raise _invalid(path, f"cannot be read ({reason})", advice) from error
    words = ""
    for name in _INSIDE:
        if not _is_state(state) and isinstance(state, dict) and _is_state(state.get(name)):
            state, words = state[name], f", entry {name}"
    if not _is_state(state):
        advice = f"save network.state_dict(), as the whole file or as its entry {' or '.join(_INSIDE)}"
        raise _invalid(path, "is no state dict: names with tensors", advice)
    while prefix := next((before for before in _WRAPPERS if all(name.startswith(before) for name in state)), ""):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
        words += f", without the prefix {prefix}"
    return dict(state), words


def _is_state(content: object) -> bool:
    pairs = content.items() if isinstance(content, dict) else ()
    return bool(pairs) and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs)


def _invalid(weights: str, allowed: str, advice: str) -> Invalid:
    return Invalid("weights", weights, allowed, advice, quoted=False)


def preparing(size: int, mean: Sequence[float], std: Sequence[float], mode: str) -> Prepare:
    """A function from pictures [n, 1 or 3, h, w] in [0, 1] to pictures [n, 3, size, size], normalised by the mean and
    deviation of each colour."""
    colours = [constant(torch.tensor(values, dtype=torch.float64).view(3, 1, 1)) for values in (mean, std)]

    def prepare(x: Tensor) -> Tensor:
        pictures = x.expand(-1, 3, -1, -1)
        if pictures.shape[2:] != (size, size):
            pictures = F.interpolate(pictures, size=(size, size), mode=mode, align_corners=False, antialias=True)
        centre, scale = (values(x.device, x.dtype) for values in colours)
        return (pictures - centre) / scale

    return prepare


SCALE = "features.scale"  # the learned factor of each feature
_SHARE = 0.25  # the part of the weights that the last layers of `cut` have, at least


def frozen_model(
    body: nn.Module, *, prepare: Prepare, ways: int, width: int, activations: int, last: fx.GraphModule | None = None
) -> Model:
    """Features of a fixed network, and a linear head for `ways` classes.

    `prepare` makes of pictures [n, c, h, w] what the network takes. `body` gives features [n, width], or what `last`
    takes, the layers that learn and give them. `activations` is as in `Model`.
    """
    copies: dict[tuple[torch.device, torch.dtype], nn.ModuleList] = {}
    making, busy = threading.Lock(), threading.Lock()
    for part in (body, last or nn.Identity()):
        part.eval().requires_grad_(False)  # of the last layers, copies learn
    learning = {} if last is None else {name: value.detach().clone() for name, value in last.named_parameters()}

    def on(x: Tensor) -> nn.ModuleList:
        """The networks on the device and in the type of their inputs."""
        with making:
            key = (x.device, x.dtype)
            if key not in copies:
                copies[key] = nn.ModuleList(copy.deepcopy(part).to(*key) for part in (body, last or nn.Identity()))
            return copies[key]

    def fixed(x: Tensor) -> Tensor:
        with torch.no_grad():
            of_all: Tensor = on(x)[0](prepare(x.flatten(0, 1)))
        of_tasks: Tensor = of_all.unflatten(0, x.shape[:2])
        return of_tasks

    def scaled(params: Params, x: Tensor, support_size: int) -> Tensor:
        return fixed(x) * params[SCALE].unsqueeze(1)

    def learned(params: Params, x: Tensor, support_size: int) -> Tensor:
        layers = on(x)[1]
        weights = zip(*(params[name].unbind() for name in learning), strict=True)
        # `functional_call` puts the weights into the module while it runs.
        with busy, second_order_attention():
            # Clones, since layers may work in place.
            of_tasks = [
                functional_call(layers, dict(zip(learning, of_task, strict=True)), (maps.clone(),))
                for of_task, maps in zip(weights, fixed(x), strict=True)
            ]
        return torch.stack(of_tasks)

    def init(generator: Generator) -> Params:
        first = {name: value.clone() for name, value in learning.items()} or {SCALE: torch.ones(width)}
        return first | draw_head(ways, width, generator)

    features = Stage("features", tuple(learning), learned) if learning else Stage("features", (SCALE,), scaled)
    return staged_model(init, (features, HEAD), transductive=False, activations=activations)


# Where a network is cut: what comes before stays fixed, and its last layers learn


def cut(network: nn.Module, shape: tuple[int, int, int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A network from pictures [n, *shape] in two parts: from these to what the last layers take, and from there. The
    parameters have the names of the network. It must be in eval mode. Raises ValueError if torch cannot export it, or
    it has no place that all of its last layers depend on alone."""
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
    needed = _SHARE * sum(sizes[node.target] for node in weights)
    computed = [node for node in nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]
    node: fx.Node
    for node in reversed(computed):
        here = place[node]
        after = sum(sizes[weight.target] for weight in weights if first[weight] > here)
        if after >= needed and all(last[other] <= here for other in computed if place[other] < here):
            return node
    raise ValueError("no place lies between its first and its last layers")


def _parts(network: fx.GraphModule, at: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What the network computes up to a node, and from there."""
    graphs = fx.Graph(), fx.Graph()
    before, after = dict[fx.Node, fx.Node](), {at: graphs[1].placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        """A node of the second part. Numbers, which all derive from that of the pictures, are computed there again."""
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
