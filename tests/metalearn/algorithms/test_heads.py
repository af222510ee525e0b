"""The parts of a model that algorithms ask for: features, head, and the parameters of the norms."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

from metalearn.algorithms.anil import anil
from metalearn.models.common.adapter import model_of
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.models.module import module
from metalearn.models.resnet12 import resnet12
from metalearn.models.torchvision_classifier import torchvision_classifier
from metalearn.nn.surroundings import of_reals
from metalearn.types import Model, Params
from tests.metalearn.learners import FLOAT64, random

SHAPE = {"ways": 3, "channels": 1, "image_size": 32}


class Headless(nn.Module):
    """Its outputs come from a linear layer, but through a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32 * 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1)).tanh()


class Tied(nn.Module):
    """Its head shares its weights with the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32 * 32, 3)
        self.second = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x.flatten(1))))


class Twice(Headless):
    """Its last layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32 * 32, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.last(self.first(x.flatten(1))))


class Scaled(Headless):
    """The outputs of its last layer are changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1)).mul_(3)


class Seen(Headless):
    """The inputs of its last layer depend on the weights of that layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1) + self.last.weight.sum())


class Unbiased(Headless):
    """Its head has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32 * 32, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1).tanh())


def own(name: str, transductive: bool = True) -> Model:
    network = {"_target_": f"tests.metalearn.algorithms.test_heads.{name}"}
    return module(network=network, channels=1, image_size=32, transductive=transductive)


MODELS: dict[str, Callable[[bool], Model]] = {
    "conv4-stride": lambda transductive: conv4(**SHAPE, filters=8, transductive=transductive),
    "conv4-pool": lambda transductive: conv4(**SHAPE, filters=8, downsample="pool", transductive=transductive),
    "resnet12": lambda transductive: resnet12(**SHAPE, widths=(4, 4, 8, 8), transductive=transductive),
    "mlp": lambda transductive: mlp(inputs=32 * 32, outputs=3, hidden=(7, 5)),
    "linear": lambda transductive: mlp(inputs=32 * 32, outputs=3, hidden=()),
    "resnet18": lambda transductive: torchvision_classifier(**SHAPE, name="resnet18", transductive=transductive),
    "mobilenet": lambda transductive: torchvision_classifier(
        **SHAPE, name="mobilenet_v3_small", transductive=transductive
    ),
    "unbiased": lambda transductive: own("Unbiased", transductive),
}


def per_task_params(model: Model, tasks: int) -> Params:
    drawn = model.init(Generator().manual_seed(0)).items()
    return {
        name: value.to(FLOAT64) + 0.1 * random(tasks, *value.shape, seed=number)
        for number, (name, value) in enumerate(drawn)
    }


@pytest.mark.parametrize("transductive", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_the_features_gives_the_outputs(name: str, transductive: bool) -> None:
    model = MODELS[name](transductive)
    assert model.features is not None and model.head is not None
    params = per_task_params(model, 2)
    x, support = random(2, 4, 1, 32, 32, seed=1), random(2, 5, 1, 32, 32, seed=2)
    body = {key: value for key, value in params.items() if key not in model.head.params}
    features = model.features(body, x, support)
    assert features.shape[:2] == (2, 4) and features.dim() == 3 and 0 < len(model.head.params) <= 2
    torch.testing.assert_close(model.head.apply(params, features, 0), model.apply(params, x, support))


def test_norms_are_the_scales_and_shifts() -> None:
    for name, count in (("conv4-stride", 8), ("resnet12", 32), ("mlp", 0), ("resnet18", 40), ("unbiased", 0)):
        model = MODELS[name](True)
        params = model.init(Generator().manual_seed(0))
        assert len(set(model.norms)) == count
        for norm in model.norms:
            assert params[norm].dim() == 1 and (params[norm] == (1 if norm.endswith("weight") else 0)).all()


@pytest.mark.parametrize("name", ["Headless", "Tied", "Twice", "Scaled", "Seen"])
def test_a_network_without_a_head_is_refused_where_one_is_needed(name: str) -> None:
    model = own(name)
    assert model.head is None
    with pytest.raises(ValueError, match="come from one linear layer"):
        anil(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1)


def test_a_network_that_is_one_linear_layer_is_its_own_head() -> None:
    model = model_of(lambda: nn.Linear(4, 3), name="Linear", inputs=of_reals((4,)), transductive=True, advice="")
    assert model.features is not None and model.head is not None and model.head.params == ("weight", "bias")
    params, x = per_task_params(model, 2), random(2, 5, 4, seed=1)
    torch.testing.assert_close(model.features(params, x), x)
    torch.testing.assert_close(model.head.apply(params, x, 0), model.apply(params, x))
