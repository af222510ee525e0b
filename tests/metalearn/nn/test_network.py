"""The compiled network: the same numbers as its layers one by one, task by task, and nothing beyond its memory."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distributed.reduce import tree_sum
from metalearn.algorithms.common.losses import objective
from metalearn.algorithms.maml import maml
from metalearn.algorithms.protonet import protonet
from metalearn.algorithms.reptile import reptile
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.models.resnet12 import resnet12
from metalearn.nn.backends.c import CompiledPlan
from metalearn.nn.layers import (
    Activation,
    ChannelsLast,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Mean,
    Norm,
    Residual,
    apply_layers,
    parameters_of,
    per_task,
)
from metalearn.nn.network import MOST_PLANS, CompiledNetwork, is_packed, sum_of_tasks
from metalearn.types import Batch, Episode, Model, Params
from tests.kernels import require_kernels


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    require_kernels(torch.float64)


TASKS, WAYS = 3, 5


class Case(NamedTuple):
    """A factory of networks for classes, its options, and the images that they take."""

    factory: Callable[..., Model]
    channels: int
    size: int
    options: dict[str, Any]

    def model(self, transductive: bool = True) -> Model:
        return self.factory(
            ways=WAYS, channels=self.channels, image_size=self.size, transductive=transductive, **self.options
        )


CASES = {
    "conv4": Case(conv4, 1, 28, {"filters": 16}),
    "conv4, smooth, odd sizes": Case(conv4, 2, 13, {"filters": 20, "activation": "softplus"}),
    "conv4, pooled": Case(conv4, 3, 21, {"filters": 24, "downsample": "pool"}),
    "resnet12": Case(resnet12, 3, 17, {"widths": (4, 16, 20, 8)}),
    "resnet12, smooth": Case(resnet12, 1, 16, {"widths": (4, 8, 8, 8), "activation": "softplus"}),
}
SMALL, SMOOTH = CASES["conv4"], Case(conv4, 1, 28, {"filters": 16, "activation": "softplus"})
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def network_of(model: Model) -> CompiledNetwork:
    assert isinstance(model.network, CompiledNetwork)
    return model.network


def start(model: Model, dtype: torch.dtype = torch.float64) -> Params:
    """Parameters that differ between all layers and channels."""
    generator = torch.Generator().manual_seed(1)
    params = model.init(generator)
    return {
        name: (value + 0.1 * torch.randn(value.shape, generator=generator)).to(dtype) for name, value in params.items()
    }


def images(case: Case, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images and classes of all tasks."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TASKS, count, case.channels, case.size, case.size)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(WAYS, (TASKS, count), generator=generator)


def two_orders(loss: Callable[[Params, bool], Tensor], theta: Params) -> list[Tensor]:
    """The losses, the gradient of their weighted sum, and the derivative of that gradient's square."""
    losses = loss(theta, True)
    weights = torch.arange(1, TASKS + 1).to(losses)
    grads = torch.autograd.grad((losses * weights).sum(), list(theta.values()), create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), list(theta.values()))
    return [losses.detach(), *(grad.detach() for grad in grads), *second]


def both(model: Model, theta: Params, x: Tensor, y: Tensor, support_x: Tensor | None) -> list[list[Tensor]]:
    """`two_orders` of the layers, and of the compiled network."""
    network = network_of(model)

    def by_layers(theta: Params, twice: bool) -> Tensor:
        return objective(model.apply(per_task(theta, TASKS), x, support_x), y)["loss"]

    def as_a_whole(theta: Params, twice: bool) -> Tensor:
        return network.metrics(network.pack(theta, TASKS), x, y, support_x, twice=twice)["loss"]

    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    return [two_orders(loss, leaves) for loss in (by_layers, as_a_whole)]


@pytest.mark.parametrize("transductive", (True, False))
@every_case
def test_loss_and_two_derivatives_are_those_of_the_layers(case: Case, transductive: bool) -> None:
    model = case.model(transductive)
    theirs, ours = both(model, start(model), *images(case, 7), images(case, 5, seed=9)[0])
    for expected, value in zip(theirs, ours, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("activation", ("relu", "tanh"))
def test_regression_has_the_derivatives_of_the_layers(activation: str) -> None:
    model = mlp(inputs=2, outputs=3, hidden=(20, 7), activation=activation)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(TASKS, 7, size, generator=generator, dtype=torch.float64) for size in (2, 3))
    theirs, ours = both(model, start(model), x, y, None)
    for expected, value in zip(theirs, ours, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)


