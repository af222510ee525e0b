"""A network of known layers, compiled: outputs, the loss of every task, its gradient and its Hessian-vector product.

The parameters of a task are one row of a tensor [t, P], the *packed* form of `Params`, a dictionary of one tensor. So
inner optimisers, which compute elementwise, need one operation for all parameters. Each task is computed by itself,
from the first layer to the last (`backends/kernels/network.c`), and its numbers do not depend on the other tasks.

The loss can be differentiated twice, the outputs once. Higher derivatives are those of the layers, one by one.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.backends import kernels_for, kernels_of_products
from metalearn.nn.backends.c import NetworkCall
from metalearn.nn.layers import Layer, Params, apply_layers, parameters_of
from metalearn.nn.plans import PACKED, ShapedNetwork, is_packed, refusal, steps_of
from metalearn.nn.surroundings import surroundings

Metrics = dict[str, Tensor]


def leaves(params: Params) -> Params:
    """Fresh leaves with the same values, to differentiate by."""
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def gradient_at(params: Params, losses: Tensor, *, twice: bool) -> Params:
    """The gradient of the sum of losses [t] by the parameters; with `twice`, it has a graph of its own. Parameters
    that have no part in them get zeros."""
    grads = torch.autograd.grad(
        losses.sum(), list(params.values()), create_graph=twice, allow_unused=True, materialize_grads=True
    )
    return dict(zip(params, grads, strict=True))


# The loss that compiled networks compute, and the metric beside it


def usual_metrics(outputs: Tensor, y: Tensor) -> Metrics:
    """Of each task, its `loss` [t] and a metric.

    Classes (`y` [t, n] integers; `outputs` [t, n, ways] logits): mean cross-entropy, and `accuracy`. Numbers (`y`
    [t, n, d]): the mean squared error, as `loss` and `mse`.
    """
    if y.is_floating_point():
        return mean_squared_error(outputs, y)
    return {name: values.mean(dim=1) for name, values in usual_metrics_of_samples(outputs, y).items()}


def usual_metrics_of_samples(outputs: Tensor, y: Tensor) -> Metrics:
    """As `usual_metrics`, for every sample [t, n]."""
    if y.is_floating_point():
        errors = squared_errors(outputs, y)
        return {"loss": errors, "mse": errors.detach()}
    return {"loss": cross_entropies(outputs, y), "accuracy": accuracy(outputs, y)}


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Of samples with classes `y` [t, n]: [t, n]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is that of the class `y` [t, n], else 0."""
    return (logits.detach().argmax(dim=-1) == y).to(logits.dtype)


