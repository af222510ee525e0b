"""Networks that read tables: beside torch's own attention, and what a prediction must not depend on."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from metalearn.algorithms.pfn import TOGETHER, answers, pfn
from metalearn.models.table import (
    KERNELS,
    RIDGES,
    NumberHead,
    _over_columns,
    _over_rows,
    _ranks,
    _regressions,
    _smoother,
    bars,
    gaussian,
    quantiles,
    table,
)
from metalearn.nn.attention import products_attention
from metalearn.nn.surroundings import computing_with
from metalearn.types import Batch, InContext, Model, Params

FLOAT64 = torch.float64
FORMS = ["rows", "cells", "linear", "kernels"]
"""`linear` and `kernels` are `rows` with them."""
NUMBERS: dict[str, NumberHead] = {"gaussian": gaussian(), "bars": bars(12), "quantiles": quantiles(9)}


def random(*shape: int, seed: int, dtype: torch.dtype = FLOAT64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=Generator().manual_seed(seed))


def network(form: str, head: str = "classes", **keys: object) -> tuple[Model, InContext]:
    if form in ("linear", "kernels"):
        form, keys = "rows", {form: True} | keys
    model = table(**({"head": head, "form": form, "width": 16, "heads": 2, "layers": 2, "bins": 12} | keys))  # type: ignore[arg-type]
    assert model.in_context is not None
    return model, model.in_context


def drawn(model: Model, dtype: torch.dtype = FLOAT64) -> Params:
    """Parameters away from the start, where scales are 1 and biases 0."""
    values = model.init(Generator().manual_seed(0)).items()
    return {
        name: value.to(dtype) + 0.1 * random(*value.shape, seed=i).to(dtype) for i, (name, value) in enumerate(values)
    }


def of_classes(rows: int = 12, dtype: torch.dtype = FLOAT64) -> tuple[Batch, Tensor]:
    """Two tasks with three classes and a missing value, of which the second has no row of class 1; and queries."""
    x, asked = random(2, rows, 4, seed=1, dtype=dtype), random(2, 5, 4, seed=2, dtype=dtype)
    y = torch.arange(rows).remainder(3).repeat(2, 1)
    y[1][y[1] == 1] = 2
    x[0, 2, 1] = asked[1, 0, 3] = math.nan
    return Batch(x, y), asked


# Beside torch's attention


def mha(width: int, heads: int, query: Tensor, key_value: Tensor, out: Tensor) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(width, heads, bias=False, add_zero_attn=True, batch_first=True, dtype=FLOAT64)
    module.load_state_dict({"in_proj_weight": torch.cat([query, key_value]), "out_proj.weight": out})
    return module


def test_attention_is_torchs_with_a_zero_key() -> None:
    q, k, v = random(3, 4, 5, 8, seed=1), random(3, 4, 6, 8, seed=2), random(3, 4, 6, 8, seed=3)
    hidden = torch.rand(12, 6, generator=Generator().manual_seed(0)) < 0.4
    eye = torch.eye(8, dtype=FLOAT64)
    module = mha(8, 2, eye, torch.cat([eye, eye]), eye)
    for mask in (None, hidden):
        expected, _ = module(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), key_padding_mask=mask)
        torch.testing.assert_close(products_attention(q, k, v, 2, mask).flatten(0, 1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_a_block_is_torchs_attention(last: bool) -> None:
    """Rows attend to the 4 known ones of 7; 2 of the 5 columns are of labels."""
    model, _ = network("cells")
    params, x = drawn(model), random(3, 5, 7, 16, seed=1)
    normed = F.layer_norm(x, (16,), params["block0.rows.norm.weight"], params["block0.rows.norm.bias"])
    parts = (params[f"block0.rows.{name}"] for name in ("query", "key_value", "out"))
    module, asked = mha(16, 2, *parts), slice(4 if last else 0, None)
    known = normed[:, :, :4].flatten(0, 1)
    mixed, _ = module(normed[:, :, asked].flatten(0, 1), known, known)
    found, _ = _over_rows(params, "block0.rows", x, 4, None, 2, last)
    torch.testing.assert_close(found, x[:, :, asked] + mixed.view_as(found), rtol=0, atol=1e-12)

    normed = F.layer_norm(x, (16,), params["block0.columns.norm.weight"], params["block0.columns.norm.bias"])
    by_row, label = normed.transpose(1, 2).flatten(0, 1), slice(3 if last else 0, None)
    module = mha(16, 2, *(params[f"block0.columns.{name}"] for name in ("query", "key_value", "out")))
    mixed, _ = module(by_row[:, label], by_row, by_row)
    found = _over_columns(params, "block0.columns", x, torch.ones(3, 2, dtype=torch.bool), 2, last)
    expected = x[:, label] + mixed.view(3, 7, -1, 16).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradients_are_finite_differences(form: str) -> None:
    model, reads = network(form, width=4, layers=1)
    support, asked = of_classes(5)
    params = {name: value.requires_grad_() for name, value in drawn(model).items()}

    def outputs(*values: Tensor) -> Tensor:
        return reads.outputs(dict(zip(params, values, strict=True)), support, asked)[:, :2]

    assert torch.autograd.gradcheck(outputs, tuple(params.values()), fast_mode=True)


def test_the_regressions_leave_each_known_row_out() -> None:
    z, labels = random(2, 9, 3, seed=1).clamp(-3, 3), random(2, 2, 9, seed=2)
    slopes, own = _regressions(z, labels)
    y = labels - labels.mean(dim=2, keepdim=True)
    for task, (which, penalty), row in product(range(2), enumerate(RIDGES), range(9)):
        rest = [other for other in range(9) if other != row]

        def fit(rows: list[int], task: int = task, penalty: float = penalty) -> Tensor:
            a = z[task, rows]
            return torch.linalg.solve(a.T @ a + 9 * penalty * torch.eye(3, dtype=FLOAT64), a.T @ y[task, :, rows].T)

        torch.testing.assert_close(slopes[task, :, which], fit(list(range(9))))
        torch.testing.assert_close(own[task, :, row, which], z[task, row] @ fit(rest))


def test_ranks_count_the_known_rows_below() -> None:
    known = torch.tensor([[[1.0], [3.0], [3.0], [math.nan]]])
    asked = torch.tensor([[[0.0], [1.0], [2.0], [3.0], [9.0], [math.nan]]])
    ranks = [0, 1 / 6, 1 / 3, 2 / 3, 1, 1 / 2]  # of three cells; among equal ones half of them are below
    torch.testing.assert_close(_ranks(asked, known).flatten(), torch.tensor(ranks))


def test_the_kernel_regressions_leave_each_known_row_out() -> None:
    x, labels = random(2, 9, 3, seed=1), random(2, 2, 9, seed=2)
    x[:, :, 1] = x[:, :, 1].round()  # equal cells
    smoother = _smoother(x, labels)
    y = labels - labels.mean(dim=2, keepdim=True)
    for task, (which, (a, b, ridge)), row in product(range(2), enumerate(KERNELS), range(9)):
        apart = _ranks(x, x)[task].unsqueeze(1) - _ranks(x, x)[task]
        kernel = (-a * apart.abs().mean(dim=2) - b * (apart != 0).double().mean(dim=2)).exp()
        rest = [other for other in range(9) if other != row]
        weights = torch.linalg.solve(kernel[rest][:, rest] + ridge * torch.eye(8, dtype=FLOAT64), y[task, :, rest].T)
        torch.testing.assert_close(smoother.answers[task, :, row, which], kernel[row, rest] @ weights)


# What a prediction must not depend on


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_classes_and_features_does_not_matter(form: str) -> None:
    model, reads = network(form)
    params, (support, asked) = drawn(model), of_classes()
    expected = reads.outputs(params, support, asked)
    assert expected.shape == (2, 5, 10) and (expected[:, :, 0] - expected[:, :, 2]).abs().max() > 1e-3
    features, classes, rows = [2, 0, 3, 1], torch.tensor([2, 0, 1]), torch.randperm(12)
    turned = Batch(support.x[:, rows][..., features], classes[support.y[:, rows]])
    found = reads.outputs(params, turned, asked[..., features])
    torch.testing.assert_close(found[..., classes], expected[..., :3], rtol=0, atol=1e-12)
    mislabelled = reads.outputs(params, support._replace(y=support.y.roll(1, 1)), asked)
    assert (mislabelled - expected).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_unseen_classes_and_other_tasks_change_nothing(form: str) -> None:
    """The second task has no row of class 1: its answers are those of the classes 0 and 2 alone."""
    model, reads = network(form)
    params, (support, asked) = drawn(model), of_classes()
    both = reads.outputs(params, support, asked)[1]
    alone = reads.outputs(params, Batch(support.x[1:], support.y[1:] // 2), asked[1:])[0]
    torch.testing.assert_close(both[:, [0, 2]], alone[:, :2], rtol=0, atol=1e-12)
    assert (both[:, [1, *range(3, 10)]] == params["head.absent"]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_prediction_has_the_same_bits_in_any_call(form: str, precision: str) -> None:
    model, reads = network(form)
    params, (support, _) = drawn(model, torch.float32), of_classes(dtype=torch.float32)
    x = random(2, 2 * TOGETHER + 9, 4, seed=5, dtype=torch.float32)
    with torch.no_grad(), computing_with(precision):
        known = reads.remember(params, support)
        ask = partial(answers, reads, params, known)
        whole = ask(x)
        assert torch.equal(ask(x.flip(1)).flip(1), whole)
        for some in ([0], [70, 3], list(range(60, 127))):
            assert torch.equal(ask(x[:, some]), whole[:, some])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", ["classes", *NUMBERS])
def test_the_adapted_learner_answers_as_the_training_pass_does(form: str, head: str) -> None:
    model, reads = network(form, head)
    params, (support, asked) = drawn(model), of_classes()
    if head != "classes":
        support = support._replace(y=random(2, 12, 1, seed=4))
    task = Batch(support.x[:1], support.y[:1])
    expected = reads.outputs(params, task, asked[:1])
    found = pfn(model=model).adapt(params, task)(asked[:1])
    expected = expected[..., :3] if reads.predictive is None else reads.predictive.mean(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head", list(NUMBERS))
def test_units_of_features_and_targets_do_not_matter(head: str) -> None:
    """With y → 3 y − 7 and features in other units, the predicted quantiles move alike."""
    model, reads = network("rows", head)
    assert reads.predictive is not None
    params, (support, asked), y = drawn(model), of_classes(), random(2, 12, 1, seed=4)
    scale, levels = torch.tensor([2.0, 0.1, 5.0, 1.0], dtype=FLOAT64), torch.tensor([0.02, 0.3, 0.5, 0.99])
    expected = reads.predictive.quantiles(reads.outputs(params, Batch(support.x, y), asked), levels)
    other = Batch(support.x * scale + 3, 3 * y - 7)
    found = reads.predictive.quantiles(reads.outputs(params, other, asked * scale + 3), levels)
    torch.testing.assert_close(found, 3 * expected - 7, rtol=0, atol=1e-6)


# Heads, by numerical integration of their densities


def density(head: NumberHead, outputs: Tensor, y: Tensor) -> Tensor:
    return (-head.loss.of_samples(outputs.expand(1, len(y), -1), y.view(1, -1, 1))["loss"][0]).exp()


@pytest.mark.parametrize("name", ["gaussian", "bars"])
def test_a_density_integrates_to_its_mean_and_quantiles(name: str) -> None:
    head = NUMBERS[name]
    raw, centre, scale = random(1, 1, head.width, seed=3), torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 0.5)
    outputs = head.outputs(raw, centre.double(), scale.double())
    y = torch.linspace(-8, 12, 40_001, dtype=FLOAT64)
    p, step = density(head, outputs, y), 20 / 40_000
    assert abs(p.sum() * step - 1) < 3e-3
    assert abs((p * y).sum() * step - head.predictive.mean(outputs).item()) < 3e-3
    levels = torch.tensor([0.001, 0.05, 0.4, 0.77, 0.999], dtype=FLOAT64)
    below = (p.cumsum(0) * step).unsqueeze(1)
    for level, at in zip(levels, head.predictive.quantiles(outputs, levels).flatten(), strict=True):
        assert abs(below[torch.searchsorted(y, at)] - level) < 3e-3


def test_the_gaussian_loss_is_torchs_log_probability() -> None:
    outputs, y = random(2, 3, 2, seed=1), random(2, 3, 1, seed=2)
    normal = torch.distributions.Normal(outputs[..., 0], outputs[..., 1].exp())
    found = gaussian().loss.of_tasks(outputs, y)
    torch.testing.assert_close(found["loss"], -normal.log_prob(y[..., 0]).mean(dim=1))
    torch.testing.assert_close(found["mse"], (normal.mean - y[..., 0]).square().mean(dim=1))


def test_the_quantile_loss_is_least_at_the_quantiles() -> None:
    """Its slope is 0 at the empirical quantiles of 1,001 targets, where a share of 2 / 9 · (below − level) is left."""
    y, head = random(1, 1001, 1, seed=1), quantiles(9)
    levels = (torch.arange(9, dtype=FLOAT64) + 0.5) / 9
    at = y.flatten().quantile(levels).requires_grad_()
    loss = head.loss.of_tasks(at.expand(1, 1001, 9), y)["loss"].sum()
    (slope,) = torch.autograd.grad(loss, at)
    assert slope.abs().max() < 2 / 9 / 1000
    below = (y[0] < at + 0.5).double().mean(dim=0)
    (slope,) = torch.autograd.grad(head.loss.of_tasks((at + 0.5).expand(1, 1001, 9), y)["loss"].sum(), at)
    torch.testing.assert_close(slope, 2 / 9 * (below - levels))


def test_rising_order_and_levels_of_quantiles() -> None:
    head = quantiles(4)
    outputs = head.outputs(torch.tensor([[[3.0, 1.0, 2.0, 4.0]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    assert outputs.tolist() == [[[1.0, 2.0, 3.0, 4.0]]]  # at the levels 1/8, 3/8, 5/8 and 7/8
    found = head.predictive.quantiles(outputs, torch.tensor([0.125, 0.25, 0.75, 0.875]))
    assert found.tolist() == [[[1.0, 1.5, 3.5, 4.0]]]


@pytest.mark.parametrize("count", [9, 100])
@pytest.mark.parametrize(
    ("quantile", "below", "least"),
    [(torch.special.ndtri, torch.special.ndtr, 0), (lambda p: (p / (1 - p)).log(), torch.sigmoid, 0.007)],
)
def test_an_interval_beyond_the_outer_quantiles_covers(count: int, quantile: Any, below: Any, least: float) -> None:
    """A normal distribution, whose tails are those assumed, and the logistic one, whose tails are heavier."""
    outputs = quantile((torch.arange(count, dtype=FLOAT64) + 0.5) / count).view(1, 1, -1)
    for coverage in (0.95, 0.99, 0.999):
        levels = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=FLOAT64)
        low, high = below(quantiles(count).predictive.quantiles(outputs, levels)[0, 0])
        assert coverage - least <= high - low + 1e-4 and high - low < coverage + 0.003
