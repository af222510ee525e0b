"""Networks of one's own with other inputs than one tensor of real numbers: token ids, several tensors, dictionaries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

import metalearn
from metalearn.api.learner import Learner
from metalearn.models.common.adapter import model_of
from metalearn.models.module import from_note, to_note
from metalearn.nn.surroundings import Part, inputs_of, of_reals, packed, shape_of
from tests.own_functions import LENGTH, Reads, Texts


class ReadsOne(Reads):
    """The same, with all inputs as one argument."""

    def forward(self, x: Any) -> Tensor:  # type: ignore[override]
        return super().forward(*(x.values() if isinstance(x, dict) else x))


def learned(form: str, network: type[nn.Module] = Reads, **options: Any) -> Learner:
    return metalearn.train(
        metalearn.named("maml", inner_lr=0.5, inner_steps=2), network, Texts(form),
        steps=2, meta_batch_size=3, val_tasks=2, progress=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_ids() -> Learner:
    return learned("ids")


@pytest.mark.parametrize(
    ("form", "network"),
    [("ids_of_32_bits", Reads), ("dictionary", Reads), ("dictionary", ReadsOne), ("tuple", ReadsOne)],
)
def test_the_form_of_the_inputs_changes_no_parameter(form: str, network: type[nn.Module], by_ids: Learner) -> None:
    """All words are there, so a mask changes nothing."""
    ours = learned(form, network).params
    assert ours.keys() == by_ids.params.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, by_ids.params[name], rtol=1e-5, atol=1e-6)


def test_a_chunk_has_the_bits_of_its_tasks(by_ids: Learner) -> None:
    alone, together = (learned("dictionary", task_chunk=chunk).params for chunk in (1, 3))
    for name, value in alone.items():
        torch.testing.assert_close(value, together[name], rtol=1e-5, atol=1e-6)


def test_what_was_learned_from_a_dictionary_is_saved_and_adapts(tmp_path: Path) -> None:
    learner = learned("dictionary")
    learner.save(tmp_path / "texts")
    again = metalearn.load(tmp_path / "texts", network=Reads)
    assert learner.ways == again.ways == 2
    (x, y) = Texts("dictionary").episodes("test", torch.tensor([3])).support
    ours, theirs = (one.adapt({key: value[0] for key, value in x.items()}, y[0]) for one in (learner, again))
    asked = {"mask": [[True] * LENGTH], "ids": [[4, 1, 2, 3, 4, 5]]}
    assert ours.predict(asked) == theirs.predict(asked)
    with pytest.raises(ValueError, match=r"x: has mask \[n, 6\]; give ids \[n, 6\], mask \[n, 6\]"):
        ours.predict({"mask": asked["mask"]})
    with pytest.raises(ValueError, match="x: has numbers that are not finite"):
        ours.predict(asked | {"ids": [[np.nan, 1, 2, 3, 4, 5]]})


def test_a_network_without_whole_numbers_gets_real_ones() -> None:
    whole = (Part("", (LENGTH,), "whole"),)
    model = model_of(lambda: nn.Linear(LENGTH, 2), name="Net", inputs=whole, transductive=True, advice="")
    assert model.note == "Net: takes no whole numbers, so its inputs [n, 6] become real ones"


class Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(4, 6), give

    def forward(self, x: Tensor) -> Any:
        return self.give(self.linear(x))


@pytest.mark.parametrize(
    "give",
    [
        lambda y: y.view(-1, 2, 3),
        lambda y: (y[:, :2], y[:, 2:].view(-1, 2, 2)),
        lambda y: {"mean": y[:, :3], "scale": y[:, 3:]},
    ],
)
def test_outputs_are_joined(give: Callable[[Tensor], Any]) -> None:
    model, plain = (
        model_of(lambda one=one: Gives(one), name="Net", inputs=of_reals((4,)), transductive=True, advice="")
        for one in (give, lambda y: y)
    )
    assert "which becomes [n, d]" in model.note and plain.note == ""
    params = {name: value.unsqueeze(0) for name, value in plain.init(Generator().manual_seed(0)).items()}
    x = torch.randn(1, 5, 4)
    assert torch.equal(model.apply(params, x), plain.apply(params, x))


# What the inputs of tasks may be


def test_numbers_are_exact_on_their_way() -> None:
    generator = Generator().manual_seed(0)
    x = {
        "b": torch.randint(2**24, (2, 3, 4, 2), generator=generator),
        "a": torch.randn(2, 3, dtype=torch.float64, generator=generator),
        "c": torch.rand(2, 3, 5, generator=generator) < 0.5,
    }
    inputs = inputs_of(x)
    assert inputs == (Part("a", (), "real"), Part("b", (4, 2), "whole"), Part("c", (5,), "bool"))
    assert from_note(to_note(inputs)) == inputs and shape_of(inputs) == (14,)
    a, b, c = packed(x).split([1, 8, 5], dim=2)
    assert torch.equal(a.squeeze(2), x["a"])
    assert torch.equal(b.float().long().view(2, 3, 4, 2), x["b"]) and torch.equal(c.bool(), x["c"])
    assert inputs_of(torch.zeros(1, 2, 3)) == of_reals((3,))


# Running statistics


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_running_statistics_are_constants(norm: type[nn.BatchNorm1d | nn.BatchNorm2d]) -> None:
    """As a network whose norms are products and sums, written out."""
    shape = (3,) if norm is nn.BatchNorm1d else (3, 2, 2)

    def make() -> nn.Module:
        layer = norm(3)
        layer.running_mean, layer.running_var = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])
        return nn.Sequential(
            layer, nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * (1 if norm is nn.BatchNorm1d else 4), 2)
        )

    model = model_of(
        make, name="Net", inputs=of_reals(shape), transductive=True, advice="", dropout=True, running_statistics=True
    )
    assert "normalises by the running statistics that it came with: 0" in model.note and not model.cautions
    params = {name: value.unsqueeze(0) for name, value in model.init(Generator().manual_seed(0)).items()}
    x, view = torch.randn(1, 5, *shape), (1, 1, 3, *(1 for _ in shape[1:]))
    mean, width = (torch.tensor(numbers).view(view) for numbers in ([1.0, 2, 3], [4.0, 5, 6]))
    expected = ((x - mean) / (width + 1e-5).sqrt()).flatten(2) @ params["3.weight"][0].t() + params["3.bias"][0]
    torch.testing.assert_close(model.apply(params, x), expected)
    torch.testing.assert_close(model.apply(params, x[:, :1]), expected[:, :1])
