"""An `nn.Module` as pure functions: its weights come from outside, and each task has its own."""

import copy
import math
import random
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd import Function
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from metalearn.errors import ConfigError, DataError, first_line
from metalearn.models.common.stages import one_after_the_other
from metalearn.nn.attention import TORCHS, second_order_attention
from metalearn.nn.layers import batch_norm, conv2d
from metalearn.nn.surroundings import (
    Inputs,
    Opened,
    PassSeeds,
    as_reals,
    constant,
    described,
    filled,
    joined,
    of_reals,
    opened,
    said_of,
    shape_of,
    surrounded,
    surroundings,
)
from metalearn.types import STATE, Apply, Model, Params, Stage

Make = Callable[[], nn.Module]  # a fresh network, its weights drawn from torch's global random numbers

Vectorize = bool | Literal["auto"]


def model_of(
    make: Make, *, name: str, inputs: Inputs, transductive: bool, advice: str, dropout: bool = False,
    running_statistics: bool = False, vectorize: Vectorize = False,
) -> Model:  # fmt: skip
    """A network that takes such inputs and gives [n, ways], as a model. The parameters have the names of the module.
    Those that do not require a gradient are fixed, see `Model.fixed`. A network that cannot take whole numbers gets
    real ones, and outputs of other dimensions, or several, are joined to [n, d]; `Model.note` says so.

    Our layers compute convolutions and batch norms, where they can; `Model.note` names the others. Batch norm keeps no
    running statistics: it normalises by those of the batch or of the support set, and derivatives go through them.
    Tasks are computed one after the other; with `vectorize`, those of a chunk at once, by `torch.func.vmap`, where that
    has rules for all that the network does. Then the rounding of a task depends on their number. The model has no
    stages. If an `nn.Linear` gives the outputs, it is the head.

    The network is in eval mode. With `dropout` it is in training mode where `metalearn.nn.surroundings` has seeds: each
    task's pass seeds torch's global random numbers, which are restored. If both modes compute the same, the network
    stays in eval mode. Raises ValueError if the network cannot take such inputs, its outputs are not [n, ways], it has
    nothing to learn, one of its layers remembers batches, or equal inputs and seeds give other outputs the second time;
    with `vectorize` true, also if its tasks cannot be computed at once.

    Args:
        make: gives a fresh network.
        name: the name of the network in errors.
        inputs: what an input is; `of_reals(shape)` for one tensor of real numbers, (channels, h, w) for images. An
            image of one channel is repeated.
        transductive: normalise a batch by its own statistics; if false, queries by those of the support set. A network
            whose outputs do not depend on other samples is not transductive.
        advice: what to type if the network cannot take such inputs.
        dropout: compute in training as in the network's training mode.
        running_statistics: batch norms normalise by the running statistics that the network came with, as constants.
        vectorize: false: one task after the other; true: all at once, or an error; `auto`: at once where that can be.
    """
    network, compiled = _fresh(make, seed=0)
    notes, cautions = _make_pure(network, name, transductive, running_statistics)
    if compiled:
        cautions.append(f"{name}: is computed without torch.compile, whose functions have no second derivative")
    kept = dict(network.named_buffers())
    redrawn = dict(_fresh(make, seed=1)[0].named_buffers()) if kept else {}
    for path, buffer in kept.items():
        # For example that of spectral norm, which belongs to weights that the seed of a run draws.
        if not torch.equal(buffer, redrawn[path].to(buffer.dtype)):
            reason = "is drawn at random, and only parameters are drawn by the seed of a run and saved"
            advice = "make it a parameter, or draw it by a torch.Generator with a seed of its own"
            raise ValueError(f"{name}: its buffer {path} {reason}; {advice}")
    with torch.random.fork_rng(devices=[]):  # one stretch of random numbers, so that a second pass draws others
        network, inputs, trial = _tried(network, name, inputs, advice)
        _check_learns(network, name, trial.outputs)
        trains = _differs_in_training(network, name, trial, dropout)
        together = transductive and _depends_on_others(network, trial)
    notes += trial.notes
    if trains:
        notes.append(f"{name}: dropout, or what else its training mode changes, is on in training and off in tests")
    parameters = dict(network.named_parameters())
    fixed = {path for path, parameter in parameters.items() if not parameter.requires_grad}
    constants = {path: parameters[path].detach() for path in fixed}
    learning = {path: parameter.detach() for path, parameter in parameters.items() if path not in fixed}
    if fixed:
        notes.append(f"{name}: {len(fixed)} of its {len(parameters)} parameters are fixed, and do not learn")
    first = {id(parameter): path for path, parameter in parameters.items()}
    # For every path to a parameter, the first path to the same parameter.
    shared = {path: first[id(p)] for path, p in network.named_parameters(remove_duplicate=False)}
    last = _find_head(network, trial, shared, fixed)
    headless, head = (last, None) if isinstance(last, str) else ("", last)
    norms = {path: layer for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    forward = _forward(network, inputs, shared, fixed, head, list(norms.values()), trains)
    if unused := _unused(forward, name, learning, constants, trial.images, trains):
        otherwise = "unless others do (a branch on the data), only weight decay changes that"
        cautions.append(f"{name}: no output for random inputs depends on {_few(unused)}; {otherwise}")

    at_once = False
    if vectorize:
        why = _one_by_one(forward, learning, constants, trial.images)
        if why and vectorize is True:
            raise ValueError(f"{name}: its tasks cannot be computed at once ({why}); type vectorize=auto")
        if why:
            notes.append(f"{name}: tasks are computed one by one, since torch.vmap cannot take it ({why})")
        else:
            what = f"at once{', but one by one in training, for dropout=true' if trains else ''}"
            bits = "other bits with another trainer.task_chunk; vectorize=false: one by one"
            notes.append(f"{name}: the tasks of a chunk are computed {what}; {bits}")
            at_once, forward = not trains, partial(forward, at_once=True)

    def drawn(generator: Generator, *, learn: bool) -> Params:
        made, _ = _fresh(make, int(torch.randint(2**63 - 1, (), generator=generator)))
        return {path: value.detach() for path, value in made.named_parameters() if value.requires_grad == learn}

    def whole(forward: Callable[[Params, Tensor, int], Tensor]) -> Apply:
        return one_after_the_other((Stage(name, tuple(learning), forward),), ignores_support=transductive)

    affine = [path for path, layer in norms.items() if layer.affine]
    pairs = [[shared[f"{path}.{parameter}"] for parameter in ("weight", "bias")] for path in affine]
    model = Model(
        partial(drawn, learn=True), whole(forward), together, trial.floats, note="; ".join(notes),
        norms=tuple(dict.fromkeys(path for pair in pairs if not fixed.intersection(pair) for path in pair)),
        cautions=tuple(cautions), fixed=partial(drawn, learn=False) if fixed else None, at_once=at_once,
    )  # fmt: skip
    if head is None:
        return model._replace(headless=headless)
    return model._replace(features=whole(partial(forward, features=True)), head=head[1])


def floats_of(network: nn.Module, *, name: str, shape: tuple[int, ...], advice: str) -> int:
    """The floats that a forward pass of a network leaves for one input of real numbers. The arguments are as for
    `model_of`. Raises ValueError as `model_of`."""
    with torch.no_grad():
        return _tried(network.eval(), name, of_reals(shape), advice)[2].floats


_at_once: ContextVar[bool] = ContextVar("tasks_at_once", default=False)


class _OverTasks(Function):
    """(compute, tensors of a task) → `compute` of all tasks' tensors, which have the tasks as their first dimension. It
    is for use under vmap, where autograd records `compute` itself, so that all its derivatives are there."""

    @staticmethod
    def forward(compute: Callable[..., Tensor], *of_task: Tensor) -> Tensor:
        raise AssertionError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, compute: Callable[..., Tensor], *parts: Tensor) -> tuple[Tensor, int]:
        of_tasks = [
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in zip(parts, in_dims[1:], strict=True)
        ]
        return compute(*of_tasks), 0


