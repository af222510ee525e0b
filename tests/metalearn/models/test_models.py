"""The residual networks against modules of torch.nn, and against those of torchvision."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from metalearn.algorithms.common.inner import SGD, last, support_descent
from metalearn.algorithms.common.losses import objective
from metalearn.models.module import module
from metalearn.models.resnet12 import resnet12
from metalearn.models.torchvision_classifier import torchvision_classifier
from metalearn.types import Batch, Model, Params
from tests.own_functions import Odd, Small
from tests.runs import slow

WIDTHS = (4, 6, 5, 7)
SMALLEST = {"ways": 5, "channels": 1, "image_size": 28}
SIZE = 18  # halved to 9, 4, 2, 1: one map of odd size


def small(*, activation: str = "leaky_relu", transductive: bool = True) -> Model:
    return resnet12(
        ways=3, channels=2, image_size=SIZE, widths=WIDTHS, activation=activation, transductive=transductive
    )


def vision(name: str, *, ways: int = 3, image_size: int = 32, channels: int = 3, transductive: bool = True) -> Model:
    return torchvision_classifier(
        name=name, ways=ways, channels=channels, image_size=image_size, transductive=transductive
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed + sum(shape)))


def drawn(model: Model, *, tasks: int, seed: int = 0) -> Params:
    """Separate float64 weights for every task; scales and shifts of the norms differ, too."""
    generator = seeded(seed)
    noise = lambda p: 0.1 * torch.randn(tasks, *p.shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return {name: p.double() + noise(p) for name, p in model.init(generator).items()}


def of_task(params: Params, task: int) -> Params:
    return {name: p[task : task + 1] for name, p in params.items()}


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class Unit(nn.Module):
    """A convolution and its norm."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, act: nn.Module) -> None:
        super().__init__()
        self.layer1 = Unit(inputs, outputs, 3)
        self.layer2, self.layer3 = (Unit(outputs, outputs, 3) for _ in range(2))
        self.shortcut = Unit(inputs, outputs, 1)
        self.act, self.pool = act, nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.act(self.layer2(self.act(self.layer1(x)))))
        return self.pool(self.act(h + self.shortcut(x)))


class ResNet12(nn.Module):
    """The network of Lee et al. 2019, for one task."""

    def __init__(self, channels: int, widths: tuple[int, ...], ways: int, act: nn.Module) -> None:
        super().__init__()
        self.block1, self.block2 = Block(channels, widths[0], act), Block(widths[0], widths[1], act)
        self.block3, self.block4 = Block(widths[1], widths[2], act), Block(widths[2], widths[3], act)
        self.head = nn.Linear(widths[3], ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block4(self.block3(self.block2(self.block1(x)))).mean(dim=(2, 3)))


def loaded(network: nn.Module, params: Params, task: int) -> nn.Module:
    """The module with the weights of a task, in float64 and training mode; its running statistics stay."""
    assert set(params) == {name for name, _ in network.named_parameters()}
    network.double().load_state_dict({name: p[task] for name, p in params.items()}, strict=False)
    return network.train()


# ResNet-12


@pytest.mark.parametrize(
    ("activation", "act"), [("leaky_relu", nn.LeakyReLU(0.1)), ("relu", nn.ReLU()), ("softplus", nn.Softplus())]
)
def test_resnet12_is_the_module_of_every_task(activation: str, act: nn.Module) -> None:
    model = small(activation=activation)
    params, x = drawn(model, tasks=3), normal(3, 5, 2, SIZE, SIZE)
    reference = [loaded(ResNet12(2, WIDTHS, 3, act), params, task)(x[task]) for task in range(3)]
    assert_same(model.apply(params, x), torch.stack(reference))


@pytest.mark.parametrize("known", [0, 3])
def test_resnet12_is_its_stages_each_with_its_own_parameters(known: int) -> None:
    model = small(transductive=False)
    params, x = drawn(model, tasks=2), normal(2, 7, 2, SIZE, SIZE)
    assert [stage.name for stage in model.stages] == ["block1", "block2", "block3", "block4", "head"]
    assert [name for stage in model.stages for name in stage.params] == list(params)
    h = x
    for stage in model.stages:
        h = stage.apply({name: params[name] for name in stage.params}, h, known)
    assert torch.equal(h[:, known:], model.apply(params, x[:, known:], x[:, :known]))


