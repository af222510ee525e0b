"""What is refused: settings of models, networks of one's own that are no pure functions, inputs, and tables."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from metalearn.api.objects import model_from
from metalearn.models import lite0 as packages
from metalearn.models.common.adapter import model_of
from metalearn.models.mlp import mlp
from metalearn.models.module import from_note, module
from metalearn.models.resnet12 import resnet12
from metalearn.models.table import table
from metalearn.models.torchvision_classifier import torchvision_classifier
from metalearn.nn.layers import per_task
from metalearn.nn.surroundings import PassSeeds, of_reals, packed, surrounded
from metalearn.types import Batch, Model

SMALLEST: dict[str, Any] = {"ways": 5, "channels": 1, "image_size": 28}


def vision(name: str, *, image_size: int = 32, channels: int = 3) -> Model:
    return torchvision_classifier(name=name, ways=3, channels=channels, image_size=image_size)


def own(target: str, *, transductive: bool = True, **options: Any) -> Model:
    network = {"_target_": f"tests.own_functions.{target}", **options}
    return module(network=network, channels=3, image_size=32, transductive=transductive)


def adapted(make: Callable[[], nn.Module], shape: tuple[int, ...] = (4,), **options: Any) -> Model:
    return model_of(
        make, name="Net", inputs=of_reals(shape), advice="", **({"transductive": True, "dropout": True} | options)
    )


class Gives(nn.Module):
    """A layer whose outputs are changed, in training alone or always. It counts in a buffer."""

    def __init__(self, give: Callable[["Gives", Tensor], Any], *, always: bool = True) -> None:
        super().__init__()
        self.linear, self.give, self.always, self.torch = nn.Linear(4, 6), give, always, Generator()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.give(self, y) if self.always or self.training else y


IN_TRAINING: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "numpy": (lambda net, y: y * np.random.random(), "draws random numbers"),
    "python": (lambda net, y: y * random.random(), "draws random numbers"),
    "torch.Generator": (lambda net, y: y * torch.rand(1, generator=net.torch), "draws random numbers"),
    "buffer": (lambda net, y: y + 0 * net.seen.add_(1), "changes its buffer seen"),
    "tuple": (lambda net, y: (y, y), "gives a tuple"),
    "fails": (lambda net, y: y @ y.new_zeros(3, 3), "fails .*type dropout=false"),
}
"""Networks that draw in training by something else than torch's global random numbers, or remember what they saw."""


@pytest.mark.parametrize("how", IN_TRAINING)
def test_training_that_is_no_function_of_a_seed_is_refused(how: str) -> None:
    give, named = IN_TRAINING[how]
    with pytest.raises(ValueError, match=f"^Net: in training mode, it {named}"):
        adapted(lambda: Gives(give, always=False))
    model = adapted(lambda: Gives(give, always=False), dropout=False)
    params = per_task(model.init(Generator().manual_seed(0)), 1)
    with surrounded(seeds=PassSeeds(1, 1, [0])):
        assert torch.equal(*(model.apply(params, torch.ones(1, 2, 4)) for _ in range(2)))