def _over_tasks(compute: Callable[..., Tensor], *of_task: Tensor) -> Tensor:
    """The result of a function of all tasks' tensors, for the tensors of this task."""
    if _at_once.get():
        result: Tensor = _OverTasks.apply(compute, *of_task)
        return result
    return compute(*(part.unsqueeze(0) for part in of_task))[0]


def _embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Torch's function of this name, for use under vmap, where torch's reads the rows of another task for a number that
    is too large."""

    def rows_of(ids: Tensor, weight: Tensor) -> Tensor:
        if not ids.is_cuda and ids.numel() and (ids.min() < 0 or ids.max() >= weight.shape[1]):
            raise IndexError("index out of range in self")  # torch's words
        rows = weight[torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1)), ids]
        return rows if padding is None else torch.where((ids == padding)[..., None], rows.detach(), rows)

    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError("under vmap, embeddings have no max_norm and no scale_grad_by_freq")
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else weight.shape[0] + padding_idx
    return _over_tasks(rows_of, ids, weight)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch's function of this name, for use under vmap, where torch's copies the weights for each of the first
    dimension of `x` [a, b, i]."""
    y: Tensor = TORCHS["linear"](x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], -1)


class _Conv(nn.Conv2d):
    """A convolution by our own layer, whose second derivative is fast."""

    def forward(self, x: Tensor) -> Tensor:
        stride, padding = self.stride[0], cast(tuple[int, int], self.padding)[0]
        compute = partial(conv2d, stride=stride, padding=padding)
        y = _over_tasks(compute, x.permute(0, 2, 3, 1), self.weight)
        return (y if self.bias is None else y + self.bias).permute(0, 3, 1, 2)