def test_float32_is_as_near_to_float64_as_the_layers_are() -> None:
    model, (x, y) = SMOOTH.model(), images(SMOOTH, 7)
    exact, _ = both(model, start(model), x, y, None)
    theirs, ours = both(model, start(model, torch.float32), x.float(), y, None)
    for value, by_layers, right in zip(ours, theirs, exact, strict=True):
        error = max(float((by_layers - right).abs().max()), 1e-6 * float(right.abs().max()))
        assert float((value - right).abs().max()) <= 3 * error


def test_the_third_derivative_is_that_of_the_layers() -> None:
    model = conv4(ways=WAYS, channels=1, image_size=8, filters=4, activation="softplus")
    network, params = network_of(model), start(model)
    x = torch.rand(TASKS, 5, 1, 8, 8, dtype=torch.float64)
    y = torch.arange(5).repeat(TASKS, 1)
    results = []
    for whole in (False, True):
        theta = {name: value.clone().requires_grad_() for name, value in params.items()}

        def loss(theta: Params, whole: bool = whole) -> Tensor:
            if whole:
                return network.metrics(network.pack(theta, TASKS), x, y, twice=True)["loss"].sum()
            return objective(model.apply(per_task(theta, TASKS), x), y)["loss"].sum()

        first = torch.autograd.grad(loss(theta), list(theta.values()), create_graph=True)
        square = sum((grad.square().sum() for grad in first), torch.zeros(()))
        second = torch.autograd.grad(square, list(theta.values()), create_graph=True)
        cubes = sum((grad.pow(3).sum() for grad in second), torch.zeros(()))
        results.append(torch.autograd.grad(cubes, list(theta.values())))
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("transductive", (True, False))
@every_case
def test_a_gradient_that_keeps_nothing_has_the_same_bits(case: Case, transductive: bool) -> None:
    model = case.model(transductive)
    network, (x, y), (support_x, _) = network_of(model), images(case, 7), images(case, 5, seed=9)
    packed = network.pack(start(model), TASKS)
    ((key, row),) = packed.items()
    row = row.contiguous().requires_grad_()
    losses = [network.metrics({key: row}, x, y, support_x, twice=twice)["loss"] for twice in (True, False)]
    keeps, keeps_nothing = (torch.autograd.grad(loss.sum(), row)[0] for loss in losses)
    assert torch.equal(keeps, keeps_nothing)
    with torch.no_grad():
        alone = network.metrics({key: row}, x, y, support_x)["loss"]
    assert all(torch.equal(alone, loss) for loss in losses)


@pytest.mark.parametrize("transductive", (True, False))
@every_case
def test_outputs_and_features_have_the_derivatives_of_the_layers(case: Case, transductive: bool) -> None:
    model, (x, _), (support_x, _) = case.model(transductive), images(case, 7), images(case, 5, seed=9)
    assert model.features is not None and model.body is not None
    for compiled, apply in ((network_of(model), model.apply), (model.body, model.features)):
        results = []
        for whole in (True, False):
            theta = {name: value.requires_grad_() for name, value in start(model).items()}
            if whole:
                outputs = compiled.outputs(compiled.pack(theta, TASKS), x, support_x)
            else:
                outputs = apply(per_task(theta, TASKS), x, support_x)
            weights = torch.randn(outputs.shape, dtype=outputs.dtype, generator=torch.Generator().manual_seed(1))
            loss = (weights * outputs.square()).sum()
            kept = torch.autograd.grad(loss, list(theta.values()), allow_unused=True, retain_graph=True)
            first = torch.autograd.grad(loss, list(theta.values()), create_graph=True, allow_unused=True)
            squares = sum((grad.square().sum() for grad in first if grad is not None), torch.zeros(()))
            second = torch.autograd.grad(squares, list(theta.values()), allow_unused=True)
            results.append([outputs, *kept, *first, *second])
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_outputs_without_a_graph_have_the_same_bits() -> None:
    model, (x, _), (support_x, _) = SMALL.model(transductive=False), images(SMALL, 7), images(SMALL, 5, seed=9)
    network = network_of(model)
    theta = {name: value.requires_grad_() for name, value in start(model).items()}
    packed = network.pack(theta, TASKS)
    with_graph = network.outputs(packed, x, support_x)
    with torch.no_grad():
        assert torch.equal(with_graph, network.outputs(packed, x, support_x))
        assert network.outputs(packed, x[:, :0], support_x).shape == (TASKS, 0, WAYS)


