"""An `nn.Module` as pure functions: its weights come from outside, and each task has its own."""

import copy
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from metalearn.checks import first_line
from metalearn.errors import ConfigError, DataError
from metalearn.models.common.stages import one_after_the_other
from metalearn.nn.conv import conv2d
from metalearn.nn.inputs import (
    Inputs,
    Opened,
    as_reals,
    described,
    filled,
    of_reals,
    opened,
    said_of,
    shape_of,
)
from metalearn.nn.norm import batch_norm
from metalearn.nn.surroundings import constant, surroundings
from metalearn.nn.twice import second_order_attention
from metalearn.types import STATE, Apply, Model, Params, Stage

Make = Callable[[], nn.Module]
"""A fresh network, its weights drawn from torch's global random numbers."""


def model_of(
    make: Make,
    *,
    name: str,
    inputs: Inputs,
    transductive: bool,
    advice: str,
    dropout: bool = False,
    running_statistics: bool = False,
) -> Model:
    """A network that takes such inputs and gives [n, ways], as a model. The parameters have the names of the module.
    Those that do not require a gradient are fixed, see `Model.fixed`. A network that cannot take whole numbers gets
    real ones, and outputs of other dimensions, or several, are joined to [n, d]; `Model.note` says so.

    Our layers compute convolutions and batch norms, where they can; `Model.note` names the others. Batch norm keeps no
    running statistics: it normalises by those of the batch or of the support set, and derivatives go through them.
    Tasks are computed one after the other. The model has no stages. If an `nn.Linear` gives the outputs, it is the
    head.

    The network is in eval mode. With `dropout` it is in training mode where `metalearn.nn.surroundings` has seeds: each
    task's pass seeds torch's global random numbers, which are restored. If both modes compute the same, the network
    stays in eval mode.

    Args:
        make: gives a fresh network.
        name: the name of the network in errors.
        inputs: what an input is; `of_reals(shape)` for one tensor of real numbers, (channels, h, w) for images. An
            image of one channel is repeated.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.
        advice: what to type if the network cannot take such inputs.
        dropout: compute in training as in the network's training mode.
        running_statistics: batch norms normalise by the running statistics that the network came with, as constants.

    Raises:
        ValueError: the network cannot take such inputs, its outputs are not [n, ways], it has nothing to learn, one of
            its layers remembers batches, or equal inputs and seeds give other outputs the second time.
    """
    (network, compiled) = _eager(_drawn(make, seed=0))
    network = network.float()
    constant = _by_running_statistics(network) if running_statistics else []
    cautions = _unused_statistics(network, name)
    if compiled:
        cautions.append(f"{name}: is computed without torch.compile, whose functions have no second derivative")
    notes = _make_pure(network, name, transductive)
    if constant:
        notes.append(f"{name}: normalises by the running statistics that it came with: {_few(constant)}")
    inputs, said = _opened(network, name, inputs)
    _check_buffers(network, make, name)
    trial = _tried(network, name, inputs, advice)
    shape = shape_of(inputs)
    images = filled(inputs, torch.rand(2, *shape, generator=Generator()))
    outputs = _check_pure(network, name, images)
    trains = dropout and _differs_in_training(network, name, images, outputs)
    notes += said
    if trains:
        notes.append(f"{name}: dropout, or what else its training mode changes, is on in training and off in tests")
    if trial.unused:
        cautions.append(f"{name}: no output depends on {_few(trial.unused)}; only weight decay changes that")
    shared = _names(network)
    fixed = {path for path, parameter in network.named_parameters() if not parameter.requires_grad}
    if fixed:
        notes.append(f"{name}: {len(fixed)} of its {len(set(shared.values()))} parameters are fixed, and do not learn")
    head = _find_head(network, trial.last, shared, fixed, images)
    norms = {path: layer for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    forward = _forward(network, inputs, shared, fixed, head, list(norms.values()), trains)

    def drawn(generator: Generator, *, learn: bool) -> Params:
        made = _fresh(make, int(torch.randint(2**63 - 1, (), generator=generator)))
        return {path: value.detach() for path, value in made.named_parameters() if value.requires_grad == learn}

    def whole(forward: Callable[[Params, Tensor, int], Tensor]) -> Apply:
        stage = Stage(name, tuple(dict.fromkeys(path for path in shared.values() if path not in fixed)), forward)
        return one_after_the_other((stage,), ignores_support=transductive)

    affine = [path for path, layer in norms.items() if layer.affine]
    pairs = [[shared[f"{path}.{parameter}"] for parameter in ("weight", "bias")] for path in affine]
    model = Model(
        partial(drawn, learn=True), whole(forward), transductive, trial.floats, note="; ".join(notes),
        norms=tuple(dict.fromkeys(path for pair in pairs if not fixed.intersection(pair) for path in pair)),
        cautions=tuple(cautions), fixed=partial(drawn, learn=False) if fixed else None,
    )  # fmt: skip
    if head is None:
        return model
    return model._replace(features=whole(partial(forward, features=True)), head=head.stage)


def floats_of(network: nn.Module, *, name: str, shape: tuple[int, ...], advice: str) -> int:
    """The floats that a forward pass of a network leaves for one input of real numbers. The arguments are as for
    `model_of`.

    Raises:
        ValueError: as `model_of`.
    """
    return _tried(network.eval(), name, of_reals(shape), advice).floats


def _opened(network: nn.Module, name: str, inputs: Inputs) -> tuple[Inputs, list[str]]:
    """Lets the network take and give one tensor, if it does not anyway. Gives what it takes, and lines on it."""
    forms = dict.fromkeys((inputs, as_reals(inputs)))
    found = {form: outputs for form in forms if (outputs := _outputs_of(network, form)) is not None}
    form = next(iter(found), inputs)
    outputs, lines = found.get(form), list[str]()
    if form != inputs:
        lines.append(f"{name}: takes no whole numbers, so its inputs {described(inputs)} become real ones")
    joins = outputs is not None and not (isinstance(outputs, Tensor) and outputs.dim() in (0, 2))
    if joins or form != of_reals(shape_of(form)):
        opened(network, form)
    if joins and isinstance(_outputs_of(network, form), Tensor):
        lines.append(f"{name}: gives {_kind(outputs)}, which becomes [n, d]")
    return form, lines


def _outputs_of(network: nn.Module, inputs: Inputs) -> Any:
    """What the network gives for three samples; None if it fails. Real numbers are tried without computing, if it can
    be."""
    for device in ("meta", "cpu") if inputs == of_reals(shape_of(inputs)) else ("cpu",):
        there = copy.deepcopy(network).to("meta") if device == "meta" else copy.copy(network)
        joins = isinstance(network, Opened)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                x = filled(inputs, torch.zeros(3, *shape_of(inputs), device=device))
                return there(x) if joins else opened(there, inputs, joins=False)(x)
        except _FAILURES:
            continue
    return None


class _Conv(nn.Conv2d):
    """A convolution by our own layer, whose second derivative is fast."""

    def forward(self, x: Tensor) -> Tensor:
        stride, padding = self.stride[0], cast(tuple[int, int], self.padding)[0]
        if x.is_meta:
            return F.conv2d(x, self.weight, self.bias, stride, padding)
        y = conv2d(x.permute(0, 2, 3, 1).unsqueeze(0), self.weight.unsqueeze(0), stride=stride, padding=padding)[0]
        return (y if self.bias is None else y + self.bias).permute(0, 3, 1, 2)


class _BatchNorm(nn.BatchNorm2d):
    """A batch norm by the statistics of the first `known` of all `samples`; 0 means all."""

    known: int
    samples: int

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)
        images, known = x.permute(0, 2, 3, 1).unsqueeze(0), self.known or None
        if known is not None and len(x) != self.samples:
            raise ConfigError(
                f"model: a batch norm gets {len(x)} maps of {self.samples} pictures, so which of them are of the "
                "support set is not known; type model.transductive=true, or take nn.GroupNorm"
            )
        if self.affine:
            scale, shift = self.weight.unsqueeze(0), self.bias.unsqueeze(0)
        else:
            scale, shift = x.new_ones(1, x.shape[1]), x.new_zeros(1, x.shape[1])
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


