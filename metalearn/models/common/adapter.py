"""An `nn.Module` as pure functions: its weights come from outside, and each task has its own."""

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from metalearn.models.common.stages import one_after_the_other
from metalearn.nn import batch_norm, conv2d
from metalearn.types import STATE, Apply, Model, Params, Stage

Make = Callable[[], nn.Module]
"""A fresh network, its weights drawn from torch's global random numbers."""


def model_of(make: Make, *, name: str, shape: tuple[int, ...], transductive: bool, advice: str) -> Model:
    """A network that takes inputs [n, *shape] and gives [n, ways], as a model. The parameters have the names of the
    module.

    Our layers compute convolutions and batch norms, where they can; `Model.note` names the others. Batch norm keeps no
    running statistics: it normalises by those of the batch or of the support set, and derivatives go through them.
    Dropout and stochastic depth are off, so that equal inputs give equal outputs on every worker. Tasks are computed
    one after the other. The model has no stages. If an `nn.Linear` gives the outputs, it is the head.

    Args:
        make: gives a fresh network.
        name: the name of the network in errors.
        shape: the shape of an input, for images (channels, h, w); an image of one channel is repeated.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.
        advice: what to type if the network cannot take such inputs.

    Raises:
        ValueError: the network cannot take such inputs, its outputs are not [n, ways], they do not depend on one of
            its parameters, one of its layers remembers batches, or equal images give other outputs the second time.
    """
    network = _fresh(make, seed=0).float()
    note = _make_pure(network, name, transductive)
    _check_buffers(network, make, name)
    activations, last = _tried(network, name, shape, advice)
    images = torch.rand(2, *shape, generator=Generator())
    _check_pure(network, name, images)
    shared = _names(network)
    head = _find_head(network, last, shared, images)
    norms = {path: layer for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    forward = _forward(network, shape, shared, head, list(norms.values()))

    def init(generator: Generator) -> Params:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        return {parameter: value.detach() for parameter, value in _fresh(make, seed).named_parameters()}

    def whole(forward: Callable[[Params, Tensor, int], Tensor]) -> Apply:
        stage = Stage(name, tuple(dict.fromkeys(shared.values())), forward)
        return one_after_the_other((stage,), ignores_support=transductive)

    scales = [shared[f"{path}.{parameter}"] for path in norms for parameter in ("weight", "bias")]
    model = Model(init, whole(forward), transductive, activations, note=note, norms=tuple(dict.fromkeys(scales)))
    if head is None:
        return model
    return model._replace(features=whole(partial(forward, features=True)), head=head.stage)


def floats_of(network: nn.Module, *, name: str, shape: tuple[int, ...], advice: str) -> int:
    """The floats that a forward pass of a network leaves for one input. The arguments are as for `model_of`.

    Raises:
        ValueError: as `model_of`.
    """
    return _tried(network.eval(), name, shape, advice)[0]


class _Conv(nn.Conv2d):
    """A convolution by our own layer, whose second derivative is fast."""

    def forward(self, x: Tensor) -> Tensor:
        stride, padding = self.stride[0], cast(tuple[int, int], self.padding)[0]
        if x.is_meta:
            return F.conv2d(x, self.weight, self.bias, stride, padding)
        y = conv2d(x.permute(0, 2, 3, 1).unsqueeze(0), self.weight.unsqueeze(0), stride=stride, padding=padding)[0]
        return (y if self.bias is None else y + self.bias).permute(0, 3, 1, 2)


class _BatchNorm(nn.BatchNorm2d):
    """A batch norm by the statistics of the first `known` samples; 0 means all."""

    known: int

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)
        images, known = x.permute(0, 2, 3, 1).unsqueeze(0), self.known or None
        scale, shift = self.weight.unsqueeze(0), self.bias.unsqueeze(0)
        y = batch_norm(images, scale, shift, statistics_of=known, epsilon=self.eps)
        return y[0].permute(0, 3, 1, 2)


class _HeadLayer(nn.Linear):
    """The last layer. If `passes` is true, it returns its input."""

    passes: bool

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else super().forward(x)


class _Head(NamedTuple):
    """The head of a network: the layer, and the stage that computes it with the weights of every task."""

    layer: _HeadLayer
    stage: Stage


