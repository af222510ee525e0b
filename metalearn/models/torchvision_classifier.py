"""Any classifier of torchvision by its name, as pure functions."""

import difflib
import threading

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from metalearn.checks import one_of, true_or_false, whole_number
from metalearn.functional import one_after_the_other
from metalearn.types import Model, Params, Stage


def torchvision_classifier(*, name: str, ways: int, channels: int, image_size: int, transductive: bool = True) -> Model:
    """A network of `torchvision.models` with fresh weights; parameters bear torchvision's own names.

    Batch norm keeps no running statistics: a batch is normalised by its own, or by its support set's, and in
    either case one differentiates through them. Dropout and stochastic depth are off, so that equal inputs
    give equal outputs on every worker; so are the auxiliary outputs of googlenet and inception_v3. Tasks are
    computed in turn. It cannot be cut into stages. The second derivative of a swin_v2 is not finite where it
    pads its maps, which it does unless `image_size` is a multiple of 256.

    Args:
        name: what torchvision calls it, for example `resnet18`.
        ways: outputs of the last layer.
        channels: channels of an image: 3, or 1, which is repeated three times.
        image_size: height and width of an image, in pixels.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.

    Raises:
        ValueError: a name that torchvision does not know, or images that the network cannot take.
    """
    for argument, value in (("ways", ways), ("channels", channels), ("image_size", image_size)):
        whole_number(argument, value, at_least=1)
    one_of("channels", channels, (3, 1))
    true_or_false("transductive", transductive)
    _check_name(name)
    network = _fresh(name, ways, seed=0)
    _make_pure(network)
    buffers = dict(network.named_buffers())
    network.to("meta")  # its weights always come from outside
    names = [parameter for parameter, _ in network.named_parameters()]
    norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    busy = threading.Lock()  # `functional_call` puts the weights into the module while it runs

    def init(generator: Generator) -> Params:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        return {parameter: value.detach() for parameter, value in _fresh(name, ways, seed).named_parameters()}

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
    return Model(init, apply, transductive, activations)


class _BatchNorm(nn.Module):
    """In a batch norm layer's place: normalises by the statistics of the first `known` samples, 0 meaning all."""

    known = 0

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        if not self.known:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        variance, mean = torch.var_mean(x[: self.known], dim=(0, 2, 3), correction=0, keepdim=True)
        scale = self.weight.view(1, -1, 1, 1) * torch.rsqrt(variance + self.eps)
        return (x - mean) * scale + self.bias.view(1, -1, 1, 1)


class _HardSigmoid(nn.Module):
    """In the place of torch's own, which has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


def _check_name(name: object) -> None:
    from torchvision import models  # takes a second

    known = models.list_models(module=models)
    if name not in known:
        nearest = difflib.get_close_matches(str(name), known, n=3, cutoff=0)
        raise ValueError(
            f"name={name!r}: torchvision has no such classifier; nearest are {', '.join(nearest)}; "
            f"type name={nearest[0]}"
        )


def _fresh(name: str, ways: int, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`; torch's global random numbers go on as if nothing had been."""
    from torchvision import models  # takes a second

    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network: nn.Module = models.get_model(name, weights=None, num_classes=ways, **options)
    return network


def _make_pure(network: nn.Module) -> None:
    """Changes, in place, what is random, overwrites its input, remembers batches or has one derivative only."""
    network.eval()
    for path, layer in list(network.named_modules()):
        if hasattr(layer, "inplace"):
            layer.inplace = False
        if isinstance(layer, nn.BatchNorm2d):
            network.set_submodule(path, _BatchNorm(layer))
        if isinstance(layer, nn.Hardsigmoid):
            network.set_submodule(path, _HardSigmoid())


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
