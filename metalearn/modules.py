"""A network written as an `nn.Module`, as pure functions: its weights come from outside, for every task its own."""

import threading
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from metalearn.functional import one_after_the_other
from metalearn.nn import batch_norm, conv2d
from metalearn.types import Model, Params, Stage

Make = Callable[[], nn.Module]
"""A fresh network, its weights drawn from torch's global random numbers."""


def model_of(make: Make, *, name: str, image_size: int, transductive: bool) -> Model:
    """A network that takes images [n, 3, h, w] and gives [n, ways], as a model; parameters bear the module's names.

    Convolutions and batch norms are computed by our layers where these can; `remark` says how many cannot. Batch
    norm keeps no running statistics: a batch is normalised by its own, or by its support set's, and in either case
    one differentiates through them. Dropout and stochastic depth are off, so that equal inputs give equal outputs
    on every worker. Tasks are computed in turn. It cannot be cut into stages.

    Args:
        make: gives a fresh network.
        name: what to call it in errors.
        image_size: height and width of an image, in pixels.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.

    Raises:
        ValueError: images that the network cannot take, or a layer that remembers batches.
    """
    network = _fresh(make, seed=0)
    remark = _make_pure(network, name)
    buffers = dict(network.named_buffers())
    network.to("meta")  # its weights always come from outside
    names = [parameter for parameter, _ in network.named_parameters()]
    norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    busy = threading.Lock()  # `functional_call` puts the weights into the module while it runs

    def init(generator: Generator) -> Params:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        return {parameter: value.detach() for parameter, value in _fresh(make, seed).named_parameters()}

    def forward(params: Params, x: Tensor, known: int) -> Tensor:
        images = x.expand(-1, -1, 3, -1, -1)
        fixed = {key: b.to(x.device, x.dtype if b.is_floating_point() else b.dtype) for key, b in buffers.items()}
        weights = zip(*(params[parameter].unbind() for parameter in names), strict=True)
        # The fused kernels of attention have no second derivative.
        with busy, sdpa_kernel(SDPBackend.MATH):
            for norm in norms:
                norm.known = known
            return torch.stack([
                functional_call(network, fixed | dict(zip(names, of_task, strict=True)), (images_of_task,))
                for of_task, images_of_task in zip(weights, images, strict=True)
            ])  # fmt: skip

    activations = _tried(network, name, image_size)
    apply = one_after_the_other((Stage(name, tuple(names), forward),), ignores_support=transductive)
    return Model(init, apply, transductive, activations, remark=remark)


class _Conv(nn.Module):
    """In a convolution's place: ours, whose second derivative is fast."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.padding = layer.stride[0], cast(tuple[int, int], layer.padding)[0]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        images = x.permute(0, 2, 3, 1).unsqueeze(0)
        y = conv2d(images, self.weight.unsqueeze(0), stride=self.stride, padding=self.padding)[0]
        return (y if self.bias is None else y + self.bias).permute(0, 3, 1, 2)


class _BatchNorm(nn.Module):
    """In a batch norm layer's place: normalises by the statistics of the first `known` samples, 0 meaning all."""

    known = 0

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x
        images, known = x.permute(0, 2, 3, 1).unsqueeze(0), self.known or None
        scale, shift = self.weight.unsqueeze(0), self.bias.unsqueeze(0)
        y = batch_norm(images, scale, shift, statistics_of=known, epsilon=self.eps)
        return y[0].permute(0, 3, 1, 2)


class _HardSigmoid(nn.Module):
    """In the place of torch's own, which has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


def _ours(layer: nn.Conv2d) -> bool:
    """Whether our convolution can do it."""
    same = layer.stride[0] == layer.stride[1] and layer.padding[0] == layer.padding[1]
    return (
        same
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _fresh(make: Make, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`; torch's global random numbers go on as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def _make_pure(network: nn.Module, name: str) -> str:
    """Changes, in place, what is random, overwrites its input, remembers batches or has one derivative only; and has
    our layers compute what they can. Returns what the user should know of the rest."""
    network.eval()
    theirs = []
    convolutions = 0
    for path, layer in list(network.named_modules()):
        if hasattr(layer, "inplace"):
            layer.inplace = False
        if isinstance(layer, nn.BatchNorm2d):
            _check_norm(path, layer, name)
            network.set_submodule(path, _BatchNorm(layer))
        elif isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            raise ValueError(
                f"{name}: its layer {path} ({type(layer).__name__}) remembers batches, which a pure function cannot; "
                "give it track_running_stats=False, or take nn.BatchNorm2d or nn.GroupNorm"
            )
        if isinstance(layer, nn.Hardsigmoid):
            network.set_submodule(path, _HardSigmoid())
        if isinstance(layer, nn.Conv2d):
            convolutions += 1
            if _ours(layer):
                network.set_submodule(path, _Conv(layer))
            else:
                theirs.append(path)
    if not theirs:
        return ""
    return (
        f"{name}: {len(theirs)} of {convolutions} convolutions are computed by torch, whose second derivative is slow, "
        f"for their groups, dilation or padding: {', '.join(theirs[:3])}{', …' if len(theirs) > 3 else ''}"
    )


def _check_norm(path: str, layer: nn.BatchNorm2d, name: str) -> None:
    if layer.weight is None:
        raise ValueError(f"{name}: its layer {path} has no scale and shift; give it affine=True")


def _tried(network: nn.Module, name: str, image_size: int) -> int:
    """The floats that one image leaves behind in the layers of a network on the meta device.

    Raises:
        ValueError: it cannot take images of that size.
    """
    images = torch.zeros(2, 3, image_size, image_size, device="meta")
    floats = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal floats
        floats += output.numel() // len(images)

    leaves = [layer for layer in network.modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(count) for layer in leaves]
    try:
        with torch.no_grad():
            network(images)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"image_size={image_size}: {name} cannot take such images ({str(error).splitlines()[0]}); "
            "type dataset.image_size=224, which all of torchvision's classifiers take"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return floats