class _BatchNorm(nn.BatchNorm2d):
    """A batch norm by the statistics of the first `support_size` of all `samples`; 0 means all."""

    support_size: int
    samples: int

    def forward(self, x: Tensor) -> Tensor:
        support_size = self.support_size or None
        if support_size is not None and x.shape[0] != self.samples:  # `len(x)` would be a constant to torch.export
            raise ConfigError(
                f"model: a batch norm gets {x.shape[0]} maps of {self.samples} pictures, so which of them are of the "
                "support set is not known; type model.transductive=true, or take nn.GroupNorm"
            )
        scale: Tensor = self.weight if self.affine else x.new_ones(x.shape[1])
        shift: Tensor = self.bias if self.affine else x.new_zeros(x.shape[1])
        compute = partial(batch_norm, statistics_of=support_size, epsilon=self.eps)
        return _over_tasks(compute, x.permute(0, 2, 3, 1), scale, shift).permute(0, 3, 1, 2)


class _HeadLayer(nn.Linear):
    """The last layer. If `passes` is true, it returns its input."""

    passes: bool

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else super().forward(x)


class _RunningNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm by the running statistics that it came with, in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def _forward(
    network: nn.Module, inputs: Inputs, shared: Mapping[str, str], fixed: Collection[str],
    head: tuple[_HeadLayer, Stage] | None, norms: Sequence[_BatchNorm], trains: bool,
) -> Callable[..., Tensor]:  # fmt: skip
    """`forward(params, x, support_size, features=False)` with weights from outside; `network` loses its own."""
    names = [path for path in dict.fromkeys(shared.values()) if path not in fixed]
    layer, of_head = (head[0], head[1].params) if head else (None, ())
    shape = shape_of(inputs)
    buffers = {path: (constant(buffer), buffer.dtype) for path, buffer in network.named_buffers()}
    network.to("meta")
    busy = threading.Lock()  # `functional_call` puts the weights into the module while it runs

    def forward(
        params: Params, x: Tensor, support_size: int, *, features: bool = False, at_once: bool = False
    ) -> Tensor:
        # Sequences of other lengths than the first one's are the network's own affair.
        images = x.expand(-1, -1, shape[0], -1, -1) if len(shape) == 3 and x.shape[2] == 1 else x
        (constants, seeds, *_) = surroundings()
        assert constants.keys() >= set(fixed), "metalearn.algorithms.common.wrappers has set them"
        same = {path: constants[parameter] for path, parameter in shared.items() if parameter in fixed}
        for path, (buffer, dtype) in buffers.items():
            same[path] = buffer(x.device, x.dtype if dtype.is_floating_point else dtype)
        drawn = seeds.of_pass(len(images)) if trains and seeds is not None else None
        used = [name for name in names if not (features and name in of_head)]
        at_once = at_once and drawn is None and len(images) > 1 and not torch.compiler.is_exporting()
        seeding = _seeding(x.device) if drawn is not None else nullcontext(int)
        others = {"linear": _linear, "embedding": _embedding} if at_once else {}
        with busy, second_order_attention(**others), seeding as seed:
            if trains:
                network.train(drawn is not None)
            for norm in norms:
                norm.support_size, norm.samples = support_size, images.shape[1]
            if layer is not None:
                layer.passes = features

            def of_task(weights: Params, images: Tensor) -> Any:
                everywhere = {path: weights[parameter] for path, parameter in shared.items() if parameter in weights}
                return functional_call(network, same | everywhere, (images,), tie_weights=False)

            weights, token = {name: params[name] for name in used}, _at_once.set(at_once)
            try:
                if at_once:
                    of_all: Tensor = vmap(of_task)(weights, images)
                    return of_all
                # By unbind, whose derivative stacks: that of each task's own index would add up tensors of all tasks.
                of_tasks = zip(*(weight.unbind() for weight in weights.values()), strict=True)
                outputs = []
                for task, images_of_task in enumerate(images):
                    if drawn is not None:
                        seed(drawn[task])
                    outputs.append(of_task(dict(zip(weights, next(of_tasks, ()), strict=True)), images_of_task))
                return torch.stack(outputs)
            except IndexError as error:  # of an embedding that has no row for a whole number
                raise DataError(f"model: {first_line(error)}; {said_of(inputs, images.flatten(0, 1))}") from error
            finally:
                _at_once.reset(token)

    return forward