class _RunningNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm by the running statistics that it came with, in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def _by_running_statistics(network: nn.Module) -> list[str]:
    """Gives batch norms with running statistics the class of those that use them; their paths."""
    norms = [
        (path, layer)
        for path, layer in network.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None
    ]
    for _, layer in norms:
        layer.__class__ = _RunningNorm
    return [path for path, _ in norms]


def _forward(
    network: nn.Module,
    inputs: Inputs,
    shared: Mapping[str, str],
    fixed: Collection[str],
    head: _Head | None,
    norms: Sequence[_BatchNorm],
    trains: bool,
) -> Callable[..., Tensor]:
    """`forward(params, x, known, features=False)` of the network with weights from outside; it loses its own."""
    names = [path for path in dict.fromkeys(shared.values()) if path not in fixed]
    shape = shape_of(inputs)
    buffers = {path: (constant(buffer), buffer.dtype) for path, buffer in network.named_buffers()}
    network.to("meta")
    busy = threading.Lock()  # `functional_call` puts the weights into the module while it runs

    def forward(params: Params, x: Tensor, known: int, *, features: bool = False) -> Tensor:
        # Sequences of other lengths than the first one's are the network's own affair.
        images = x.expand(-1, -1, shape[0], *(-1 for _ in shape[1:])) if x.shape[2] == 1 else x
        (constants, seeds, _) = surroundings()
        assert constants.keys() >= set(fixed), "metalearn.algorithms.common.fixed has set them"
        same = {
            path: buffer(x.device, x.dtype if dtype.is_floating_point else dtype)
            for path, (buffer, dtype) in buffers.items()
        }
        same |= {path: constants[parameter] for path, parameter in shared.items() if parameter in fixed}
        drawn = seeds.of_pass(len(images)) if trains and seeds is not None else None
        used = [name for name in names if not (features and head is not None and name in head.stage.params)]
        weights = list(zip(*(params[parameter].unbind() for parameter in used), strict=True)) or [()] * len(images)
        seeding = _seeding(x.device) if drawn is not None else nullcontext(int)
        with busy, second_order_attention(), seeding as seed:
            if trains:
                network.train(drawn is not None)
            for norm in norms:
                norm.known, norm.samples = known, images.shape[1]
            if head is not None:
                head.layer.passes = features
            outputs = []
            for task, (of_task, images_of_task) in enumerate(zip(weights, images, strict=True)):
                if drawn is not None:
                    seed(drawn[task])
                by_name = dict(zip(used, of_task, strict=True))
                everywhere = {path: by_name[parameter] for path, parameter in shared.items() if parameter in by_name}
                try:
                    given = functional_call(network, same | everywhere, (images_of_task,), tie_weights=False)
                except IndexError as error:  # of an embedding that has no row for a whole number
                    raise DataError(f"model: {first_line(error)}; {said_of(inputs, images_of_task)}") from error
                outputs.append(given)
            return torch.stack(outputs)

    return forward


