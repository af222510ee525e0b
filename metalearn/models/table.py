"""A transformer that reads a table: some rows with their labels, and rows whose labels it predicts, in one pass.

Prior-fitted networks: Müller et al. 2022 (arXiv 2112.10510). Trained on tables that are drawn from a prior, the network
approximates the posterior predictive of that prior. `form=cells` has a token for each cell, and attends in turn over
the columns of a row and over the rows of a column, as TabPFN v2 (Hollmann et al. 2025, Nature 637, 319). `form=rows`
summarises the cells of a row first, and then has one token a row and class, as TabICL (Qu et al. 2025, arXiv
2502.05564) does in its last stage; it is cheaper.

Rows attend to known rows only, so that no prediction depends on what else is asked.

**Order.** Features have no names: all have the same weights, and only sums and attention join them. Nor have classes:
each has a label column of its own, which says of a known row whether it is of this class (one against the rest). All
label columns have the same weights, and the answer of a column is the logit of its class. So any order of features or
classes gives the same answers in that order, in each call, without an ensemble. (TabPFN embeds the number of a class,
and averages over orders.) The price is a token a row for each class in place of one. Columns of classes that no known
row has are left out; all such classes have one learned logit.

**rows.** A cell x of feature d gives numbers G(x). Its column is summarised by B_dk, an MLP of the mean of G over known
rows and of their covariance with label k. The token of a row for label column k is a linear map of Σ_d G(x_d) · B_dk:
the sum over features of a naive Bayes or linear classifier, from which the blocks start. In the MLPs of the blocks, a
class sees the mean over all classes (Zaheer et al. 2017, arXiv 1703.06114, equation 4).

**linear.** No B_dk knows of other features. So where features are nearly alike, what tells classes apart is lost in
their sum. With `linear`, a token also has the answers of two ridge regressions of the known labels: those of a known
row without itself (leave one out), as those of an asked row are.

**kernels.** Trees are ahead of both where a class lies in boxes, or numbers are names of unordered things. So with
`kernels` a token also has the answers of kernel ridge regressions on the ranks of the features. The kernels are
exp(-a·|Δrank| - b·[unlike]), by the means over features. The first part is that of a forest of random cuts (Balog et
al. 2016, arXiv 1606.05241), the second compares names. Those of known rows leave the row out, too. Of a number, the
network then predicts what the best of all these regressions leaves: that of the least squared error for known rows.

**Differences** from TabPFN: pre-norm; one feature a token; the weights of attention to known rows sum to less than 1
(`metalearn.nn.attention.products_attention`), so that it can count rows, which the width of a posterior depends on;
sines of the values, of learned frequencies, beside a linear map.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.errors import Invalid, counts, one_of, positive, switches, whole_number
from metalearn.nn.attention import EXPANSION, norm, products_attention
from metalearn.nn.layers import shared_linear
from metalearn.nn.surroundings import constant, surroundings
from metalearn.types import Batch, InContext, Loss, Metrics, Model, Params, Predictive

HEADS = ("classes", "gaussian", "bars", "quantiles")

# What is read of a cell, beside sines: its value within ±3, its inverse hyperbolic sine, and whether it is missing.
CELL = 3
RIDGES = (0.003, 0.1)  # the penalties of `linear`, where a feature has variance 1
KERNELS = ((1.5, 0.0, 0.1), (1.5, 0.0, 2.0), (12.0, 0.0, 2.0), (1.0, 1.0, 0.5), (3.0, 3.0, 0.5))
"""Of `kernels`: a, b and the penalty; a kernel is 1 of equal rows. Chosen by `benchmarks.priors tables --choosing`."""

KeysValues = tuple[Tensor, Tensor]


class Smoother(NamedTuple):
    """The kernel regressions of known rows: their features `x` and `ranks` [t, m, d], the `weights` of the labels, a
    [t, m, k] of each kernel, and the `answers` that each known row has from the others, [t, k, m, kernels]."""

    x: Tensor
    ranks: Tensor
    weights: Sequence[Tensor]
    answers: Tensor


class Context(NamedTuple):
    """What queries read of the context, the known rows: `place` (mean and standard deviation of each feature, [t, 1,
    d]) and `target` (those of the targets, [t, 1, 1]); the `labels` by column [t, k, m], and which are `present`,
    [t, k]; the `columns` [t, k, d, c] of `form=rows`; of `linear` its `slopes` [t, d, 2, k] and its `answers` for the
    known rows, [t, k, m, 2]; the `smoother` of `kernels`, with it of numbers the `best` regression, [t, 1], and the
    scale of what it `leaves` [t, 1, 1]; and the keys and values of each block."""

    place: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]
    labels: Tensor
    present: Tensor
    columns: Tensor | None = None
    slopes: Tensor | None = None
    answers: Tensor | None = None
    smoother: Smoother | None = None
    best: Tensor | None = None
    leaves: Tensor | None = None
    blocks: Sequence[KeysValues] = ()


def table(
    *, head: str, classes: int = 10, bins: int = 100, form: str = "rows", width: int = 64, heads: int = 4,
    layers: int = 4, standardize: bool = True, frequency: float = 1.0, linear: bool = False,
    kernels: bool = False,
) -> Model:  # fmt: skip
    """A network for `algorithm=pfn`, for rows of any number of features; NaN is a missing value. Raises ValueError for
    a number out of range, heads that do not divide the width, or a name that does not exist.

    Each class of a task costs as much as a table with two. Without `standardize` features and targets stay as they are,
    for a prior whose scale says something. `form`, `linear` and `kernels`: see above.
    """
    one_of("head", head, HEADS)
    one_of("form", form, ("rows", "cells"))
    whole_number("classes", classes, at_least=2)
    whole_number("bins", bins, at_least=3)
    counts(width=width, heads=heads, layers=layers)
    if width % heads:
        raise Invalid("heads", heads, f"must divide width={width}", "type KEY=1")
    switches(standardize=standardize, linear=linear, kernels=kernels)
    for name, switch in (("linear", linear), ("kernels", kernels)):
        if switch and form == "cells":
            raise Invalid(name, True, "is for form=rows", "type KEY=false")
    positive(frequency=frequency)
    numbers = {"classes": None, "gaussian": gaussian(), "bars": bars(bins), "quantiles": quantiles(bins)}[head]
    cells, regressions = form == "cells", {"linear": len(RIDGES) * linear, "kernels": len(KERNELS) * kernels}

    def init(generator: Generator) -> Params:
        return _drawn(cells, width, layers, numbers.width if numbers else 1, frequency, regressions, generator)

    def context_of(params: Params, support: Batch) -> Context:
        x, y = support
        if numbers is None:
            labels, present, target = _by_class(y, classes, x)
        elif y.shape[2:] != (1,) or not y.is_floating_point():
            raise ValueError(f"model.head={head}: is for one real number a row; type model.head=classes for classes")
        else:
            target = _mean_and_spread(y, standardize)
            labels = ((y - target[0]) / target[1]).transpose(1, 2)
            present = labels.new_ones(len(y), 1, dtype=torch.bool)
        context = Context(_mean_and_spread(x, standardize), target, labels, present)
        if cells:
            return context
        if linear:
            slopes, answers = _regressions(_standardized(context, x)[0], labels)
            context = context._replace(slopes=slopes, answers=answers)
        if kernels:
            context = context._replace(smoother=_smoother(x, labels))
        if kernels and numbers:
            others = _answers(context, None)
            assert others is not None
            best = (labels.unsqueeze(3) - others).square().mean(dim=2).argmin(dim=2)
            left = labels - _by_best(others, best)
            # By the largest: the bars must reach outliers. By the spread a step's loss was 1,000.
            leaves = 0.5 * left.abs().amax(dim=2, keepdim=True).clamp(min=0.02)
            context = context._replace(best=best, leaves=leaves, labels=left / leaves)
        return context._replace(columns=_columns(params, context, _of_cells(params, context, x)))

    def through(params: Params, context: Context, x: Tensor, labelled: bool) -> tuple[Tensor, list[KeysValues]]:
        """The outputs [t, n, …] for those rows `x` that are asked, and the keys and values of the others, which come
        first if `labelled`."""
        labels = context.labels if labelled else context.labels[:, :, :0]
        answers = None if cells else _answers(context, x[:, labels.shape[2] :])
        h, kept = _tokens(params, context, x, labels, answers), list[KeysValues]()
        for number in range(layers):
            last = number == layers - 1
            if cells:
                h = _over_columns(params, f"block{number}.columns", h, context.present, heads, last)
            earlier = None if labelled else context.blocks[number]
            h, keys = _over_rows(params, f"block{number}.rows", h, labels.shape[2], earlier, heads, last)
            h = _mlp(params, f"block{number}.mlp", h, None if cells else context.present)
            kept.append(keys)
        return read(params, context, h, answers), kept

    def read(params: Params, context: Context, h: Tensor, answers: Tensor | None) -> Tensor:
        """The outputs [t, n, …] of the label columns' last tokens [t, k, n, width]."""
        h = shared_linear(norm(params, "norm", h), params["head.in.weight"], params["head.in.bias"])
        raw = shared_linear(F.gelu(h), params["head.out.weight"], params["head.out.bias"])
        if numbers:
            centre, scale = context.target
            if answers is not None and context.best is not None and context.leaves is not None:
                centre = centre + scale * _by_best(answers, context.best).transpose(1, 2)
                scale = scale * context.leaves
            return numbers.outputs(raw[:, 0], centre, scale)
        logits = raw[..., 0].transpose(1, 2)
        logits = torch.where(context.present.unsqueeze(1), logits, params["head.absent"])
        absent = params["head.absent"].expand(*logits.shape[:2], classes - logits.shape[2])
        return torch.cat([logits, absent], dim=2)

    def outputs(params: Params, support: Batch, x: Tensor) -> Tensor:
        context = context_of(params, support)
        return through(params, context, torch.cat([support.x, x], dim=1), True)[0]

    def remember(params: Params, support: Batch) -> Context:
        context = context_of(params, support)
        return context._replace(blocks=through(params, context, support.x, True)[1])

    def answer(params: Params, context: Context, x: Tensor) -> Tensor:
        return through(params, context, x, False)[0]

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        raise ValueError("model=table reads labels beside the inputs; type algorithm=pfn")

    return Model(
        init, apply, transductive=False, activations=layers * (8 + 2 * EXPANSION) * width,
        in_context=InContext(outputs, remember, answer, *((numbers.predictive, numbers.loss) if numbers else ())),
    )  # fmt: skip