class _HardSigmoid(nn.Hardsigmoid):
    """Computed without torch's own function, which has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


def _forward(
    network: nn.Module, shape: Sequence[int], shared: Mapping[str, str], head: _Head | None, norms: Sequence[_BatchNorm]
) -> Callable[..., Tensor]:
    """`forward(params, x, known, features=False)` of the network with weights from outside; it loses its own."""
    names = list(dict.fromkeys(shared.values()))
    buffers = dict(network.named_buffers())
    network.to("meta")
    busy = threading.Lock()  # `functional_call` puts the weights into the module while it runs

    def forward(params: Params, x: Tensor, known: int, *, features: bool = False) -> Tensor:
        images = x.expand(-1, -1, shape[0], *(-1 for _ in shape[1:]))
        fixed = {key: b.to(x.device, x.dtype if b.is_floating_point() else b.dtype) for key, b in buffers.items()}
        used = [name for name in names if not (features and head is not None and name in head.stage.params)]
        weights = list(zip(*(params[parameter].unbind() for parameter in used), strict=True)) or [()] * len(images)
        # The fused kernels of attention have no second derivative.
        with busy, sdpa_kernel(SDPBackend.MATH):
            for norm in norms:
                norm.known = known
            if head is not None:
                head.layer.passes = features
            outputs = []
            for of_task, images_of_task in zip(weights, images, strict=True):
                by_name = dict(zip(used, of_task, strict=True))
                everywhere = {path: by_name[parameter] for path, parameter in shared.items() if parameter in by_name}
                outputs.append(functional_call(network, fixed | everywhere, (images_of_task,), tie_weights=False))
            return torch.stack(outputs)

    return forward


def _fresh(make: Make, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`. The state of torch's global random numbers is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def _names(network: nn.Module) -> dict[str, str]:
    """For every path to a parameter, the first path to the same parameter."""
    first = {id(parameter): path for path, parameter in network.named_parameters()}
    return {path: first[id(p)] for path, p in network.named_parameters(remove_duplicate=False)}


def _find_head(network: nn.Module, path: str | None, shared: Mapping[str, str], images: Tensor) -> _Head | None:
    """The head, if the layer at `path` is one. It is not if the network uses it twice, changes its outputs in place, or
    uses its weights elsewhere."""
    layer = None if path is None else network.get_submodule(path)
    if layer is None or not _is(layer, nn.Linear):
        return None
    names = tuple(f"{path}.{parameter}".lstrip(".") for parameter, _ in layer.named_parameters())
    if any(list(shared.values()).count(shared[name]) > 1 for name in names):
        return None
    linear: Any = layer
    linear.__class__, linear.passes = _HeadLayer, False
    if not _separable(network, linear, images):
        linear.__class__ = nn.Linear
        return None

    def apply(params: Params, features: Tensor, known: int) -> Tensor:
        logits = features @ params[names[0]].transpose(1, 2)
        return logits if len(names) == 1 else logits + params[names[1]].unsqueeze(1)

    return _Head(linear, Stage("head", names, apply))


def _separable(network: nn.Module, head: _HeadLayer, images: Tensor) -> bool:
    """Whether the head's outputs are the network's, and nothing else depends on the head's weights."""
    weights = [parameter.detach().clone() for parameter in head.parameters()]
    with torch.no_grad():
        outputs = network(images)
        head.passes = True
        try:
            for parameter in head.parameters():
                parameter.fill_(math.nan)
            features = network(images)
        finally:
            head.passes = False
            for parameter, weight in zip(head.parameters(), weights, strict=True):
                parameter.copy_(weight)
        return features.dim() == 2 and torch.allclose(head(features), outputs, rtol=1e-4, atol=1e-5)


def _make_pure(network: nn.Module, name: str, transductive: bool) -> str:
    """Changes layers in place, so that none is random, overwrites its input, remembers batches or has one derivative
    only. Gives convolutions and batch norms the class of our layers, if these can compute them. Returns `Model.note`,
    which names the other convolutions."""
    network.eval()
    by_torch, convolutions = [], 0
    for path, layer in network.named_modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
        if _is(layer, nn.Hardsigmoid):
            layer.__class__ = _HardSigmoid
        if _is(layer, nn.BatchNorm2d) and layer.affine:
            layer.__class__, layer.known = _BatchNorm, 0
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        elif isinstance(layer, nn.modules.batchnorm._NormBase):
            _check_norm(path, layer, name, transductive)
        if isinstance(layer, nn.Conv2d):
            convolutions += 1
            if _ours(layer):
                layer.__class__ = _Conv
            else:
                by_torch.append(path)
    if not by_torch:
        return ""
    return (
        f"{name}: {len(by_torch)} of {convolutions} convolutions are computed by torch, whose second derivative is "
        f"slow, for their groups, dilation, padding or class: "
        f"{', '.join(by_torch[:3])}{', …' if len(by_torch) > 3 else ''}"
    )