def test_the_input_derivative_is_the_layers_or_an_error() -> None:
    model, (x, y) = SMALL.model(), images(SMALL, 7)
    network, theta = network_of(model), start(model)
    gradients = []
    for whole in (True, False):
        leaf = x.clone().requires_grad_()
        outputs = (
            network.outputs(network.pack(theta, TASKS), leaf) if whole else model.apply(per_task(theta, TASKS), leaf)
        )
        gradients.append(torch.autograd.grad(outputs.square().sum(), leaf)[0])
    torch.testing.assert_close(*gradients)
    with pytest.raises(ValueError, match="no derivative by its inputs"):
        network.metrics(network.pack(theta, TASKS), leaf, y)
    with torch.no_grad():
        network.metrics(network.pack(theta, TASKS), leaf, y)


def test_a_network_of_one_layer_has_no_body() -> None:
    model = mlp(inputs=3, outputs=2, hidden=[])
    assert model.body is None and model.network is not None


@pytest.mark.parametrize("case", (SMALL, CASES["conv4, pooled"]), ids=("stride 2", "stride 1"))
def test_bits_do_not_depend_on_chunks_and_threads(case: Case) -> None:
    model = case.model()
    network, theta = network_of(model), start(model, torch.float32)
    x, y = images(case, 7)
    x = x.float()

    def gradient(chunk: slice) -> Tensor:
        ((key, row),) = network.pack(theta, len(x[chunk])).items()
        row = row.contiguous().requires_grad_()
        loss = network.metrics({key: row}, x[chunk], y[chunk], twice=True)["loss"]
        (first,) = torch.autograd.grad(loss.sum(), row, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), row)
        outputs = network.outputs({key: row}, x[chunk])
        (of_outputs,) = torch.autograd.grad(outputs.square().sum(), row)
        values = [loss.detach().unsqueeze(1), first.detach(), second, outputs.detach().flatten(1), of_outputs]
        return torch.cat(values, dim=1)

    threads, whole = torch.get_num_threads(), gradient(slice(None))
    assert torch.equal(whole, torch.cat([gradient(slice(task, task + 1)) for task in range(TASKS)]))
    try:
        for more in (2, 5):  # fewer and more than there are tasks
            torch.set_num_threads(more)
            assert torch.equal(whole, gradient(slice(None)))
    finally:
        torch.set_num_threads(threads)


OPTIONS: dict[Any, dict[str, Any]] = {
    maml: {"inner_lr": 0.4, "inner_steps": 2, "eval_steps": 2},
    reptile: {"inner_lr": 0.4, "inner_steps": 2, "eval_steps": 2, "inner_batch": None, "eval_batch": None},
    protonet: {},
}


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_batchs_gradient_has_equal_bits_in_all_chunks(algorithm: Any) -> None:
    model = SMALL.model()
    learner = algorithm(model=model, **OPTIONS[algorithm])
    generator, theta = torch.Generator().manual_seed(3), start(model, torch.float32)
    batches = [
        Batch(torch.rand(11, WAYS, 1, 28, 28, generator=generator), torch.arange(WAYS).repeat(11, 1)) for _ in range(2)
    ]

    def gradient(size: int) -> list[Tensor]:
        chunks = [Episode(*(Batch(*part) for part in parts)) for parts in zip(
            *(zip(batch.x.split(size), batch.y.split(size), strict=True) for batch in batches), strict=True
        )]  # fmt: skip
        return list(tree_sum([learner.meta_grad(theta, chunk, 1).grads for chunk in chunks]).values())

    alone = gradient(1)
    assert all(all(map(torch.equal, gradient(size), alone)) for size in (2, 4, 8, 16))