_seeded = threading.Lock()
"""Torch's global random numbers are those of all networks and threads."""


@contextmanager
def _seeding(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds torch's global random numbers of the CPU and of the device. They are restored."""
    # Not by torch.manual_seed, which takes as long as a small network, and keeps a note for devices not yet in use.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)

    with _seeded:
        states = [generator.get_state() for generator in generators]
        try:
            yield seed
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _fresh(make: Make, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`."""
    return _eager(_drawn(make, seed))[0]


def _eager(network: nn.Module) -> tuple[nn.Module, bool]:
    """The network without torch.compile, and whether it or a part of it was compiled."""
    compiled = False
    whole = nn.ModuleList([network])  # so that the network itself is a child, too
    for parent in list(whole.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "OptimizedModule":  # its class is in a module that takes a second to import
                setattr(parent, name, child._orig_mod)
                compiled = True
        if parent._compiled_call_impl is not None:
            parent._compiled_call_impl, compiled = None, True
    return whole[0], compiled


def _drawn(make: Make, seed: int) -> nn.Module:
    """What `make` gives with weights drawn from `seed`. The state of torch's global random numbers is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def _names(network: nn.Module) -> dict[str, str]:
    """For every path to a parameter, the first path to the same parameter."""
    first = {id(parameter): path for path, parameter in network.named_parameters()}
    return {path: first[id(p)] for path, p in network.named_parameters(remove_duplicate=False)}


def _find_head(
    network: nn.Module, path: str | None, shared: Mapping[str, str], fixed: Collection[str], images: Tensor
) -> _Head | None:
    """The head, if the layer at `path` is one. It is not if the network uses it twice, changes its outputs in place,
    uses its weights elsewhere, or does not learn them."""
    layer = None if path is None else network.get_submodule(path)
    if layer is None or not _is(layer, nn.Linear):
        return None
    names = tuple(f"{path}.{parameter}".lstrip(".") for parameter, _ in layer.named_parameters())
    if any(list(shared.values()).count(shared[name]) > 1 or shared[name] in fixed for name in names):
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


def _make_pure(network: nn.Module, name: str, transductive: bool) -> list[str]:
    """Changes layers in place, so that none is random, overwrites its input, remembers batches or has one derivative
    only. Gives convolutions and batch norms the class of our layers, if these can compute them. Returns a line for
    `Model.note` that names the other convolutions, if there are any."""
    network.eval()
    by_torch, convolutions = [], 0
    for path, layer in network.named_modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
        if _is(layer, nn.Hardsigmoid):
            layer.__class__ = _HardSigmoid
        if _is(layer, nn.BatchNorm2d):
            layer.__class__, layer.known, layer.samples = _BatchNorm, 0, 0
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        elif isinstance(layer, nn.modules.batchnorm._NormBase) and not isinstance(layer, _RunningNorm):
            _check_norm(path, layer, name, transductive)
        if isinstance(layer, nn.Conv2d):
            convolutions += 1
            if _ours(layer):
                layer.__class__ = _Conv
            else:
                by_torch.append(path)
    if not by_torch:
        return []
    return [
        f"{name}: {len(by_torch)} of {convolutions} convolutions are computed by torch, whose second derivative is "
        f"slow, for their groups, dilation, padding or class: {_few(by_torch)}"
    ]


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _unused_statistics(network: nn.Module, name: str) -> list[str]:
    """A line on running statistics that come with the network and are not used, if there are any."""
    fresh = {"running_mean": 0.0, "running_var": 1.0}
    learned = [
        path
        for path, layer in network.named_modules()
        if _is(layer, nn.BatchNorm2d)
        and any(
            bool((getattr(layer, kind) != value).any())
            for kind, value in fresh.items()
            if layer.running_mean is not None
        )
    ]
    if not learned:
        return []
    return [
        f"{name}: batch norm normalises by its batch or support set, not by its running statistics: {_few(learned)}"
    ]


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


def _check_pure(network: nn.Module, name: str, images: Tensor) -> Tensor:
    """The outputs for the images.

    Raises:
        ValueError: they are others the second time.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        once: Tensor = network(images)
        again = network(images)
    if not _alike(once, again):
        raise ValueError(
            f"{name}: gives other outputs for the same images the second time, in eval mode, and must be a pure "
            "function; write nn.Dropout, or F.dropout(x, p, self.training), and change no buffer in forward"
        )
    return once


def _alike(once: Tensor, again: Tensor) -> bool:
    return torch.allclose(once, again, rtol=1e-3, atol=1e-6, equal_nan=True)


def _differs_in_training(network: nn.Module, name: str, images: Tensor, in_tests: Tensor) -> bool:
    """Whether the network draws random numbers in training mode, or computes something else than in eval mode.

    Raises:
        ValueError: it cannot be computed in training mode as a function of its weights, inputs and torch's seed.
    """
    what, otherwise = f"{name}: in training mode, it", "; or type dropout=false, and training is in eval mode"
    buffers = {path: buffer.clone() for path, buffer in network.named_buffers()}
    others, outputs = _other_random_numbers(network), []
    try:
        with torch.no_grad(), _seeding(torch.device("cpu")) as seed:
            network.train()
            for _ in range(2):
                seed(0)
                before = torch.default_generator.get_state()
                outputs.append(network(images))
            draws = not torch.equal(before, torch.default_generator.get_state())
    except _FAILURES as error:
        raise ValueError(f"{what} fails ({first_line(error)}){otherwise}") from error
    finally:
        network.eval()
    if not all(isinstance(output, Tensor) and output.shape == in_tests.shape for output in outputs):
        given, wanted = _kind(outputs[0]), _kind(in_tests)
        raise ValueError(f"{what} gives {given}, and in eval mode {wanted}{otherwise}")
    changed = [path for path, buffer in network.named_buffers() if not torch.equal(buffer, buffers[path])]
    if changed:
        raise ValueError(f"{what} changes its buffer {changed[0]}, which no worker passes on to the others{otherwise}")
    if _other_random_numbers(network) != others or not _alike(*outputs):
        raise ValueError(
            f"{what} draws random numbers that torch.manual_seed does not seed, so each worker would draw others; draw "
            f"them by torch, without a torch.Generator of its own{otherwise}"
        )
    return draws or not _alike(outputs[0], in_tests)


def _other_random_numbers(network: nn.Module) -> list[object]:
    """The states of Python's and numpy's global random numbers, and of generators in the network's attributes."""
    states: list[object] = [random.getstate(), repr(np.random.get_state())]
    for value in (value for layer in network.modules() for value in vars(layer).values()):
        if isinstance(value, Generator):
            states.append(value.get_state().tolist())
        elif isinstance(value, np.random.Generator):
            states.append(repr(value.bit_generator.state))
        elif isinstance(value, random.Random):
            states.append(value.getstate())
    return states


_FAILURES = (RuntimeError, ValueError, AssertionError, TypeError, NotImplementedError, AttributeError)
"""What networks raise for inputs that they cannot take."""


def _kind(output: object) -> str:
    return f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


class _Trial(NamedTuple):
    """The number of floats that one input leaves in the layers of a network, the path of the layer that gives the
    outputs, and the parameters on which these do not depend."""

    floats: int
    last: str | None
    unused: list[str]


def _tried(network: nn.Module, name: str, inputs: Inputs, advice: str) -> _Trial:
    """The trial runs on the meta device, which computes nothing. If that fails, it runs on the CPU.

    Raises:
        ValueError: the network cannot take such inputs, does not give [n, ways], or has nothing to learn.
    """
    shape = shape_of(inputs)
    try:
        there = copy.deepcopy(network).to("meta")
        return _counted(there, name, filled(inputs, torch.zeros(2, *shape, device="meta")))
    except _FAILURES:
        try:
            return _counted(network, name, filled(inputs, torch.zeros(2, *shape)))
        except _FAILURES as error:
            if str(error).startswith(f"{name}: "):
                raise
            what = (
                f"image_size={shape[1]}: {name} cannot take images" if len(shape) == 3 else f"{name} cannot take inputs"
            )
            raise ValueError(f"{what} {described(inputs)} ({first_line(error)}); {advice}") from error


def _counted(network: nn.Module, name: str, images: Tensor) -> _Trial:
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
        raise ValueError(f"{name}: gives {_kind(output)} for {len(images)} images, and must give a tensor [n, ways]")
    parameters = dict(network.named_parameters())
    state = [path for path in parameters if path.startswith(STATE)]
    if state:
        raise ValueError(
            f"{name}: its parameter {state[0]} has a name that is kept for the state of learners, {STATE}…; give that "
            "layer another name"
        )
    whole = [path for path, parameter in parameters.items() if not parameter.is_floating_point()]
    if whole:
        raise ValueError(f"{name}: its parameter {whole[0]} has whole numbers; make it a buffer (register_buffer)")
    learned = {path: parameter for path, parameter in parameters.items() if parameter.requires_grad}
    if not learned:
        what = "all its parameters are fixed (requires_grad=False)" if parameters else "has no parameters"
        raise ValueError(f"{name}: {what}, so there is nothing to learn")
    if not output.requires_grad:
        raise ValueError(f"{name}: no output depends on a parameter that learns, so there is nothing to learn")
    grads = torch.autograd.grad(output.sum(), list(learned.values()), allow_unused=True)
    unused = [path for path, grad in zip(learned, grads, strict=True) if grad is None]
    last = next((path for path, value in outputs.items() if value is output), None)
    return _Trial(max(floats, output.shape[1]), last, unused)