def _is(layer: Any, kind: type[nn.Module]) -> bool:
    """Whether the layer is of exactly this class, and has no hooks."""
    return type(layer) is kind and not layer._forward_hooks and not layer._forward_pre_hooks


def _ours(layer: nn.Conv2d) -> bool:
    """Whether our convolution can compute it."""
    return (
        _is(layer, nn.Conv2d)
        and not isinstance(layer.padding, str)
        and layer.stride[0] == layer.stride[1]
        and layer.padding[0] == layer.padding[1]
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
    )


def _check_norm(path: str, layer: Any, name: str, transductive: bool) -> None:
    """Raises ValueError for a norm, not ours, that mixes batches, or mixes samples that must not see each other."""
    what = f"{name}: its layer {path} ({type(layer).__name__})"
    if layer.track_running_stats:
        raise ValueError(
            f"{what} remembers batches, which a pure function cannot; give it track_running_stats=False, or take "
            "nn.BatchNorm2d or nn.GroupNorm"
        )
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not transductive:
        raise ValueError(
            f"{what} normalises queries by each other; type transductive=true, or take nn.BatchNorm2d or nn.GroupNorm"
        )


def _check_buffers(network: nn.Module, make: Make, name: str) -> None:
    """Raises ValueError for a buffer that is not the same for every seed. Only parameters are kept in a checkpoint."""
    kept = dict(network.named_buffers())
    others = dict(_fresh(make, seed=1).named_buffers()) if kept else {}
    for path, buffer in kept.items():
        if not torch.equal(buffer, others[path].to(buffer.dtype)):
            raise ValueError(
                f"{name}: its buffer {path} is drawn at random, and only parameters are drawn by the seed of a run and "
                "saved; make it a parameter, or draw it by a torch.Generator with a seed of its own"
            )


def _check_pure(network: nn.Module, name: str, images: Tensor) -> None:
    """Raises ValueError if equal images give other outputs the second time."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        once, again = (network(images) for _ in range(2))
    if not torch.allclose(once, again, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"{name}: gives other outputs for the same images the second time, and must be a pure function; write "
            "nn.Dropout, which is turned off, in place of F.dropout, and change no buffer in forward"
        )


def _tried(network: nn.Module, name: str, shape: tuple[int, ...], advice: str) -> tuple[int, str | None]:
    """The number of floats that one input leaves in the layers of the network, and the path of the layer that gives the
    outputs. The trial runs on the meta device, which computes nothing. If that fails, it runs on the CPU.

    Raises:
        ValueError: the network cannot take such inputs, does not give [n, ways], or has a parameter that is not used.
    """
    failures = (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError, AttributeError)
    try:
        return _counted(copy.deepcopy(network).to("meta"), name, torch.zeros(2, *shape, device="meta"))
    except failures:
        try:
            return _counted(network, name, torch.zeros(2, *shape))
        except failures as error:
            if str(error).startswith(f"{name}: "):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            what = (
                f"image_size={shape[1]}: {name} cannot take images" if len(shape) == 3 else f"{name} cannot take inputs"
            )
            raise ValueError(f"{what} [n, {', '.join(map(str, shape))}] ({reason}); {advice}") from error


def _counted(network: nn.Module, name: str, images: Tensor) -> tuple[int, str | None]:
    floats = 0
    outputs: dict[str, Any] = {}

    def count(path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        nonlocal floats
        outputs[path] = output
        floats += sum(leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)) // len(images)

    leaves = [(path, layer) for path, layer in network.named_modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(partial(count, path)) for path, layer in leaves]
    try:
        output = network(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(images):
        given = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(f"{name}: gives {given} for {len(images)} images, and must give a tensor [n, ways]")
    parameters = dict(network.named_parameters())
    frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"{name}: its parameter {frozen[0]} is frozen; make it a buffer (register_buffer)")
    state = [path for path in parameters if path.startswith(STATE)]
    if state:
        raise ValueError(
            f"{name}: its parameter {state[0]} has a name that is kept for the state of learners, {STATE}…; give that "
            "layer another name"
        )
    if not parameters:
        raise ValueError(f"{name}: has no parameters, so there is nothing to learn")
    grads = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
    unused = [path for path, grad in zip(parameters, grads, strict=True) if grad is None]
    if unused:
        raise ValueError(f"{name}: its parameter {unused[0]} has no part in the outputs; leave it out")
    return max(floats, output.shape[1]), next((path for path, value in outputs.items() if value is output), None)