_seeded = threading.Lock()  # torch's global random numbers are those of all networks and threads


@contextmanager
def _seeding(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds torch's global random numbers of the CPU and of the device. They are restored."""
    devices = [device.index] if device.type == "cuda" else []
    # Not by torch.manual_seed, which takes as long as a small network, and keeps a note for devices not yet in use.
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)

    with _seeded, torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield seed


def _fresh(make: Make, seed: int) -> tuple[nn.Module, bool]:
    """The network with weights drawn from `seed`, by whatever global random numbers its constructor takes, without
    torch.compile and DataParallel, and whether a part of it was compiled."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            made = make()
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
    compiled = False
    whole = nn.ModuleList([made])  # so that the network itself is a child, too
    for parent in list(whole.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "OptimizedModule":  # its class is in a module that takes a second to import
                setattr(parent, name, child._orig_mod)
                compiled = True
            elif isinstance(child, nn.DataParallel):
                setattr(parent, name, child.module)
        if parent._compiled_call_impl is not None:
            parent._compiled_call_impl, compiled = None, True
    return whole[0], compiled


def _find_head(
    network: nn.Module, trial: "_Trial", shared: Mapping[str, str], fixed: Collection[str]
) -> tuple[_HeadLayer, Stage] | str:  # fmt: skip
    """The layer that gives the outputs, and the stage that computes it with the weights of every task, if it is a head;
    or why it is none: the network uses it twice, changes its outputs in place, uses its weights elsewhere, or does not
    learn them."""
    path = trial.last
    layer = None if path is None else network.get_submodule(path)
    if layer is None or not _is(layer, nn.Linear):
        return ""
    names = tuple(f"{path}.{parameter}".lstrip(".") for parameter, _ in layer.named_parameters())
    for name in names:
        if other := next((path for path in shared if path != name and shared[path] == shared[name]), None):
            return f"{name} is also {other}"
        if shared[name] in fixed:
            return f"{name} is fixed"
    linear: Any = layer
    linear.__class__, linear.passes = _HeadLayer, True
    weights = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.no_grad():
        try:
            for parameter in layer.parameters():
                parameter.fill_(math.nan)  # so that whatever else depends on them shows
            features = network(trial.images)
        except Exception:  # a stranger's network, which gets features in place of outputs, raises any type
            features = trial.outputs.new_empty(0)
        finally:
            linear.passes = False
            for parameter, weight in zip(layer.parameters(), weights, strict=True):
                parameter.copy_(weight)
        if features.dim() != 2 or not torch.allclose(layer(features), trial.outputs, rtol=1e-4, atol=1e-5):
            linear.__class__ = nn.Linear
            return f"{path or 'it'} is used twice, or its outputs are changed or used elsewhere"

    def apply(params: Params, features: Tensor, support_size: int) -> Tensor:
        logits = features @ params[names[0]].transpose(1, 2)
        return logits if len(names) == 1 else logits + params[names[1]].unsqueeze(1)

    return linear, Stage("head", names, apply)


def _make_pure(
    network: nn.Module, name: str, transductive: bool, running_statistics: bool
) -> tuple[list[str], list[str]]:
    """Changes layers in place, so that none is random, overwrites its input, remembers batches or has one derivative
    only. Gives convolutions and batch norms the class of our layers, if these can compute them. Returns lines for
    `Model.note`, and for `Model.cautions`."""
    for path, parameter in network.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            first = "write a layer that is not lazy, such as nn.Linear"
            otherwise = "call the network on a sample before you give it"
            raise ValueError(f"{name}: its parameter {path} has no shape yet; {first}, or {otherwise}")
        if parameter.is_complex():
            advice = "keep it as [..., 2], and write torch.view_as_complex in forward"
            raise ValueError(f"{name}: its parameter {path} is complex, and parameters are real numbers; {advice}")
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in network.modules()):
        raise ValueError(f"{name}: is compiled by torch.jit; give the module that was compiled")
    network.float().eval()
    convolutions, by_torch, constants, unused = 0, list[str](), list[str](), list[str]()
    for path, layer in network.named_modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False  # the same gradient, as a dense tensor
            if layer.max_norm is not None:
                kind = type(layer).__name__
                raise ValueError(f"{name}: its layer {path} ({kind}) changes its weight in forward; leave max_norm out")
        if isinstance(layer, nn.Conv2d):
            convolutions += 1
            square = layer.stride[0] == layer.stride[1] and layer.padding[0] == layer.padding[1]
            plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
            if _is(layer, nn.Conv2d) and plain and square and not isinstance(layer.padding, str):
                layer.__class__ = _Conv
            else:
                by_torch.append(path)
        elif isinstance(layer, nn.modules.batchnorm._NormBase):
            norm: Any = layer
            of_batches = isinstance(layer, nn.modules.batchnorm._BatchNorm)
            if running_statistics and of_batches and norm.running_mean is not None:
                norm.__class__ = _RunningNorm
                constants.append(path)
            elif _is(norm, nn.BatchNorm2d):
                if norm.running_mean is not None and (norm.running_mean.any() or (norm.running_var != 1).any()):
                    unused.append(path)
                norm.__class__, norm.support_size, norm.samples = _BatchNorm, 0, 0
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
            elif norm.track_running_stats:
                raise ValueError(
                    f"{name}: its layer {path} ({type(layer).__name__}) remembers batches, which a pure function "
                    "cannot; give it track_running_stats=False, or take nn.BatchNorm2d or nn.GroupNorm"
                )
            elif of_batches and not transductive:
                raise ValueError(
                    f"{name}: its layer {path} ({type(layer).__name__}) normalises queries by each other; type "
                    "transductive=true, or take nn.BatchNorm2d or nn.GroupNorm"
                )
    notes = {
        f"{name}: {len(by_torch)} of {convolutions} convolutions are computed by torch, whose second derivative is "
        f"slow, for their groups, dilation, padding or class: {_few(by_torch)}": by_torch,
        f"{name}: normalises by the running statistics that it came with: {_few(constants)}": constants,
    }
    caution = f"{name}: batch norm normalises by its batch or support set, not by its running statistics"
    return [line for line, paths in notes.items() if paths], [f"{caution}: {_few(unused)}"] if unused else []


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _is(layer: Any, kind: type[nn.Module]) -> bool:
    """Whether the layer is of exactly this class, and has no hooks."""
    return type(layer) is kind and not layer._forward_hooks and not layer._forward_pre_hooks


# The trial


class _Trial(NamedTuple):
    """What one pass of two random samples has shown: these `images`, the `outputs` [2, d], the number of floats that
    one input leaves in the layers, the path of the layer that gives the outputs, and lines for `Model.note`."""

    images: Tensor
    outputs: Tensor
    floats: int
    last: str | None
    notes: list[str]


def _tried(network: nn.Module, name: str, inputs: Inputs, advice: str) -> tuple[nn.Module, Inputs, _Trial]:
    """Tries the network; if it fails, with real numbers in place of whole ones. Gives a network that takes and gives
    one tensor, and what it takes."""
    shape, failures, notes = shape_of(inputs), list[Exception](), list[str]()
    seen = list[tuple[str, Any]]()  # the outputs of layers, in the order of their calls
    for form in dict.fromkeys((inputs, as_reals(inputs))):
        tried: Any = network if form == of_reals(shape) else opened(copy.copy(network), form, joins=False)
        images = filled(form, torch.rand(2, *shape, generator=Generator()))
        seen.clear()
        # `path=path`, since a closure would see the last path of the loop.
        hooks = [
            layer.register_forward_hook(lambda _, inputs, output, path=path: seen.append((path, output)))
            for path, layer in tried.named_modules() if not list(layer.children())
        ]  # fmt: skip
        try:
            version = images._version
            raw = tried(images)
            if images._version != version:  # changed in place: each pass gets a copy
                tried.register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
                seen.clear()
                raw = tried(images)
            break
        except Exception as error:  # a stranger's network raises any type
            failures.append(error)
        finally:
            for hook in hooks:
                hook.remove()
    else:
        what = f"image_size={shape[1]}: {name} cannot take images" if len(shape) == 3 else f"{name} cannot take inputs"
        reason = f"{described(inputs)} ({first_line(failures[0])})"
        raise ValueError(f"{what} {reason}; {advice}") from failures[0]
    outputs = joined(raw, len(images))
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(images):
        raise ValueError(f"{name}: gives {_kind(outputs)} for {len(images)} images, and must give a tensor [n, ways]")
    if outputs.dtype != torch.float32:
        raise ValueError(f"{name}: gives {outputs.dtype}, and must give torch.float32; leave out torch.autocast")
    if form != inputs:
        notes.append(f"{name}: takes no whole numbers, so its inputs {described(inputs)} become real ones")
    if outputs is not raw:
        notes.append(f"{name}: gives {_kind(raw)}, which becomes [n, d]")
        tried = tried if isinstance(tried, Opened) else opened(tried, form)
        tried.opened_joins = True
    last = next((path for path, value in seen if value is outputs), None)
    tensors = [leaf for _, value in seen for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    floats = sum(leaf.numel() // len(images) for leaf in tensors)
    return tried, form, _Trial(images, outputs, max(floats, outputs.shape[1]), last, notes)


def _kind(output: object) -> str:
    return f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _check_learns(network: nn.Module, name: str, outputs: Tensor) -> None:
    """Raises ValueError unless the outputs depend on a parameter that learns."""
    parameters = dict(network.named_parameters())
    for path in parameters:
        if path.startswith(STATE):
            reason = f"has a name that is kept for the state of learners, {STATE}…"
            raise ValueError(f"{name}: its parameter {path} {reason}; give that layer another name")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        what = "all its parameters are fixed (requires_grad=False)" if parameters else "has no parameters"
        raise ValueError(f"{name}: {what}, so there is nothing to learn")
    if not outputs.requires_grad:
        raise ValueError(f"{name}: no output depends on a parameter that learns, so there is nothing to learn")


@torch.no_grad()
def _depends_on_others(network: nn.Module, trial: _Trial) -> bool:
    """Whether the outputs for a sample depend on the other one, as by batch norm, so far as it shows."""
    try:
        alone = network(trial.images[:1])
    except Exception:  # a stranger's network raises any type; it may take no single sample
        return True
    return not torch.allclose(alone, trial.outputs[:1], rtol=1e-3, atol=1e-4)


def _unused(
    forward: Callable[..., Tensor], name: str, learning: Params, constants: Params, images: Tensor, trains: bool
) -> list[str]:
    """The parameters on which no output depends, by the gradient of a pass as tasks are computed: with weights from
    outside, and in training mode too if it is another. Raises ValueError if there is no gradient."""
    learned = {path: weight.unsqueeze(0).requires_grad_() for path, weight in learning.items()}
    for seeds in [PassSeeds(0, 0, [0]), None] if trains else [None]:
        try:
            with warnings.catch_warnings(), surrounded(fixed=constants, seeds=seeds):
                # torch.utils.checkpoint's: its parameters get no gradient then
                warnings.filterwarnings("error", "None of the inputs have requires_grad")
                outputs = forward(learned, images.unsqueeze(0), 0)
            grads = torch.autograd.grad(outputs.sum(), list(learned.values()), allow_unused=True)
        except Exception as error:  # as in the trial
            reason = f"has no gradient with weights from outside ({first_line(error)})"
            instead = "leave out torch.utils.checkpoint (algorithm.checkpoint_steps=true saves memory)"
            raise ValueError(f"{name}: {reason}; {instead}, and change no weight in forward") from error
    return [path for path, grad in zip(learned, grads, strict=True) if grad is None]


_UNCHECKED = (
    F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag, F.one_hot,
    torch.take, Tensor.take, torch.take_along_dim, Tensor.take_along_dim,
)  # fmt: skip


class _Checked(TorchFunctionMode):
    """Refuses what reads another task's numbers under vmap, in place of an error, where an index is too large."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _UNCHECKED:
            raise NotImplementedError(f"under vmap, {function.__name__} does not see indices that are too large")
        return function(*args, **(kwargs or {}))