# What is read


def _by_class(y: Tensor, classes: int, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The label columns [t, k, m], 1 for the rows of class k and 0 for others; which classes are there, [t, k]; and no
    scale."""
    if y.is_floating_point():
        raise ValueError("model.head=classes: the targets are real numbers; type model.head=gaussian")
    ways = surroundings().ways
    most = int(y.max()) + 1 if ways is None else ways
    if most > classes:
        raise ValueError(f"model.classes={classes}: a task has {most} classes; type model.classes={most}")
    labels = (y.unsqueeze(1) == torch.arange(most, device=y.device).unsqueeze(1)).to(x.dtype)
    return labels, labels.any(dim=2), (x.new_zeros(1), x.new_ones(1))


def _mean_and_spread(x: Tensor, standardize: bool) -> tuple[Tensor, Tensor]:
    """Over the rows of `x` [t, m, d], without missing values, [t, 1, d] each. Of a feature that is constant or missing
    the spread is 1."""
    if not standardize:
        return x.new_zeros(len(x), 1, x.shape[2]), x.new_ones(len(x), 1, x.shape[2])
    present = ~x.isnan()
    count = present.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(present, x, 0.0).sum(dim=1, keepdim=True) / count
    spread = (torch.where(present, x - mean, 0.0).square().sum(dim=1, keepdim=True) / count).sqrt()
    return mean, torch.where(spread > 1e-6 * mean.abs().clamp(min=1e-30), spread, 1.0)


def _standardized(context: Context, x: Tensor) -> tuple[Tensor, Tensor]:
    """The cells `x` [t, n, d] in units of the known rows, 0 where they are missing; and which are missing."""
    mean, spread = context.place
    missing = x.isnan()
    return torch.where(missing, 0.0, (x - mean) / spread), missing


def _regressions(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regressions of labels [t, k, m] on rows `z` [t, m, d]: the slopes [t, d, 2, k], and the answers that each
    known row has from the others, [t, k, m, 2]: (ŷ − h y) / (1 − h), with the diagonal h of the hat matrix."""
    z, y = z.clamp(-3, 3), (labels - labels.mean(dim=2, keepdim=True)).transpose(1, 2)
    gram, alike = (z.transpose(1, 2) @ values / z.shape[1] for values in (z, y))
    eye = torch.eye(z.shape[2], device=z.device, dtype=z.dtype)
    slopes, answers = list[Tensor](), list[Tensor]()
    for penalty in RIDGES:
        factor = torch.linalg.cholesky_ex(gram + penalty * eye).L  # which does not wait for a GPU
        slopes.append(torch.cholesky_solve(alike, factor))
        half = torch.linalg.solve_triangular(factor, z.transpose(1, 2), upper=False)
        lever = half.square().sum(dim=1).unsqueeze(2) / z.shape[1]
        answers.append((z @ slopes[-1] - lever * y) / (1 - lever).clamp(min=0.01))
    return torch.stack(slopes, dim=2), torch.stack(answers, dim=3).transpose(1, 2)


def _ranks(x: Tensor, known_x: Tensor) -> Tensor:
    """The rank of each cell `x` [t, n, d] among those of the known rows [t, m, d], from 0 to 1; a half if missing."""
    places = torch.where(known_x.isnan(), torch.inf, known_x).transpose(1, 2).contiguous().sort(dim=2).values
    cells = x.transpose(1, 2).contiguous()
    if torch.compiler.is_exporting():  # programs have no such search
        above, upto = (sign(cells.unsqueeze(3), places.unsqueeze(2)).sum(dim=3) for sign in (torch.gt, torch.ge))
    else:
        above, upto = (torch.searchsorted(places, cells, right=right) for right in (False, True))
    count = (~known_x.isnan()).sum(dim=1).unsqueeze(2).clamp(min=1)
    ranks = ((above + upto).to(x.dtype) / (2 * count)).transpose(1, 2)
    return torch.where(x.isnan(), 0.5, ranks)


def _kernels(ranks: Tensor, others: Tensor) -> list[Tensor]:
    """Each kernel [t, n, m] between rows of `ranks` [t, n, d] and `others` [t, m, d]."""
    if torch.compiler.is_exporting():  # programs have no cdist
        apart = ranks.unsqueeze(2) - others.unsqueeze(1)
        near, unlike = apart.abs().sum(dim=3), (apart != 0).to(apart.dtype).sum(dim=3)
    else:
        near, unlike = (torch.cdist(ranks, others, p=power) for power in (1.0, 0.0))
    return [((-a * near - b * unlike) / ranks.shape[2]).exp() for a, b, _ in KERNELS]


def _smoother(x: Tensor, labels: Tensor) -> Smoother:
    """Kernel ridge regressions of labels [t, k, m] on rows `x` [t, m, d]. What row i has from the others is
    y_i - w_i / (K + ridge)⁻¹_ii, with the weights w = (K + ridge)⁻¹ y."""
    y, ranks = (labels - labels.mean(dim=2, keepdim=True)).transpose(1, 2), _ranks(x, x)
    eye = torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
    weights, answers = list[Tensor](), list[Tensor]()
    for kernel, (_, _, ridge) in zip(_kernels(ranks, ranks), KERNELS, strict=True):
        factor = torch.linalg.cholesky_ex(kernel + ridge * eye).L
        weights.append(torch.cholesky_solve(y, factor))
        half = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
        answers.append(y - weights[-1] / half.square().sum(dim=1).unsqueeze(2))
    return Smoother(x, ranks, weights, torch.stack(answers, dim=3).transpose(1, 2))


def _of_cells(params: Params, context: Context, x: Tensor) -> Tensor:
    """Numbers [t, n, d, c] for the cells `x` [t, n, d]."""
    z, missing = _standardized(context, x)
    seen = torch.stack([z.clamp(-3, 3), z.asinh(), missing.to(z.dtype)], dim=3)
    waves = torch.sin(z.unsqueeze(3) * params["cell.frequency"] + params["cell.phase"])
    return shared_linear(seen, params["cell.weight"], params["cell.bias"]) + waves


def _columns(params: Params, context: Context, cells: Tensor) -> Tensor:
    """B_dk [t, k, d, c]: the summary of each feature, for each label column."""
    g = F.gelu(shared_linear(cells, params["cell.in.weight"], params["cell.in.bias"]))
    labels = context.labels - context.labels.mean(dim=2, keepdim=True)
    alike = (labels @ g.flatten(2)).unflatten(2, g.shape[2:]) / labels.shape[2]
    mean = shared_linear(g.mean(dim=1), params["column.mean"], params["column.bias"])
    h = shared_linear(alike, params["column.label"]) + mean.unsqueeze(1)
    return shared_linear(F.gelu(h), params["column.out.weight"], params["column.out.bias"])


def _answers(context: Context, x: Tensor | None) -> Tensor | None:
    """The answers of regressions [t, k, n, regressions] for asked rows `x`, or for known rows without themselves."""
    parts, smoother = list[Tensor](), context.smoother
    if context.slopes is not None and context.answers is not None:
        parts.append(
            context.answers
            if x is None
            else torch.einsum("tnd,tdpk->tknp", _standardized(context, x)[0].clamp(-3, 3), context.slopes)
        )
    if smoother is not None and x is None:
        parts.append(smoother.answers)
    elif smoother is not None and x is not None:
        near = _kernels(_ranks(x, smoother.x), smoother.ranks)
        smoothed = [kernel @ weights for kernel, weights in zip(near, smoother.weights, strict=True)]
        parts.append(torch.stack(smoothed, dim=3).transpose(1, 2))
    return torch.cat(parts, dim=3) if parts else None


def _by_best(answers: Tensor, best: Tensor) -> Tensor:
    """Those [t, k, n] of the best regression [t, k] among answers [t, k, n, regressions]."""
    return answers.gather(3, best[:, :, None, None].expand(-1, -1, answers.shape[2], 1)).squeeze(3)


def _tokens(params: Params, context: Context, x: Tensor, labels: Tensor, answers: Tensor | None) -> Tensor:
    """The first tokens [t, g, n, width] of rows `x`, the first of which have these labels [t, k, m], and the others
    these answers of regressions."""
    seen = _of_cells(params, context, x)
    labelled = labels.unsqueeze(3) * params["label.weight"] + params["label.bias"]
    asked = params["label.unknown"].expand(*context.present.shape, x.shape[1] - labels.shape[2], -1)
    label = torch.cat([labelled, asked], dim=2)
    if context.columns is None:
        return torch.cat([seen.transpose(1, 2), label], dim=1)
    g = F.gelu(shared_linear(seen, params["cell.in.weight"], params["cell.in.bias"]))
    sums = torch.einsum("tndc,tkdc->tknc", g, context.columns) * x.shape[2] ** -0.5
    tokens = label + shared_linear(sums, params["cell.out"])
    of_known = _answers(context, None)
    if answers is None or of_known is None:
        return tokens
    answers = torch.cat([of_known[:, :, : labels.shape[2]], answers], dim=2)
    if context.best is not None and context.leaves is not None:
        answers = ((answers - _by_best(answers, context.best).unsqueeze(3)) / context.leaves.unsqueeze(3)).asinh()
    weights = [params[name] for name in ("linear", "kernels") if name in params]
    return tokens + shared_linear(answers, torch.cat(weights, dim=-1))


# Blocks, of tokens [t, g, n, width]: the label columns are the last of the g


def _over_columns(params: Params, name: str, x: Tensor, present: Tensor, heads: int, last: bool) -> Tensor:
    """Attention over the tokens of a row. After the `last` one, only the label columns are read."""
    h = norm(params, f"{name}.norm", x).transpose(1, 2)
    first = x.shape[1] - present.shape[1] if last else 0
    queries = shared_linear(h[:, :, first:], params[f"{name}.query"])
    keys, values = shared_linear(h, params[f"{name}.key_value"]).chunk(2, dim=3)
    hidden = None
    if present.device.type != "cpu" or not present.all():  # a GPU would be waited for
        absent = F.pad(~present, (x.shape[1] - present.shape[1], 0))
        hidden = absent.unsqueeze(1).expand(-1, x.shape[2], -1).flatten(0, 1)
    mixed = shared_linear(products_attention(queries, keys, values, heads, hidden), params[f"{name}.out"])
    return x[:, first:] + mixed.transpose(1, 2)


def _over_rows(
    params: Params, name: str, x: Tensor, context_size: int, earlier: KeysValues | None, heads: int, last: bool
) -> tuple[Tensor, KeysValues]:
    """Attention to known rows, the first `context_size` or the `earlier` ones, and their keys and values. After the
    `last` one, only the other rows are read."""
    h = norm(params, f"{name}.norm", x)
    if earlier is None:
        keys, values = shared_linear(h[:, :, :context_size], params[f"{name}.key_value"]).chunk(2, dim=3)
    else:
        keys, values = earlier
    if last:
        x, h = x[:, :, context_size:], h[:, :, context_size:]
    queries = shared_linear(h, params[f"{name}.query"])
    return x + shared_linear(products_attention(queries, keys, values, heads), params[f"{name}.out"]), (keys, values)


def _mlp(params: Params, name: str, x: Tensor, present: Tensor | None) -> Tensor:
    """With `present`, the MLP also reads the mean over these columns, if there are several."""
    h = norm(params, f"{name}.norm", x)
    inner = shared_linear(h, params[f"{name}.in.weight"], params[f"{name}.in.bias"])
    if present is not None and present.shape[1] > 1:
        shares = present.to(h.dtype) / present.sum(dim=1, keepdim=True)
        mean = (h * shares[:, :, None, None]).sum(dim=1, keepdim=True)
        inner = inner + shared_linear(mean, params[f"{name}.in.mean"])
    return x + shared_linear(F.gelu(inner), params[f"{name}.out.weight"], params[f"{name}.out.bias"])


def _drawn(
    cells: bool, width: int, layers: int, outputs: int, frequency: float, regressions: Mapping[str, int],
    generator: Generator,
) -> Params:  # fmt: skip
    """Products keep the variance of their inputs; those that are added to the tokens are smaller, so that the sum of
    all blocks does so too, as in `metalearn.nn.attention.draw_transformer`."""
    params: Params = {}

    def draw(name: str, *shape: int, gain: float = 1.0) -> None:
        params[name] = torch.empty(shape).normal_(0, gain * shape[-1] ** -0.5, generator=generator)

    def norm(name: str) -> None:
        params[f"{name}.weight"], params[f"{name}.bias"] = torch.ones(width), torch.zeros(width)

    c = width if cells else max(width // 2, 1)
    draw("cell.weight", c, CELL)
    params["cell.bias"] = torch.zeros(c)
    params["cell.frequency"] = torch.empty(c).normal_(0, frequency, generator=generator)
    params["cell.phase"] = torch.empty(c).uniform_(-torch.pi, torch.pi, generator=generator)
    if not cells:
        for name in ("cell.in.weight", "column.label", "column.mean", "column.out.weight"):
            draw(name, c, c)
        params |= {"cell.in.bias": torch.zeros(c), "column.bias": torch.zeros(c), "column.out.bias": torch.ones(c)}
        draw("cell.out", width, c)
        for name, count in regressions.items():
            if count:
                draw(name, width, count)
    for name in ("label.weight", "label.bias", "label.unknown"):
        params[name] = torch.empty(width).normal_(0, 0.5, generator=generator)
    inner, added = EXPANSION // 2 * width, ((3 if cells else 2) * layers) ** -0.5
    for block in (f"block{number}" for number in range(layers)):
        for part in ("columns", "rows") if cells else ("rows",):
            norm(f"{block}.{part}.norm")
            draw(f"{block}.{part}.query", width, width)
            draw(f"{block}.{part}.key_value", 2 * width, width)
            draw(f"{block}.{part}.out", width, width, gain=added)
        norm(f"{block}.mlp.norm")
        draw(f"{block}.mlp.in.weight", inner, width)
        params[f"{block}.mlp.in.bias"] = torch.zeros(inner)
        if not cells:
            draw(f"{block}.mlp.in.mean", inner, width, gain=0.1)
        draw(f"{block}.mlp.out.weight", width, inner, gain=added)
        params[f"{block}.mlp.out.bias"] = torch.zeros(width)
    norm("norm")
    draw("head.in.weight", inner, width)
    draw("head.out.weight", outputs, inner, gain=0.1)
    return params | {
        "head.in.bias": torch.zeros(inner), "head.out.bias": torch.zeros(outputs),
        "head.absent": torch.full((1,), -5.0),
    }  # fmt: skip


# What the outputs say of a real number: a normal distribution, bars, or quantiles; and their losses

FLOOR = 1e-3  # the least standard deviation of a normal distribution, in standard deviations of the known targets
TAIL = 0.5  # the standard deviation of the half normal distributions beyond the outer borders of bars
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)

Scaled = Callable[[Tensor, Tensor, Tensor], Tensor]


class NumberHead(NamedTuple):
    """`width` raw numbers [t, n, width] of a network, in standard units; `outputs(raw, centre, scale)` are what they
    say in units of the targets, for `centre` and `scale` [t, 1, 1]. `loss` and `predictive` read these outputs."""

    width: int
    outputs: Scaled
    loss: Loss
    predictive: Predictive


def gaussian() -> NumberHead:
    """A normal distribution; the outputs are its mean and the logarithm of its standard deviation. The loss is the
    negative log-likelihood."""

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        mean, spread = raw.split(1, dim=2)
        return torch.cat([centre + scale * mean, (scale * (F.softplus(spread) + FLOOR)).log()], dim=2)

    def surprise(outputs: Tensor, y: Tensor) -> Tensor:
        mean, log_sd = outputs.unbind(2)
        return 0.5 * ((y[..., 0] - mean) * (-log_sd).exp()).square() + log_sd + _HALF_LOG_2_PI

    def quantiles(outputs: Tensor, levels: Tensor) -> Tensor:
        standard: Tensor = torch.special.ndtri(levels)
        return outputs[..., :1] + outputs[..., 1:].exp() * standard

    return _number_head("gaussian", 2, outputs, surprise, Predictive(lambda outputs: outputs[..., :1], quantiles))


def bars(count: int) -> NumberHead:
    """A density that is constant within each bar (the Riemann distribution of Müller et al. 2022, arXiv 2112.10510,
    section 4). A standard normal variable falls into each of the `count` bars with equal probability; beyond the outer
    borders the density is half a normal one. The loss is the negative log-likelihood.

    The outputs are the logits of the bars; then the centre and the logarithm of the scale of the targets.
    """
    borders = constant(torch.special.ndtri(torch.arange(1, count, dtype=torch.float64) / count))

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        return torch.cat([raw, *(value.expand(*raw.shape[:2], 1) for value in (centre, scale.log()))], dim=2)

    def surprise(outputs: Tensor, y: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        z, edges = (y - centre) * (-log_scale).exp(), borders(y.device, y.dtype)
        bar = torch.bucketize(z.detach().contiguous(), edges)
        densities = F.pad(-edges.diff().log(), (1, 1))[bar]
        beyond = torch.where(bar == 0, edges[0] - z, z - edges[-1])
        tail = math.log(2 / TAIL) - _HALF_LOG_2_PI - 0.5 * (beyond / TAIL).square()
        density = torch.where((bar == 0) | (bar == count - 1), tail, densities)
        likelihood: Tensor = logits.log_softmax(dim=2).gather(2, bar) + density - log_scale
        return -likelihood[..., 0]

    def mean(outputs: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        edges, tail = borders(outputs.device, outputs.dtype), TAIL * math.sqrt(2 / math.pi)
        middles = torch.cat([edges[:1] - tail, (edges[1:] + edges[:-1]) / 2, edges[-1:] + tail])
        z: Tensor = (logits.softmax(dim=2) @ middles).unsqueeze(2)
        means: Tensor = centre + log_scale.exp() * z
        return means

    def quantiles(outputs: Tensor, levels: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        below = logits.double().softmax(dim=2).cumsum(dim=2)
        asked = levels.to(below).expand(*below.shape[:2], -1)
        bar = (below.unsqueeze(3) < asked.unsqueeze(2)).sum(dim=2).clamp(max=count - 1)  # ONNX has no searchsorted
        start = F.pad(below, (1, 0)).gather(2, bar)
        part = ((asked - start) / (below.gather(2, bar) - start).clamp(min=1e-300)).clamp(1e-12, 1 - 1e-12)
        edges = borders(below.device, below.dtype)
        left, right = F.pad(edges, (1, 0))[bar], F.pad(edges, (0, 1))[bar]
        z = left + part * (right - left)
        z = torch.where(bar == 0, edges[0] + TAIL * _below_half(part / 2), z)
        z = torch.where(bar == count - 1, edges[-1] - TAIL * _below_half((1 - part) / 2), z)
        values: Tensor = (centre + log_scale.exp() * z).to(outputs)
        return values

    return _number_head("bars", count, outputs, surprise, Predictive(mean, quantiles))


# Acklam's rational functions for the inverse of the normal distribution, from the highest power: of the middle, in
# p - 1/2 squared, and of the tail, in the root of -2 log p. Their error is below 1e-8.
_MIDDLE = (
    (-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.3577518672690, -30.66479806614716,
     2.506628277459239),
    (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0),
)  # fmt: skip
_OUTSIDE = (
    (-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968,
     2.938163982698783),
    (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0),
)  # fmt: skip


def _below_half(p: Tensor) -> Tensor:
    """`torch.special.ndtri` of p from 0 to ½, also in ONNX, which has no such function."""
    if not torch.compiler.is_exporting():
        values: Tensor = torch.special.ndtri(p)
        return values

    def ratio(functions: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
        above, below = (functools.reduce(lambda sum_, c: sum_ * x + c, terms, 0 * x) for terms in functions)
        return above / below

    middle, root = p - 0.5, (-2 * p.log()).sqrt()
    return torch.where(p < 0.02425, ratio(_OUTSIDE, root), middle * ratio(_MIDDLE, middle.square()))


def quantiles(count: int) -> NumberHead:
    """The quantiles at `count` levels, (i − ½) / count, as the outputs, in rising order (Chernozhukov et al. 2010,
    arXiv 0704.3649). The loss is twice the mean of the pinball losses, the continuous ranked probability score."""
    levels = constant((torch.arange(count, dtype=torch.float64) + 0.5) / count)

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        return centre + scale * raw.sort(dim=2).values

    def pinball(outputs: Tensor, y: Tensor) -> Tensor:
        over, level = y - outputs, levels(y.device, y.dtype)
        return 2 * torch.maximum(level * over, (level - 1) * over).mean(dim=2)

    def at(outputs: Tensor, asked: Tensor) -> Tensor:
        places, asked = outputs.double(), asked.double().clamp(1e-12, 1 - 1e-12)
        place = (asked * count - 0.5).clamp(0, count - 1)
        low = place.floor().long()
        high = (low + 1).clamp(max=count - 1)
        within = torch.lerp(places[..., low], places[..., high], place - low)
        # Beyond, a normal tail through the outermost quantile and the one a tenth further in: neighbours are too noisy.
        normal, inner = torch.special.ndtri(levels(outputs.device, torch.float64)), max(1, count // 10)
        rises = torch.stack([places[..., inner] - places[..., 0], places[..., -1] - places[..., -1 - inner]], dim=2)
        beyond = torch.special.ndtri(asked) - torch.special.ndtri(asked).clamp(normal[0], normal[-1])
        values: Tensor = within + rises[..., (asked > 0.5).long()] / (normal[inner] - normal[0]) * beyond
        return values.to(outputs)

    return _number_head("quantiles", count, outputs, pinball, Predictive(lambda x: x.mean(2, keepdim=True), at))


def _number_head(
    name: str, width: int, outputs: Scaled, losses: Callable[[Tensor, Tensor], Tensor], predictive: Predictive
) -> NumberHead:
    def of_samples(outputs: Tensor, y: Tensor) -> Metrics:
        errors = (predictive.mean(outputs.detach()) - y).square()
        return {"loss": losses(outputs, y), "mse": errors[..., 0]}

    def of_tasks(outputs: Tensor, y: Tensor) -> Metrics:
        return {key: values.mean(dim=1) for key, values in of_samples(outputs, y).items()}

    return NumberHead(width, outputs, Loss(name, ("numbers",), "mse", of_tasks, of_samples), predictive)