@every_case
def test_packed_parameters_come_back_and_padding_stays_zero(case: Case) -> None:
    model = case.model()
    network, theta = network_of(model), start(model)
    packed = network.pack(theta, 2)
    assert is_packed(packed) and not is_packed(theta)
    for key, value in network.unpack(packed).items():
        assert all(torch.equal(part, theta[key]) for part in value)
    (row,) = packed.values()
    row = row.contiguous().requires_grad_()
    x, y = images(case, 7)
    loss = network.metrics({next(iter(packed)): row}, x[:2], y[:2], twice=True)["loss"]
    (first,) = torch.autograd.grad(loss.sum(), row, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), row)
    used = sum(value.numel() for value in theta.values())
    for values in (row, first, second):
        assert (values[0] != 0).sum() <= used
    assert row.shape[1] >= used and row.shape[1] % 16 == 0


def test_what_does_not_fit_is_refused() -> None:
    model = SMALL.model()
    network, theta = network_of(model), start(model)
    x, y = images(SMALL, 6)
    packed = network.pack(theta, TASKS)
    wrong: dict[str, tuple[Tensor, Tensor]] = {
        "must be from 0 to 4": (x, y + 1),
        "must be \\[3, 6\\]": (x, y[:, :5]),
        "of 3 tasks": (x[:2], y[:2]),
        "must be as the parameters": (x.float(), y),
        "do not fit kernels conv1.weight of 1 channels": (x.repeat(1, 1, 2, 1, 1), y),
        "must be \\[3, 6, 5\\]": (x, y.double()),
        "must be \\[3, 0\\]": (x[:, :0], y),
        "takes images \\[channels, height, width\\], not \\[28\\]": (x[:, :, 0, 0], y),
    }
    for message, (inputs, targets) in wrong.items():
        with pytest.raises(ValueError, match=message):
            network.metrics(packed, inputs, targets)


def test_a_norm_of_a_single_number_is_refused() -> None:
    model = conv4(ways=WAYS, channels=1, image_size=12, filters=4)  # its last images have one pixel
    network, theta = network_of(model), start(model)
    x, y = torch.rand(TASKS, 1, 1, 12, 12, dtype=torch.float64), torch.zeros(TASKS, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a single number has no variance"):
        network.metrics(network.pack(theta, TASKS), x, y)
    assert network.metrics(network.pack(theta, TASKS), x.repeat(1, 2, 1, 1, 1), y.repeat(1, 2))["loss"].isfinite().all()


def test_calls_from_many_threads_do_not_disturb_each_other() -> None:
    model, (x, y) = SMALL.model(), images(SMALL, 7)
    network = network_of(model)
    packed = network.pack(start(model), TASKS)

    def gradient(_: int) -> Tensor:
        return next(iter(network.gradient(packed, x, y).values()))

    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(gradient, range(24))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 6, 7, 8, 13])
def test_sums_over_tasks_have_the_bits_of_torch_s_sums_in_pairs(tasks: int) -> None:
    values = torch.randn(tasks, 3, 20_011, generator=torch.Generator().manual_seed(tasks))
    with_graph = values.clone().requires_grad_()
    assert torch.equal(sum_of_tasks(values), sum_of_tasks(with_graph))
    assert sum_of_tasks(with_graph).requires_grad


