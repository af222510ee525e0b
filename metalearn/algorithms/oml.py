"""OML, Javed and White 2019 (arXiv 1905.12588): features for learning from a stream without forgetting.

A task is a stream: the support samples in their order, class after class, each seen once. A linear classifier of
features of length 1 starts at zero and takes a step of plain descent on the cross-entropy of each sample. The meta-loss
is that of all queries at the end of the stream, where a factor scales the outputs. It is differentiated through all
steps by the features, the rate and the factor.

Differences from the paper, from its authors' later code, and from ANML (Beaulieu et al. 2020, arXiv 2002.09571):

- What learns from the stream is one linear layer, as in the later code, and it starts at zero, so that a stream may
  have any number of classes. The paper's has two layers, whose start is learned; in ANML a network gates the features.
- A training task is a short stream of many classes, as the test's is a long one. Theirs is a stream of few classes
  with samples of others among the queries.
- Rate and factor are learned, and features have length 1.

With `model.transductive=false` the first samples, as many as a class has on the average, normalise all others: by the
whole support set, as with true, a step would know of samples that come after it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.inner import comparing_learner, one_hot, without_head
from metalearn.algorithms.common.losses import objective
from metalearn.errors import ConfigError, positive
from metalearn.nn.surroundings import surroundings
from metalearn.types import Algorithm, Batch, Episode, Metrics, Model, Params

LOG_RATE, LOG_SCALE = "log_rate", "log_scale"  # the names of the logarithms of rate and scale, divided by `SPEED`
SPEED = 5.0  # how much faster than a weight these logarithms move, under an optimiser whose steps have one size for all
PART = 1000  # samples whose features are computed together without a derivative: a long stream needs less memory


def oml(*, model: Model, inner_lr: float, scale: float, eval_lr_factor: float = 1.0) -> Algorithm:
    """Learns features, a rate and a scale for learning from a stream. Raises ValueError for a rate, scale or factor
    that is not above 0, or a model without a linear head.

    Column k of its evaluation is after the first k classes, over their queries, if all have as many samples; column 0
    is before the stream, over all.

    Args:
        model: the network; its head is left out.
        inner_lr: the rate of the steps before meta-training.
        scale: the factor of the outputs for queries before meta-training. It leaves the steps as they are.
        eval_lr_factor: validation and test multiply the rate by it: the longer a stream, the lower the best rate.
    """
    positive(inner_lr=inner_lr, scale=scale, eval_lr_factor=eval_lr_factor)
    start = without_head(model)
    numbers = {LOG_RATE: torch.tensor(math.log(inner_lr) / SPEED), LOG_SCALE: torch.tensor(math.log(scale) / SPEED)}

    def features(params: Params, support: Batch, x: Tensor) -> Tensor:
        """The features [t, n, d] of the samples `x`."""
        if surroundings().present is not None:
            reason = "the figures of this algorithm are by the number of classes, which differs here from task to task"
            raise ConfigError(f"dataset.shots: {reason}; type a number, such as dataset.shots=1")
        first = support.x[:, : max(1, support.x.shape[1] // one_hot(support, x.dtype).shape[2])]
        compute = model.features_of(params, len(x))
        whole = torch.is_grad_enabled() or model.transductive or torch.compiler.is_exporting()
        parts = [x] if whole else x.split(PART, dim=1)
        return F.normalize(torch.cat([compute(part, first) for part in parts], dim=1), dim=2)

    def number(params: Params, name: str) -> Tensor:
        return (SPEED * params[name]).exp()

    def learned(params: Params, support: Batch, factor: float) -> Tensor:
        """The classifier after the stream, times the scale."""
        stream = features(params, support, support.x)
        classes = one_hot(support, stream.dtype)
        rows = stream.new_zeros(len(stream), classes.shape[2], stream.shape[2])
        rows = streamed(rows, stream, classes, factor * number(params, LOG_RATE))
        return number(params, LOG_SCALE) * rows

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        return features(params, support, x) @ learned(params, support, 1.0).transpose(1, 2)

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        stream = features(params, support, support.x)
        order = query.y.argsort(dim=1, stable=True)  # class after class, as in the stream
        asked = number(params, LOG_SCALE) * features(params, support, query.x)
        asked, y = asked.gather(1, order.unsqueeze(2).expand_as(asked)), query.y.gather(1, order)
        classes, rate = one_hot(support, stream.dtype), eval_lr_factor * number(params, LOG_RATE)
        (tasks, samples, ways), columns = classes.shape, list[Metrics]()
        rows = stream.new_zeros(tasks, ways, stream.shape[2])
        for count in range(ways + 1):
            part = slice((count - 1) * samples // ways, count * samples // ways) if count else slice(0)
            rows = streamed(rows, stream[:, part], classes[:, part], rate)
            shown = slice(count * y.shape[1] // ways if count else None)
            columns.append(objective(asked[:, shown] @ rows.transpose(1, 2), y[:, shown], model.loss))
        return {name: torch.stack([column[name] for column in columns], dim=1) for name in columns[0]}

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        rows = learned(params, support, eval_lr_factor).transpose(1, 2)
        return torch.no_grad()(lambda x: features(params, support, x) @ rows)

    learner = comparing_learner(model, compare, lambda generator: start(generator) | numbers)
    return learner._replace(evaluate=evaluate, adapt=adapt)


def streamed(rows: Tensor, features: Tensor, classes: Tensor, rate: Tensor) -> Tensor:
    """The rows [t, ways, d] of a linear classifier after a step of descent on the cross-entropy of each sample, from
    features [t, n, d] and classes [t, n, ways] as by `one_hot`."""
    for f, y in zip(features.unbind(1), classes.unbind(1), strict=True):
        p = (rows @ f.unsqueeze(2)).squeeze(2).softmax(dim=1)
        rows = rows + (rate * (y - p)).unsqueeze(2) * f.unsqueeze(1)
    return rows