def test_resnet12_has_the_papers_size_and_uses_the_generator() -> None:
    model = resnet12(ways=5, channels=3, image_size=84)
    params = model.init(seeded(1))
    assert sum(p.numel() for name, p in params.items() if not name.startswith("head")) == 12_424_320
    variance = params["block3.layer2.conv.weight"].var().item()
    assert variance == pytest.approx(2 / (320 * 9), rel=0.01)
    small_model = small()
    first, again, other = (small_model.init(seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["block1.layer1.conv.weight"], other["block1.layer1.conv.weight"])


def test_resnet12_counts_the_outputs_of_its_convolutions() -> None:
    floats = 0

    def count(layer: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal floats
        floats += output.numel() // 2

    network = ResNet12(2, WIDTHS, 3, nn.ReLU())
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(count)
    network(torch.zeros(2, 2, SIZE, SIZE))
    assert small().activations == floats


# Normalisation by the support set, for both kinds of networks


def resnet12_case(transductive: bool) -> tuple[Model, Tensor, Tensor]:
    return small(transductive=transductive), normal(2, 4, 2, SIZE, SIZE), normal(2, 3, 2, SIZE, SIZE)


def mobilenet_case(transductive: bool) -> tuple[Model, Tensor, Tensor]:
    """Its norms have an epsilon of 1e-3."""
    model = vision("mobilenet_v3_small", channels=1, transductive=transductive)
    return model, normal(2, 4, 1, 33, 33), normal(2, 3, 1, 33, 33)


Case = Callable[[bool], tuple[Model, Tensor, Tensor]]
CASES = [resnet12_case, mobilenet_case]


@pytest.mark.parametrize("case", CASES)
def test_queries_do_not_see_each_other_unless_transductive(case: Case) -> None:
    for transductive in (False, True):
        model, x, support = case(transductive)
        assert model.transductive is transductive
        params = drawn(model, tasks=2)
        others = torch.cat([x[:, :1], 3 * x[:, 1:].flip(1) + 1], dim=1)
        change = (model.apply(params, x, support) - model.apply(params, others, support))[:, 0].abs().max()
        assert change > 1e-3 if transductive else change < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_a_query_that_repeats_a_support_image_has_its_outputs(case: Case) -> None:
    model, x, support = case(False)
    params = drawn(model, tasks=2)
    repeated = torch.cat([x, support[:, 1:2]], dim=1)
    expected = model.apply(params, support)[:, 1]
    assert_same(model.apply(params, repeated, support)[:, -1], expected)
    assert (model.apply(params, repeated)[:, -1] - expected).abs().max() > 1e-3
    assert_same(model.apply(params, x, support[:, :0]), model.apply(params, x))


# torchvision


@pytest.mark.parametrize("channels", [3, 1])
def test_resnet18_is_torchvisions_in_training_mode(channels: int) -> None:
    model = vision("resnet18", channels=channels)
    params, x = drawn(model, tasks=2), normal(2, 4, channels, 32, 32)
    plain = models.resnet18(num_classes=3)
    pictures = torch.cat([x] * (3 // channels), dim=2)
    theirs = [loaded(plain, params, task)(pictures[task]) for task in range(2)]
    assert_same(model.apply(params, x), torch.stack(theirs))


def test_resnet18_by_support_is_torchvisions() -> None:
    """Two passes: the first puts the support set's statistics into the norms, the second computes the queries."""
    model = vision("resnet18", transductive=False)
    params, x, support = drawn(model, tasks=1), normal(1, 4, 3, 32, 32), normal(1, 6, 3, 32, 32)
    plain = loaded(models.resnet18(num_classes=3), params, 0)

    def remember(layer: nn.BatchNorm2d, inputs: tuple[Tensor, ...]) -> None:
        layer.running_mean = inputs[0].mean(dim=(0, 2, 3))
        layer.running_var = inputs[0].var(dim=(0, 2, 3), correction=0)

    hooks = [m.register_forward_pre_hook(remember) for m in plain.eval().modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        plain(support[0])
        for hook in hooks:
            hook.remove()
        assert_same(model.apply(params, x, support)[0], plain(x[0]))


def test_a_torchvision_model_is_pure() -> None:
    state = torch.get_rng_state()
    model = vision("mobilenet_v3_small", transductive=False)
    first, again, other = (model.init(seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["classifier.0.weight"], other["classifier.0.weight"])
    generator = seeded(1)
    assert not torch.equal(model.init(generator)["classifier.0.weight"], model.init(generator)["classifier.0.weight"])

    params, x, support = drawn(model, tasks=2), normal(2, 4, 3, 32, 32), normal(2, 3, 3, 32, 32)
    before = copy.deepcopy((params, x, support))
    plain, by_support = model.apply(params, x), model.apply(params, x, support)
    model.apply(drawn(model, tasks=2, seed=9), support)
    assert torch.equal(model.apply(params, x), plain)
    assert torch.equal(model.apply(params, x, support), by_support)
    assert all(torch.equal(params[name], before[0][name]) for name in params)
    assert torch.equal(x, before[1]) and torch.equal(support, before[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.requires_grad for p in first.values())


@pytest.mark.parametrize(
    ("name", "transductive"),
    [
        ("mobilenet_v3_small", False),
        ("resnet18", True),
        pytest.param("mobilenet_v3_small", True, marks=slow),
        pytest.param("resnet18", False, marks=slow),
    ],
)
def test_torchvisions_meta_gradient_is_a_finite_difference(name: str, transductive: bool) -> None:
    """A finite difference of the query loss after an inner step; the gradient goes through the norms' statistics."""
    model = vision(name, transductive=transductive)
    params = {key: p.double() for key, p in model.init(seeded(0)).items()}
    y = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])
    support, query = Batch(normal(1, 8, 3, 32, 32), y), Batch(normal(1, 8, 3, 32, 32, seed=1), y)
    generator = seeded(5)
    direction = {
        key: torch.randn(p.shape, dtype=p.dtype, generator=generator) * (p.std(correction=0) + 0.1)
        for key, p in params.items()
    }

    def after_a_step(theta: Params, order: int) -> Tensor:
        adapted = last(support_descent(model, theta, support, inner=SGD, rate=0.01, steps=1, order=order))
        return objective(model.apply(adapted, query.x, support.x), query.y)["loss"].sum()

    def along(order: int) -> float:
        theta = {key: p.detach().requires_grad_() for key, p in params.items()}
        gradient = torch.autograd.grad(after_a_step(theta, order), list(theta.values()))
        return float(sum((g * direction[key]).sum() for key, g in zip(theta, gradient, strict=True)))

    def at(distance: float) -> float:
        return float(after_a_step({key: p + distance * direction[key] for key, p in params.items()}, 0))

    difference = (at(1e-8) - at(-1e-8)) / 2e-8
    assert along(2) == pytest.approx(difference, rel=1e-4)
    assert along(1) != pytest.approx(difference, rel=1e-3)


def test_a_torchvision_model_counts_the_outputs_of_its_layers() -> None:
    stem = 3 * 64 * 16**2 + 64 * 8**2  # convolution, norm, activation; pooling
    first = 2 * 6 * 64 * 8**2  # two blocks of two convolutions, norms and activations
    others = sum(14 * width * size**2 for width, size in [(128, 4), (256, 2), (512, 1)])  # with a shortcut more
    model = vision("resnet18", ways=7)
    assert model.activations == stem + first + others + 512 + 7
    assert model.stages == ()


@pytest.mark.parametrize("name", ["googlenet", "densenet121"])
def test_every_torchvision_parameter_affects_the_outputs(name: str) -> None:
    """One of the two has auxiliary outputs in torchvision."""
    model = vision(name)
    params = {key: p.unsqueeze(0).requires_grad_() for key, p in model.init(seeded(0)).items()}
    outputs = model.apply(params, normal(1, 2, 3, 32, 32).float())
    assert outputs.shape == (1, 2, 3)
    torch.autograd.grad(outputs.square().sum(), list(params.values()))


# Your own network


def own(target: str, *, transductive: bool = True, vectorize: bool | Literal["auto"] = "auto", **options: Any) -> Model:
    network = {"_target_": target, **options}
    return module(network=network, channels=3, image_size=32, transductive=transductive, vectorize=vectorize)


def test_an_own_module_equals_torchvisions_model_of_that_name() -> None:
    ours, theirs = own("torchvision.models.resnet18", num_classes=3), vision("resnet18")
    params, x = drawn(theirs, tasks=2), normal(2, 4, 3, 32, 32)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.init(seeded(1)).values(), theirs.init(seeded(1)).values(), strict=True)
    )
    one_by_one = own("torchvision.models.resnet18", num_classes=3, vectorize=False)
    assert torch.equal(one_by_one.apply(params, x), theirs.apply(params, x))
    assert_same(ours.apply(params, x), theirs.apply(params, x))  # torch.vmap may round in another way


def test_convolutions_by_torch_are_noted_and_right() -> None:
    """Groups, dilation, or a padding by name, by reflection or of two sizes need torch; one convolution is ours."""
    model = own("tests.own_functions.Small", ways=3)
    assert model.note.startswith("Small: 4 of 5 convolutions are computed by torch")
    assert "convs.1, convs.2, convs.3, …" in model.note
    assert vision("resnet18").note == ""
    params, x = drawn(model, tasks=2), normal(2, 4, 3, 32, 32)
    reference = [loaded(Small(ways=3), params, task)(x[task]) for task in range(2)]
    assert_same(model.apply(params, x), torch.stack(reference))


def test_shared_parameters_and_other_layers_stay() -> None:
    """A convolution that doubles, one that is registered twice, and tensors made in the forward pass."""
    model = own("tests.own_functions.Odd", kind="shared")
    assert model.note.startswith("Odd: 1 of 2 convolutions")
    params, x = drawn(model, tasks=2), normal(2, 4, 3, 32, 32)
    assert list(params) == ["conv.weight", "conv.bias", "twice.weight", "twice.bias"]
    for task in range(2):
        network = Odd(kind="shared").double()
        network.load_state_dict({name: p[task] for name, p in params.items()}, strict=False)
        assert_same(model.apply(of_task(params, task), x[task : task + 1])[0], network(x[task]))