def _one_by_one(forward: Callable[..., Tensor], learning: Params, constants: Params, images: Tensor) -> str:
    """Why two tasks cannot be computed at once, by a pass of each way and its gradient; empty: they can."""
    learned = {path: torch.stack([weight, 0.9 * weight]).requires_grad_() for path, weight in learning.items()}
    of_tasks = torch.stack([images, images.flip(0)])

    def computed(at_once: bool) -> list[Tensor]:
        with torch.no_grad():
            alone = forward(learned, of_tasks, 0, at_once=at_once)
        outputs, inputs = forward(learned, of_tasks, 0, at_once=at_once), list(learned.values())
        grads = torch.autograd.grad(outputs.square().sum(), inputs, allow_unused=True, materialize_grads=True)
        return [alone, outputs.detach(), *grads]

    try:
        with warnings.catch_warnings(), surrounded(fixed=constants, seeds=None):
            warnings.filterwarnings("error", "There is a performance drop")  # torch has no rule for an operation
            with _Checked(), torch.no_grad():
                forward(learned, of_tasks, 0, at_once=True)
            together = computed(at_once=True)
            exact = computed(at_once=False)
    except Exception as error:  # as in the trial
        return first_line(error)[:100]
    # By the largest of all: a gradient that is 0 but for rounding, as of a bias before a norm, differs from way to way.
    size = max(float(value.abs().max()) for value in exact)
    pairs = zip(together, exact, strict=True)
    same_numbers = all(torch.allclose(one, other, rtol=1e-3, atol=1e-4 * size) for one, other in pairs)
    return "" if same_numbers else "other outputs or gradients"