def squared_errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Their mean over the numbers of a sample, `y` [t, n, d]: [t, n]."""
    return (outputs - y).square().mean(dim=2)


def mean_squared_error(outputs: Tensor, y: Tensor) -> Metrics:
    """The loss of tasks of real numbers `y` [t, n, d], and their `mse`."""
    # One mean over both dimensions: a mean of means would round twice.
    mse = (outputs - y).square().mean(dim=(1, 2))
    return {"loss": mse, "mse": mse.detach()}


class CompiledNetwork:
    """A sequence of layers that is compiled when it is used."""

    def __init__(self, layers: Sequence[Layer], *, ignores_support: bool = False) -> None:
        """With `ignores_support`, the statistics of norms are always those of the batch."""
        self.layers = tuple(layers)
        self._ignores_support = ignores_support
        self._names = tuple(parameters_of(layers))
        self._shaped: dict[tuple[tuple[int, ...], ...], ShapedNetwork] = {}
        self._packed: dict[str, ShapedNetwork] = {}
        self._making = threading.Lock()

    def computes(self, params: Params, device: torch.device | None = None) -> bool:
        """Whether the compiled network can compute with these parameters, on their device or another: it needs
        kernels that round products as the config asks, and layers that can be compiled."""
        values = [params[name] for name in self._names if name in params]
        if len(values) < len(self._names) or not values:
            return False
        kernels = kernels_of_products(device or values[0].device, values[0].dtype)
        return kernels is not None and self._of(values).refused is None

    def refusal(self, params: Params) -> str | None:
        """Why the layers cannot be compiled as one network; None: they can. Of the parameters, some may be missing."""
        shapes = {name: tuple(params[name].shape) for name in self._names if name in params}
        return refusal(steps_of(self.layers), shapes)

    def pack(self, params: Params, tasks: int) -> Params:
        """Meta-parameters in packed form for `tasks` tasks, sharing memory; gradients add up over the tasks. Raises
        ValueError if the layers cannot be compiled."""
        values = [params[name] for name in self._names]
        shaped = self._of(values)
        if shaped.refused is not None:
            raise ValueError(f"{shaped.refused}; it can be computed one layer after the other")
        return {shaped.key: shaped.layout.rows(values, tasks)}

    def replaced(self, packed: Params, values: Params) -> Params:
        """Packed parameters with other `values` of some of them: [*shape], which all tasks share, or [t, *shape]."""
        if not values:
            return packed
        ((key, row),) = packed.items()
        return {key: self._packed[key].layout.replaced(row, values)}

    def unpack(self, packed: Params) -> Params:
        """Packed parameters, or sums of such [P], by name; and other parameters as they are."""
        if not is_packed(packed):
            return packed
        ((key, row),) = packed.items()
        return dict(zip(self._names, self._packed[key].layout.unpack(row), strict=True))

    def outputs(self, params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """What the last layer gives, [t, n, d].

        Args:
            params: packed.
            x: [t, n, …].
            support_x: the support set whose statistics normalise; None: those of `x`.
        """
        if torch.compiler.is_exporting():  # the layers one by one, in torch's operations
            if self._ignores_support or support_x is None:
                return apply_layers(self.layers, self.unpack(params), x)
            support_size, h = support_x.shape[1], torch.cat([support_x, x], dim=1)
            return apply_layers(self.layers, self.unpack(params), h, support_size)[:, support_size:]
        ((key, row),) = params.items()
        samples = _Tasks(self._packed[key], row, x, None if self._ignores_support else support_x)
        if torch.is_grad_enabled() and samples.x.requires_grad:
            return samples.by_layers(row)
        if torch.is_grad_enabled() and row.requires_grad:
            result: Tensor = _RowsToOutputs.apply(row, samples)
        else:
            result, _ = samples.outputs(row, keep=False)
        return samples.flattened(result)

    def metrics(
        self, params: Params, x: Tensor, y: Tensor, support_x: Tensor | None = None, *, twice: bool = False
    ) -> Metrics:
        """Each task's `loss` [t], and its `accuracy` for classes `y` [t, n], or `mse` for numbers `y` [t, n, d].

        Args:
            params: packed.
            x: [t, n, …].
            y: the targets.
            support_x: the support set whose statistics normalise; None: those of `x`.
            twice: keep what the second derivative of the loss needs.
        """
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None if self._ignores_support else support_x, y, twice=twice)
        if torch.is_grad_enabled() and row.requires_grad:
            loss, score = _RowsToLoss.apply(row, tasks)
        else:
            loss, score, _, _ = tasks.loss(row, gradient=False)
        return {"loss": loss, "mse" if y.is_floating_point() else "accuracy": score}

    def gradient(self, params: Params, x: Tensor, y: Tensor, *, twice: bool = False) -> Params:
        """The gradient of each task's loss by its packed parameters, in packed form. With `twice`, it has a derivative
        of its own. It is what `torch.autograd.grad` gives for the loss of `metrics`, in one call."""
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None, y, twice=twice)
        _, _, gradient, kept = tasks.loss(row.detach(), gradient=True)
        return {key: _WithDerivative.apply(row, gradient, kept, tasks) if twice else gradient}  # type: ignore[dict-item]

    def stepped(self, params: Params, x: Tensor, y: Tensor, rate: float, *, twice: bool = False) -> Params:
        """The packed parameters after a step of gradient descent, θ − rate · ∇L(θ), in one call. With `twice`, the
        derivative of the gradient counts too; else it is a constant."""
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None, y, twice=twice, rate=rate)
        _, _, after, kept = tasks.loss(row.detach(), gradient=True)
        return {key: _WithDerivative.apply(row, after, kept, tasks)}

    def _of(self, values: Sequence[Tensor]) -> ShapedNetwork:
        """The network for the shapes of these parameters."""
        shapes = tuple([tuple(value.shape) for value in values])
        if shapes not in self._shaped:  # asked again under the lock: two threads may come here at once
            with self._making:
                by_name = dict(zip(self._names, shapes, strict=True))
                shaped = self._shaped.get(shapes) or ShapedNetwork(self.layers, by_name, f"{PACKED}{len(self._shaped)}")
                self._packed[shaped.key] = self._shaped[shapes] = shaped
        return self._shaped[shapes]


class _Tasks:
    """The samples of some tasks, and what is to be predicted for them, as the kernels take them."""

    def __init__(
        self, shaped: ShapedNetwork, row: Tensor, x: Tensor, support_x: Tensor | None, y: Tensor | None = None, *,
        twice: bool = False, rate: float | None = None,
    ) -> None:  # fmt: skip
        """With a `rate`, the parameters after a step take the place of the gradient. Raises ValueError if samples,
        targets and parameters do not fit, or a derivative by the samples is wanted."""
        self.shaped, self.support_size = shaped, 0 if support_x is None else support_x.shape[1]
        self.x = (x if support_x is None else torch.cat([support_x, x], dim=1)).contiguous()
        # Kernels would read beyond the memory of samples, targets and parameters that do not fit.
        if (self.x.dtype, self.x.device) != (row.dtype, row.device):
            raise ValueError(
                f"inputs {self.x.dtype} on {self.x.device}: must be as the parameters, {row.dtype} on {row.device}"
            )
        kernels = kernels_for(row)
        assert kernels is not None
        self.plan = shaped.plan(kernels, self.x.shape[1], tuple(self.x.shape[2:]))
        if (self.support_size or self.x.shape[1]) * self.plan.fewest_pixels == 1:
            raise ValueError("batch norm of one sample of one pixel: a single number has no variance")
        if row.shape != (len(self.x), shaped.layout.size):
            raise ValueError(f"parameters of {len(row)} tasks: must be those of {len(self.x)}, as the inputs")
        self.twice, self.rate, self.outputs_read = twice, rate, self.plan.last.used
        self.y: Tensor | None = None
        # What a backward pass reads again is saved by autograd, which refuses it if it has been changed in place.
        self.read = [self.x]
        if y is not None:
            self._take(y, row.dtype)

    def _take(self, y: Tensor, dtype: torch.dtype) -> None:
        if torch.is_grad_enabled() and self.x.requires_grad:
            raise ValueError(
                "inputs with a graph: the compiled loss has no derivative by its inputs; detach them, or compute the "
                "outputs and a loss of them"
            )
        y = (y if y.is_floating_point() else y.long()).contiguous()
        if not y.is_floating_point() and (present := surroundings().present) is not None:
            self.outputs_read = min(present, self.outputs_read)
        tasks, samples, outputs = *self.x.shape[:2], self.outputs_read
        shape = (tasks, samples - self.support_size, *((outputs,) if y.is_floating_point() else ()))
        if y.shape != shape:
            raise ValueError(f"targets {list(y.shape)}: must be {list(shape)}, for inputs {list(self.x.shape)}")
        if y.is_floating_point() and y.dtype != dtype:
            raise ValueError(f"targets {y.dtype}: must be {dtype}, as the parameters")
        if not y.is_floating_point() and not y.is_cuda:  # there it would wait for the GPU, whose kernels give NaN
            least, most = torch.aminmax(y)
            if least < 0 or most >= outputs:
                raise ValueError(f"classes {int(least)} to {int(most)}: must be from 0 to {outputs - 1}")
        self.y = y
        self.read.append(y)

    def compute(self, what: str, row: Tensor, **tensors: Tensor | None) -> None:
        """Has the kernels compute; `NetworkCall` explains the tensors."""
        if row.stride(1) != 1 or row.stride(0) not in (0, row.shape[1]):  # neither dense nor one row for all tasks
            row = row.contiguous()
        call = NetworkCall(row, self.x, self.support_size, self.outputs_read, self.y, self.rate, **tensors)
        self.plan.kernels.network(what, self.plan.compiled.address, call)

    def outputs(self, row: Tensor, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The last values [t, n, pixels, channels], and with `keep` what their gradient needs."""
        tasks, last = row.shape[0], self.plan.last
        samples = self.x.shape[1] - self.support_size
        result = row.new_empty(tasks, samples, last.height * last.width, last.channels)
        kept = row.new_empty(tasks, self.plan.compiled.values) if keep else None
        self.compute("outputs", row, result=result, kept=kept)
        return result, kept

    def loss(self, row: Tensor, *, gradient: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Loss and score [t]; with `gradient`, the gradient [t, P] too, and what the product needs."""
        tasks = row.shape[0]
        loss, score = row.new_empty(tasks), row.new_empty(tasks)
        slope = row.new_empty(row.shape) if gradient else None
        kept = row.new_empty(tasks, self.plan.compiled.kept) if gradient and self.twice else None
        self.compute("loss", row, loss=loss, score=score, gradient=slope, kept=kept)
        return loss, score, slope, kept

    def flattened(self, result: Tensor) -> Tensor:
        """Last values as the layers give them, [t, n, d]."""
        return result[..., : self.plan.last.used].transpose(2, 3).flatten(2)

    def by_layers(self, row: Tensor) -> Tensor:
        """The outputs [t, n, d], by the layers one by one: they can be differentiated any number of times."""
        params = dict(zip(parameters_of(self.shaped.layers), self.shaped.layout.unpack(row), strict=True))
        return apply_layers(self.shaped.layers, params, self.x, self.support_size)[:, self.support_size :]


class _RowsToOutputs(Function):
    """(rows, tasks) → the last values [t, n, pixels, channels]."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, tasks: _Tasks) -> Tensor:
        result, kept = tasks.outputs(row, keep=True)
        ctx.save_for_backward(row, kept, *tasks.read)
        ctx.tasks = tasks
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        row, kept, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative follows, which the kernels of outputs do not have
            at = row.view_as(row)
            outputs, direction = ctx.tasks.by_layers(at), ctx.tasks.flattened(grads[0])
            (gradient,) = torch.autograd.grad(outputs, at, direction, create_graph=True)
            return gradient, None
        gradient = row.new_empty(row.shape)
        ctx.tasks.compute("outputs_gradient", row, kept=kept, result=grads[0].contiguous(), gradient=gradient)
        return gradient, None


class _RowsToLoss(Function):
    """(rows, tasks) → loss and score [t]."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, tasks: _Tasks) -> tuple[Tensor, Tensor]:
        # The gradient is computed at once, while a task's numbers are in the cache.
        loss, score, gradient, kept = tasks.loss(row, gradient=True)
        ctx.save_for_backward(row, gradient, kept, *tasks.read)
        ctx.tasks = tasks
        ctx.mark_non_differentiable(score)
        return loss, score

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        row, gradient, kept, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = _WithDerivative.apply(row, gradient, kept, ctx.tasks)
        return _times(grads[0], gradient), None


class _WithDerivative(Function):
    """(rows, their gradient or the rows after a step) → the same [t, P], with its derivative: H v of a gradient, and
    v − rate · H v of a step; v alone where nothing was kept for it, since the gradient of the step is a constant."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, value: Tensor, kept: Tensor | None, tasks: _Tasks) -> Tensor:
        ctx.save_for_backward(row, kept, *tasks.read)
        ctx.tasks = tasks
        return value.view_as(value)  # autograd takes no input for an output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        row, kept, *_ = ctx.saved_tensors
        direction, rate = grads[0], ctx.tasks.rate
        if rate is not None and kept is None:
            return direction, None, None, None
        if kept is None or torch.is_grad_enabled():  # third derivatives are those of the layers
            product = _product_by_layers(ctx.tasks, row, direction if rate is None else -rate * direction)
            return product if rate is None else direction + product, None, None, None
        direction = direction.contiguous()
        product = torch.empty_like(direction)
        ctx.tasks.compute("product", row, kept=kept, direction=direction, product=product)
        return product, None, None, None


_ones: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def one_for_each(losses: Tensor) -> Tensor:
    """A factor 1 for each of the losses [t]: as `grad_outputs` of `torch.autograd.grad` it stands for their sum."""
    # Always the same tensor, so that `_times` knows it by its address. A look at the value would wait for the GPU.
    key = losses.device, losses.dtype
    if key not in _ones:
        _ones[key] = torch.ones((), device=losses.device, dtype=losses.dtype)
    return _ones[key].expand(losses.shape)


def _times(factors: Tensor, gradient: Tensor) -> Tensor:
    """Each task's gradient times its factor; the gradient itself if all factors are one constant 1, as for a sum."""
    if factors.requires_grad or factors.stride(0) != 0:
        return factors.unsqueeze(1) * gradient
    one = _ones.get((factors.device, factors.dtype))
    is_one = one is not None and one.data_ptr() == factors.data_ptr()
    if is_one or (not factors.is_cuda and factors[0].item() == 1):
        return gradient
    return factors.unsqueeze(1) * gradient


def _product_by_layers(tasks: _Tasks, row: Tensor, direction: Tensor) -> Tensor:
    """The Hessian's product with `direction`, with a graph of its own if one is wanted."""
    assert tasks.y is not None
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        at = row.view_as(row) if row.requires_grad else row.detach().requires_grad_()
        loss = usual_metrics(tasks.by_layers(at)[..., : tasks.outputs_read], tasks.y)["loss"].sum()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        (product,) = torch.autograd.grad(slope, at, direction, create_graph=keep)
    return product