class Folded(nn.Module):
    """The two halves of each picture are pictures of their own in the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.stack(x.split(4, dim=3), dim=1).flatten(0, 1)
        return self.head(self.norm(halves).square().mean(dim=(1, 2, 3)).view(len(x), 2))  # type: ignore[no-any-return]


def folded() -> None:
    """A norm that cannot tell the support set from queries; with either alone, it can."""
    x = torch.randn(1, 4, 1, 8, 8, generator=Generator().manual_seed(0))
    alone, known = (adapted(Folded, (1, 8, 8), transductive=way) for way in (True, False))
    params = per_task(alone.init(Generator().manual_seed(0)), 1)
    assert alone.apply(params, x, x).isfinite().all() and known.apply(params, x).isfinite().all()
    known.apply(params, x, x)


def three_of_two() -> None:
    """An algorithm computes three tasks in a chunk of two."""
    model = adapted(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    with surrounded(seeds=PassSeeds(1, 1, [0, 1])):
        model.apply(per_task(model.init(Generator()), 3), torch.zeros(3, 2, 4))


def recomputes(reentrant: bool) -> Callable[[], object]:
    """A part is computed again in the backward pass, when the weights of the task are no longer there."""
    return partial(Gives, lambda net, y: checkpoint(lambda h: h @ net.linear.weight, y, use_reentrant=reentrant))


def complex_weight() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return layer


def old_weight_norm() -> None:
    network = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 2)))
    network(torch.ones(1, 4))
    model_from(network, {"shape": [4], "transductive": True, "dropout": True})


def drawn_buffer() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))


def without_packages() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "PACKAGES", ("no_such_package", "nor_this"))
        packages.lite0(**SMALLEST)


def reads(head: str = "classes", classes: int = 10, width: int = 1, real: bool = False, **keys: Any) -> None:
    """A network reads a table of three classes, or of `width` real numbers a row."""
    model = table(**({"head": head, "classes": classes, "width": 16, "heads": 2, "layers": 2, "bins": 12} | keys))
    assert model.in_context is not None
    y = torch.zeros(2, 6, width) if real else torch.arange(6).remainder(3).repeat(2, 1)
    model.in_context.outputs(
        model.init(Generator().manual_seed(0)), Batch(torch.zeros(2, 6, 4), y), torch.ones(2, 5, 4)
    )


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: resnet12(ways=5, channels=1, image_size=15), "^image_size=15"),
    (lambda: resnet12(**SMALLEST, widths=(8, 8, 8)), "^widths="),
    (lambda: resnet12(**SMALLEST, widths=(8, 8, 8, 0)), "^widths="),
    (lambda: resnet12(**SMALLEST, activation="swish"), "^activation='swish'"),
    (lambda: mlp(inputs=1, outputs=1, hidden=[0]), "^hidden="),
    (lambda: vision("resnet81"), "^name='resnet81': .* type name=resnet18$"),
    (lambda: vision("fcn_resnet50"), "^name='fcn_resnet50'"),
    (lambda: vision("resnet18", channels=2), "^channels=2"),
    (lambda: vision("squeezenet1_1", image_size=16), r"^image_size=16: squeezenet1_1 .* dataset\.image_size=224"),
    (lambda: packages.lite0(ways=5, channels=3, image_size=224, input_size=16), "^input_size=16"),
    (without_packages, "no_such_package and nor_this"),
    # the networks of users
    (lambda: own("Missing"), "^network._target_=tests.own_functions.Missing"),
    (lambda: own("Small", depth=2), "^network._target_=.* it takes ways, norm"),
    (lambda: own("lose_a_parameter", sums={}, counts=1), "^network._target_="),
    (lambda: own("Small", ways=3, norm="1d"), "^Small: its layer norm"),
    (lambda: own("Odd", kind="tuples"), "^Odd: gives a tuple"),
    (lambda: own("Odd", kind="grey"), "^image_size=32: Odd"),
    (lambda: own("Odd", transductive=False, kind="batch"), "^Odd: its layer norm"),
    (lambda: own("Odd", kind="random"), "^Odd: gives other outputs"),
    (lambda: own("Odd", kind="remembers"), "^Odd: gives other outputs"),
    (lambda: adapted(drawn_buffer), "^Net: its buffer .* is drawn at random"),
    (lambda: adapted(lambda: nn.Linear(4, 2).requires_grad_(False)), "^Net: all its parameters are fixed"),
    (lambda: adapted(complex_weight), "^Net: its parameter phase is complex"),
    (lambda: adapted(lambda: nn.Sequential(nn.LazyLinear(2))), r"^Net: its parameter 0\.weight has no shape yet"),
    (lambda: adapted(lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))), r"^Net: its layer 0 .*leave max_norm"),
    (partial(adapted, recomputes(False)), "^Net: has no gradient .*leave out torch.utils.checkpoint"),
    pytest.param(partial(adapted, recomputes(True)), "^Net: has no gradient .*leave out torch.utils.checkpoint",
                 marks=pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")),
    pytest.param(old_weight_norm, "weight of its layer 0; take .*parametrizations",
                 marks=pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")),
    *((partial(adapted, partial(Gives, give)), "^Net: gives a (tuple|str)") for give in (
        lambda net, y: (y, (y, y)), lambda net, y: (y, y.t()), lambda net, y: "text")),
    (folded, "a batch norm gets 16 maps of 8 pictures"),
    (three_of_two, "3 at once in a chunk of 2"),
    # inputs, and notes of them
    (lambda: packed({"ids": torch.tensor([[[2**24 + 1]]])}), r"\[ids\] holds 16777217"),
    (lambda: packed(torch.tensor([[[2**24 + 1]]])), "holds 16777217"),
    (lambda: packed({"ids": [[1]]}), "is a dict of ids: list"),
    (lambda: packed("text"), "is a str"),
    (lambda: packed({}), "is a dict"),
    (lambda: packed({"a": torch.zeros(1, 2, 3), "b": torch.zeros(1, 3, 3)}), r"a \[1, 2, 3\], b \[1, 3, 3\]"),
    *((partial(from_note, note), "inputs=") for note in (
        "x", [], [["ids", [4]]], [["ids", [4], "eval"]], [["a", [0], "real"]], [["a", [1], "real"]] * 2, 3)),
    # tables
    (lambda: reads(heads=3), "^heads=3"),
    (lambda: reads(bins=2), "^bins=2"),
    (lambda: reads("normal"), "^head='normal'"),
    (lambda: reads(form="grid"), "^form='grid'"),
    (lambda: table(head="classes").apply({}, torch.zeros(1)), "algorithm=pfn"),
    (lambda: reads(classes=2), "type model.classes=3"),
    (lambda: reads(real=True), "type model.head=gaussian"),
    (lambda: reads("gaussian"), "type model.head=classes"),
    (lambda: reads("bars", width=2, real=True), "^model.head=bars"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_is_wrong_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