@pytest.mark.parametrize("twice", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_step_at_once_has_the_bits_of_gradient_and_update(dtype: torch.dtype, twice: bool) -> None:
    model, (x, y) = SMOOTH.model(), images(SMOOTH, 7)
    network, x, rate = network_of(model), x.to(dtype), 0.3
    ((key, row),) = network.pack(start(model, dtype), TASKS).items()
    weights = torch.randn(row.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    results = []
    for at_once in (True, False):
        leaf = row.contiguous().requires_grad_()
        if at_once:
            after = network.stepped({key: leaf}, x, y, rate, twice=twice)[key]
        else:
            after = leaf.add(network.gradient({key: leaf}, x, y, twice=twice)[key], alpha=-rate)
        results.append((after, torch.autograd.grad((weights * after).sum(), leaf)[0]))
    for value, expected in zip(*results, strict=True):
        assert torch.equal(value, expected)


def test_the_second_derivative_of_a_step_is_that_of_the_layers() -> None:
    model = conv4(ways=WAYS, channels=1, image_size=8, filters=4, activation="softplus")
    network, x, y = network_of(model), torch.rand(1, 5, 1, 8, 8, dtype=torch.float64), torch.arange(5).repeat(1, 1)
    leaves = {name: value.requires_grad_() for name, value in start(model).items()}
    results = []
    for at_once in (True, False):
        if at_once:
            after = network.unpack(network.stepped(network.pack(leaves, 1), x, y, 0.3, twice=True))
        else:
            losses = objective(model.apply(per_task(leaves, 1), x), y)["loss"].sum()
            grads = torch.autograd.grad(losses, list(leaves.values()), create_graph=True)
            after = {name: p - 0.3 * g for (name, p), g in zip(leaves.items(), grads, strict=True)}
        first = torch.autograd.grad(
            sum((p.pow(3).sum() for p in after.values()), torch.zeros(())), list(leaves.values()), create_graph=True
        )
        squares = sum((g.square().sum() for g in first), torch.zeros(()))
        results.append(torch.autograd.grad(squares, list(leaves.values())))
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


@every_case
def test_parameters_come_back_from_a_row_as_torch_orders_them(case: Case) -> None:
    model = case.model()
    theta = start(model)
    ((key, row),) = network_of(model).pack(theta, 1).items()
    by_torch = network_of(model).unpack({key: row.contiguous().requires_grad_()})
    by_kernels = network_of(model).unpack({key: row[0].contiguous()})
    for name, value in theta.items():
        assert torch.equal(by_kernels[name], value) and torch.equal(by_torch[name][0], value)
    assert int((row != 0).sum()) == sum(int((value != 0).sum()) for value in theta.values())


def test_an_mlp_takes_images_in_the_order_of_their_dimensions() -> None:
    model = mlp(inputs=30, outputs=4)
    theta, x = start(model), torch.rand(TASKS, 6, 2, 3, 5, dtype=torch.float64)
    compiled = model.apply(network_of(model).pack(theta, TASKS), x)
    for inputs in (x, x.flatten(2)):
        torch.testing.assert_close(model.apply(per_task(theta, TASKS), inputs), compiled, rtol=0, atol=1e-12)


def test_backward_passes_of_one_output_do_not_disturb_each_other() -> None:
    model = SMALL.model()
    theta = {name: value.requires_grad_() for name, value in start(model).items()}
    x, _ = images(SMALL, 10)
    outputs = network_of(model).outputs(network_of(model).pack(theta, TASKS), x)
    directions = [torch.randn_like(outputs) for _ in range(8)]

    def gradient(direction: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, list(theta.values()), direction, retain_graph=True)

    expected = [gradient(direction) for direction in directions]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            for found, wanted in zip(threads.map(gradient, directions), expected, strict=True):
                assert all(map(torch.equal, found, wanted))


def test_only_the_plans_that_were_used_last_are_kept() -> None:
    model = SMALL.model()
    network, theta = network_of(model), start(model)

    def outputs(samples: int) -> Tensor:
        x = torch.ones(1, samples, 1, 28, 28, dtype=torch.float64)
        return network.outputs(network.pack(theta, 1), x)

    def plans() -> int:
        gc.collect()
        return sum(type(each) is CompiledPlan for each in gc.get_objects())

    before, first = plans(), outputs(2)
    for samples in range(3, 4 * MOST_PLANS):
        outputs(samples)
    assert plans() == before + MOST_PLANS
    assert torch.equal(outputs(2), first)


@pytest.mark.parametrize("rate", [0.0, 1e-46])
def test_a_step_at_a_rate_without_effect_leaves_the_parameters(rate: float) -> None:
    model = SMALL.model()
    network, theta = network_of(model), {name: value.float() for name, value in start(model).items()}
    x, y = images(SMALL, 6)
    packed = network.pack(theta, TASKS)
    ((key, row),) = packed.items()
    assert torch.equal(network.stepped(packed, x.float(), y, rate)[key], row)


def test_inputs_changed_after_the_forward_pass_are_refused() -> None:
    model = mlp(inputs=3, outputs=2)
    theta = {name: value.requires_grad_() for name, value in start(model).items()}
    x, y = (torch.rand(TASKS, 6, size, dtype=torch.float64) for size in (3, 2))
    packed = network_of(model).pack(theta, TASKS)
    for value in (network_of(model).outputs(packed, x), network_of(model).metrics(packed, x, y)["loss"]):
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()


HEAD = Linear("w", "b")
CONVOLUTION, NORM = Convolution("c", stride=1, padding=1), Norm("s", "h", slope=0.0)


SHAPES = {"c": (16, 1, 3, 3), "s": (16,), "h": (16,), "w": (4, 16), "b": (4,), "k": (16, 16, 9, 9)}


def drawn(layers: tuple[Layer, ...]) -> Params:
    return {name: torch.rand(SHAPES[name], dtype=torch.float64) for name in parameters_of(layers)}


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((Flatten(), Activation("tanh"), HEAD), "begins with Activation"),
        ((ChannelsLast(), NORM, Mean(), HEAD), "begins with Norm"),
        ((ChannelsLast(), Residual((CONVOLUTION,), ()), Mean(), HEAD), "a branch of a sum"),
        ((ChannelsLast(), CONVOLUTION, Residual((NORM,), ()), Mean(), HEAD), "a norm of this network shares its input"),
        ((ChannelsLast(), CONVOLUTION, Convolution("k", padding=4), Mean(), HEAD), "kernels k have 9×9 pixels"),
        ((ChannelsLast(), CONVOLUTION, *[Activation("tanh")] * 93, Mean(), HEAD), "has 97 layers; 96 can be"),
    ],
    ids=["activation", "norm", "sum", "shared", "taps", "layers"],
)
def test_layers_that_cannot_be_compiled_are_computed_one_by_one(layers: tuple[Layer, ...], reason: str) -> None:
    network, params = CompiledNetwork(layers), drawn(layers)
    assert reason in str(network.refusal(params)) and not network.computes(params)
    with pytest.raises(ValueError, match=reason):
        network.pack(params, 1)