@torch.no_grad()
def _differs_in_training(network: nn.Module, name: str, trial: _Trial, dropout: bool) -> bool:
    """Whether the network computes something else in training mode, if `dropout` allows that."""
    buffers = {path: buffer.clone() for path, buffer in network.named_buffers()}
    if not _alike(network(trial.images), trial.outputs):
        reason = "gives other outputs for the same images the second time, in eval mode, and must be a pure function"
        advice = "write nn.Dropout, or F.dropout(x, p, self.training), and change no buffer in forward"
        raise ValueError(f"{name}: {reason}; {advice}")
    if not dropout:
        return False
    what, otherwise = f"{name}: in training mode, it", "; or type dropout=false, and training is in eval mode"
    try:
        with _seeding(torch.device("cpu")) as seed:
            network.train()
            seed(0)
            before, outputs = torch.default_generator.get_state(), network(trial.images)
            draws = not torch.equal(before, torch.default_generator.get_state())
            seed(0)
            again = network(trial.images)
    except Exception as error:  # as in the trial
        raise ValueError(f"{what} fails ({first_line(error)}){otherwise}") from error
    finally:
        network.eval()
    changed = [path for path, buffer in network.named_buffers() if not torch.equal(buffer, buffers[path])]
    if changed:
        raise ValueError(f"{what} changes its buffer {changed[0]}, which no worker passes on to the others{otherwise}")
    if not isinstance(outputs, Tensor) or outputs.shape != trial.outputs.shape:
        raise ValueError(f"{what} gives {_kind(outputs)}, and in eval mode {_kind(trial.outputs)}{otherwise}")
    if not _alike(outputs, again):
        reason = "draws random numbers that torch.manual_seed does not seed, so each worker would draw others"
        raise ValueError(f"{what} {reason}; draw them by torch, without a torch.Generator of its own{otherwise}")
    return draws or not _alike(outputs, trial.outputs)


def _alike(once: Tensor, again: Tensor) -> bool:
    return torch.allclose(once, again, rtol=1e-3, atol=1e-6, equal_nan=True)