def test_a_sum_of_a_value_with_itself_has_twice_its_gradient() -> None:
    layers: tuple[Layer, ...] = (ChannelsLast(), CONVOLUTION, NORM, Residual((), ()), Mean(), HEAD)
    network, x = CompiledNetwork(layers), torch.rand(TASKS, 6, 1, 4, 4, dtype=torch.float64)
    y = torch.arange(6).remainder(4).repeat(TASKS, 1)
    leaves = {name: value.requires_grad_() for name, value in drawn(layers).items()}

    def by_layers(theta: Params, twice: bool) -> Tensor:
        return objective(apply_layers(layers, per_task(theta, TASKS), x), y)["loss"]

    def as_a_whole(theta: Params, twice: bool) -> Tensor:
        return network.metrics(network.pack(theta, TASKS), x, y, twice=twice)["loss"]

    for expected, value in zip(two_orders(by_layers, leaves), two_orders(as_a_whole, leaves), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)


def test_the_largest_network_that_compiles_is_compiled() -> None:
    layers = (ChannelsLast(), CONVOLUTION, Convolution("k", padding=3), *[Activation("tanh")] * 91, Mean(), HEAD)
    params = drawn(layers) | {"k": torch.rand(16, 16, 7, 7, dtype=torch.float64) / 100}
    network, x = CompiledNetwork(layers), torch.rand(1, 6, 1, 4, 4, dtype=torch.float64)
    assert network.refusal(params) is None and network.computes(params)
    one_by_one = apply_layers(layers, per_task(params, 1), x)
    torch.testing.assert_close(network.outputs(network.pack(params, 1), x), one_by_one)


def test_a_network_that_cannot_be_compiled_learns_all_the_same() -> None:
    deep, flat = (mlp(inputs=3, outputs=2, hidden=[8] * count) for count in (50, 1))
    params = start(deep)
    assert "has 101 layers" in str(network_of(deep).refusal(params))
    x, y = (torch.rand(TASKS, 6, size, dtype=torch.float64) for size in (3, 2))
    algorithm = maml(model=deep, inner_lr=0.1, inner_steps=2, eval_steps=2)
    found = algorithm.meta_grad(params, Episode(Batch(x, y), Batch(x, y)), 0)
    assert found.grads.keys() == params.keys() and network_of(flat).refusal(start(flat)) is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((ChannelsLast(), CONVOLUTION, MaxPool(), MaxPool(), MaxPool(), Mean(), HEAD), "1×1 pixels cannot be pooled"),
        ((ChannelsLast(), CONVOLUTION, Residual((MaxPool(),), ()), Mean(), HEAD), "equal shapes"),
    ],
    ids=["pool", "shapes"],
)
def test_inputs_that_do_not_fit_the_layers_are_refused(layers: tuple[Layer, ...], message: str) -> None:
    network = CompiledNetwork(layers)
    with pytest.raises(ValueError, match=message):
        network.outputs(network.pack(drawn(layers), 1), torch.rand(1, 6, 1, 4, 4, dtype=torch.float64))
