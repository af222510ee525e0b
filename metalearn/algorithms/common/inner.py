"""Inner optimisers, descent by them, and learners, for all tasks of a chunk at once. Both can be differentiated.

Each optimiser computes what torch's of the same name does, as a pure function: from gradients and state it gives the
directions and the new state. A step subtracts the rate times the directions.

Learners are of two kinds: those that adapt by descent, and those that compare features.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of

from metalearn.algorithms.common.arithmetic import State, without
from metalearn.algorithms.common.losses import by_sample, objective
from metalearn.errors import ConfigError, DataError, Invalid, first_line, fraction, not_negative, positive, switches
from metalearn.nn.layers import per_task
from metalearn.nn.network import gradient_at, is_packed, leaves, one_for_each
from metalearn.nn.surroundings import now_and_again, surroundings
from metalearn.types import (
    STATE,
    Adapt,
    Algorithm,
    Apply,
    Batch,
    ChunkResult,
    Episode,
    Metrics,
    Model,
    Params,
    Stage,
    summed,
)

Rate = float | Params  # one rate for all parameters, or one for each, of a shape that broadcasts to the parameter's
Rates = Rate | Callable[[int], Rate]  # the same at every inner step, or by the number of the step, from 0

Step = Callable[[Params, State, int], tuple[Params, State]]
"""`step(params, state, number)`: parameters and the optimiser's state after inner step `number`."""

Point = TypeVar("Point")


class InnerOptimizer(NamedTuple):
    """`start(params)` gives the state before the first step. `direct(grads, state, step)` gives the directions, which a
    step subtracts, and the new state; all are of the parameters' names and shapes [t, *shape]. Steps count from 0. Each
    part of the state is a sum that a step multiplies by its number in `decays`, and adds to. It is `plain` if the
    directions are the gradients. It is `elementwise` if the direction of a number follows from the gradients of that
    number alone: then `direct` may get all parameters of a task in one row, which is faster."""

    start: Callable[[Params], State]
    direct: Callable[[Params, State, int], tuple[Params, State]]
    decays: Mapping[str, float] = MappingProxyType({})
    plain: bool = False
    elementwise: bool = False


def sgd() -> InnerOptimizer:
    """Plain gradient descent."""
    return InnerOptimizer(lambda params: {}, lambda grads, state, step: (grads, state), plain=True, elementwise=True)


SGD = sgd()


def momentum(*, momentum: float) -> InnerOptimizer:
    """Gradient descent with momentum (Sutskever et al. 2013), as torch has it: m ← μ m + g, and m is the direction.
    Raises ValueError for a μ, `momentum`, outside [0, 1)."""
    fraction("momentum", momentum)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: momentum * state["m"][name] + g for name, g in grads.items()}
        return kept, {"m": kept}

    return InnerOptimizer(lambda params: {"m": _zeros(params)}, direct, {"m": momentum}, elementwise=True)


def rmsprop(*, decay: float, eps: float) -> InnerOptimizer:
    """RMSprop (Tieleman and Hinton 2012): v ← ρ v + (1 − ρ) g², and the direction is g / (√v + ε). Raises ValueError
    for a ρ, `decay`, outside [0, 1), or an ε, `eps`, that is not above 0."""
    fraction("decay", decay)
    positive(eps=eps)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: decay * state["v"][name] + (1 - decay) * g.square() for name, g in grads.items()}
        return {name: g / (_root(kept[name]) + eps) for name, g in grads.items()}, {"v": kept}

    return InnerOptimizer(lambda params: {"v": _zeros(params)}, direct, {"v": decay}, elementwise=True)


def adam(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> InnerOptimizer:
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980), Algorithm 1, with the paper's names. Raises ValueError for a decay
    outside [0, 1), or an `eps` that is not above 0."""
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    positive(eps=eps)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        first = {name: beta1 * state["m"][name] + (1 - beta1) * g for name, g in grads.items()}
        second = {name: beta2 * state["v"][name] + (1 - beta2) * g.square() for name, g in grads.items()}
        of_first, of_second = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        directions = {name: first[name] / of_first / (_root(second[name] / of_second) + eps) for name in grads}
        return directions, {"m": first, "v": second}

    decays = {"m": beta1, "v": beta2}
    return InnerOptimizer(lambda params: {name: _zeros(params) for name in decays}, direct, decays, elementwise=True)


def by_tensor(inner: InnerOptimizer, model: Model) -> InnerOptimizer:
    """The optimiser for the model's parameters in any form: one that is not `elementwise` gets them by name."""
    if inner.elementwise:
        return inner

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        named = {key: model.by_name(values) for key, values in state.items()}
        directions, state = inner.direct(model.by_name(grads), named, step)
        return model.replaced(grads, directions), state

    return InnerOptimizer(lambda params: inner.start(model.by_name(params)), direct, inner.decays, elementwise=True)


def descent(
    loss: Callable[[Params, int], Tensor], params: Params, *, optimizer: InnerOptimizer, rate: Rates, steps: int,
    order: int, checkpoint: bool | str = False,
) -> Iterator[Params]:  # fmt: skip
    """Descent on any losses of the tasks, by autograd: yields `params`, then the parameters after each step.

    `loss(params, step)` gives the losses [t] of per-task parameters. `order` says what the steps' derivative is. 2: the
    exact one. 1: each step's gradient counts as a constant (first-order MAML). 0: there is none, and no graph is kept
    (evaluation). `checkpoint` is as for `descend`, but `nested` is True: a step here calls autograd, which torch cannot
    nest in computations that it repeats.
    """

    def gradient(params: Params, step: int) -> Params:
        at = leaves(params) if order == 0 else params  # in evaluation the parameters do not require a gradient
        with torch.enable_grad():
            return gradient_at(at, loss(at, step), twice=order == 2)

    step = step_along(gradient, optimizer, rate, order)
    return descend(step, params, optimizer.start(params), steps, checkpoint=bool(checkpoint) and order == 2)


def step_along(gradient: Callable[[Params, int], Params], optimizer: InnerOptimizer, rate: Rates, order: int) -> Step:
    """A step by the optimiser, from the `gradient(params, step)` of the losses; `order` as for `descent`."""

    def step(params: Params, state: State, number: int) -> tuple[Params, State]:
        grads = gradient(params, number)
        with graph_of(order):
            directions, state = optimizer.direct(grads, state, number)
            by = rate(number) if callable(rate) else rate
            if isinstance(by, float | int):
                # Not p − rate · d, which rounds twice: `Model.step` takes such a step in one pass, to the same bits.
                return {name: p.add(directions[name], alpha=-by) for name, p in params.items()}, state
            return {name: p - by[name] * directions[name] for name, p in params.items()}, state

    return step


def graph_of(order: int) -> torch.set_grad_enabled:
    """Within it, a step has a graph if its `order` and the caller want one."""
    return torch.set_grad_enabled(order > 0 and torch.is_grad_enabled())


def descend(
    step: Step, params: Params, state: State, steps: int, *, checkpoint: bool | str = False
) -> Iterator[Params]:
    """Yields `params`, then the parameters after each step.

    With `checkpoint`, the graph of a step is not kept: the derivative computes each step again, and then drops it (Chen
    et al. 2016, arXiv 1604.06174). The values stay the same. True keeps the parameters and the optimiser's state after
    every step. `nested` keeps those in the middle of what is computed again, then of each half, and so on (the paper's
    recursive form): after log₂(steps) steps at most, and it computes each step as often. It yields the first and the
    last parameters only.
    """

    def through(params: Params, state: State, first: int, end: int) -> tuple[Params, State]:
        """From one step to another, by halves."""
        if end - first == 1:
            return step(params, state, first)
        middle = (first + end) // 2
        params, state = computed_again(through, params, state, first, middle)
        return computed_again(through, params, state, middle, end)

    yield params
    if checkpoint == "nested" and steps:
        yield computed_again(through, params, state, 0, steps)[0]
        return
    compute: Step = partial(computed_again, step) if checkpoint else step
    for number in range(steps):
        params, state = compute(params, state, number)
        yield params


def computed_again(compute: Callable[..., Point], *args: Any) -> Point:
    """Computes without a graph: the derivative computes again. Arguments may be nested in any way."""
    # Flat, since torch lets go of inputs that are tensors when it nests checkpoints, and not of those in a dict.
    values, form = pytree.tree_flatten(args)

    def of_values(*values: Any) -> Point:
        return compute(*pytree.tree_unflatten(values, form))

    # What is random in a step follows from seeds; the state of torch's generators has no part in it.
    outcome: Point = checkpoint_of(
        of_values, *values, use_reentrant=False, preserve_rng_state=False, context_fn=now_and_again
    )
    return outcome


def last(path: Iterator[Point]) -> Point:
    """The end of a path; what comes before it is not kept."""
    for end in path:
        final = end
    return final


def _zeros(params: Params) -> Params:
    return {name: torch.zeros_like(p) for name, p in params.items()}


def _root(squares: Tensor) -> Tensor:
    """√x, whose derivative at 0 is taken as 0: a parameter without a gradient does not move."""
    # A mean of squares that is carried from task to task may be rounded to less than 0.
    if not squares.requires_grad:
        return squares.clamp_min(0).sqrt()
    # Twice: the derivative of a branch that is not taken is infinite at 0, and 0 · ∞ is not a number.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


Init = Callable[[Generator], Params]
Evaluate = Callable[[Params, Episode], Metrics]

Outcome = Callable[[Params, Episode, int], Metrics]
"""`outcome(params, episode, step)`: the values per task [t]; their `loss` has a graph."""

InnerPath = Callable[[Params, Batch, int, int], Iterator[Params]]
"""`path(params, support, steps, order)` yields the parameters of every task, before the first inner step and after
each. `descent` explains `order`."""

# Meta-gradients


def from_outcome(
    model: Model, outcome: Outcome, adapt: Adapt, *, evaluate: Evaluate | None = None, init: Init | None = None
) -> Algorithm:
    """An algorithm whose meta-loss is that of an outcome. `adapt` and `evaluate` are as in `Algorithm`; without the
    latter, the outcome's values are the one column of a learner without inner steps. `init` draws the meta-parameters,
    if they are not those of the model."""

    @torch.no_grad()
    def evaluated_once(params: Params, episode: Episode) -> Metrics:
        return {name: values.unsqueeze(1) for name, values in outcome(params, episode, 0).items()}

    def loss(params: Params, episode: Episode, step: int) -> Tensor:
        return outcome(params, episode, step)["loss"].sum()

    learned = (gradient_of(outcome), evaluate or evaluated_once, adapt, loss, outcome)
    return Algorithm(init or model.init, *learned, computes=model.loss)


def gradient_of(outcome: Outcome) -> Callable[[Params, Episode, int], ChunkResult]:
    """The gradient of the summed loss of an outcome, and the other values' sums."""

    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        theta = leaves(params)
        try:
            with torch.enable_grad():
                values = outcome(theta, episode, step)
                losses = values["loss"]
                if not losses.requires_grad:
                    advice = "let a parameter of the features learn, or type another algorithm, such as algorithm=maml"
                    raise ConfigError(f"model: no loss of this algorithm depends on a parameter that learns; {advice}")
                # Factors that are known as 1 spare a GPU a look at their value, which the host would wait for. On a CPU
                # not so: torch imports sympy, for a second, to compare the shapes of losses and factors.
                total, factors = (losses, one_for_each(losses)) if losses.is_cuda else (losses.sum(), None)
                grads = torch.autograd.grad(
                    total, list(theta.values()), factors, allow_unused=True, materialize_grads=True
                )
        except NotImplementedError as error:  # torch's, of an operation with one derivative only
            advice = "type algorithm.first_order=true where there is such a key, or take another layer"
            raise ConfigError(f"model: {first_line(error).rstrip('.')}; {advice}") from error
        return ChunkResult(dict(zip(theta, grads, strict=True)), summed(values), len(values["loss"]))

    return meta_grad


# Learners that adapt by descent


def gradient_learner(
    model: Model, path: InnerPath, *, eval_steps: int, inner_steps: int = 0, order: int = 2, init: Init | None = None,
    outcome: Outcome | None = None,
) -> Algorithm:  # fmt: skip
    """An algorithm whose meta-loss is the query loss after `inner_steps` steps along `path`; validation and test take
    `eval_steps`. `order` is 2, or 1 for first-order meta-gradients. `init` draws the meta-parameters, if they are not
    those of the model. `outcome` gives the values per task, if the meta-loss is another."""

    def after_the_last_step(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        adapted = last(path(params, support, inner_steps, order))
        return model.metrics(adapted, query, support.x)

    evaluate, adapt = evaluated_by_descent(model, path, eval_steps)
    return from_outcome(model, outcome or after_the_last_step, adapt, evaluate=evaluate, init=init)


def evaluated_by_descent(model: Model, path: InnerPath, eval_steps: int) -> tuple[Evaluate, Adapt]:
    """`Algorithm.evaluate` and `Algorithm.adapt` of a learner that adapts along `path`."""

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        return _by_step([model.metrics(end, query, support.x) for end in path(params, support, eval_steps, 0)])

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        final = last(path(params, support, eval_steps if steps is None else steps, 0))
        return torch.no_grad()(lambda x: model.apply(final, x, support.x))

    return evaluate, adapt


def evaluated_by_new_heads(
    model: Model, path: InnerPath, classify: Callable[[Params, Tensor], Tensor], eval_steps: int
) -> tuple[Evaluate, Adapt]:
    """`Algorithm.evaluate` and `Algorithm.adapt` of a learner that leaves the features alone, and trains a head for
    every task along `path`, whose support set has features [t, n, d] in place of samples. `classify` gives the logits
    [t, n, ways] of heads for features."""
    # The heads alone are a model: so features are computed once, not for every step.
    heads = model._replace(apply=lambda head, x, support_x=None: classify(head, x), network=None)
    evaluate_features, adapt_to_features = evaluated_by_descent(heads, path, eval_steps)

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        features = model.features_of(params, support.x.shape[0])
        of_support, of_query = features(support.x), features(query.x, support.x)
        return evaluate_features(params, Episode(Batch(of_support, support.y), Batch(of_query, query.y)))

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        features = model.features_of(params, support.x.shape[0])
        of_features = adapt_to_features(params, Batch(features(support.x), support.y), steps)
        return torch.no_grad()(lambda x: of_features(features(x, support.x)))

    return evaluate, adapt


def _by_step(values: list[Metrics]) -> Metrics:
    """The values [t] before the first step and after each, as [t, steps + 1]."""
    return {name: torch.stack([after[name] for after in values], dim=1) for name in values[0]}


def support_descent(
    model: Model, weights: Params, support: Batch, *, inner: InnerOptimizer, rate: Rate, steps: int, order: int,
    checkpoint: bool | str = False, replaced: Params | None = None,
) -> Iterator[Params]:  # fmt: skip
    """Descent from weights and by rates that all tasks share, on each task's loss on its support set. Some weights may
    be `replaced` by those of each task [t, *shape]. `order` and `checkpoint` are as for `descent` and `descend`;
    `nested` needs a network that is compiled, else it is True. Raises ConfigError if a weight has no rate."""
    tasks, twice, inner = support.x.shape[0], order == 2, by_tensor(inner, model)
    if not isinstance(rate, float | int):
        if missing := weights.keys() - rate.keys():
            advice = "give one for each parameter, 0 for one that stays"
            raise ConfigError(f"algorithm: its inner rates have none for {', '.join(sorted(missing))}; {advice}")
        rate = {name: rate[name].expand_as(value) for name, value in weights.items()}
    start = model.replaced(model.start(weights, tasks), replaced or {})

    def at_once(theta: Params, state: State, number: int) -> tuple[Params, State]:
        assert isinstance(rate, float | int)
        with graph_of(order):
            return model.step(theta, support, rate, twice=twice), state

    def gradient(theta: Params, number: int) -> Params:
        return model.gradient(theta, support, twice=twice)

    if isinstance(rate, float | int):
        step = at_once if inner.plain else step_along(gradient, inner, rate, order)
    else:
        step = step_along(gradient, inner, model.start(rate, tasks), order)
    # Without a compiled network a step calls autograd, which torch cannot nest in computations that it repeats.
    repeated = order == 2 and (checkpoint if is_packed(start) else bool(checkpoint))
    return descend(step, start, inner.start(start), steps, checkpoint=repeated)


def check_descent(
    *, inner_lr: float, eval_steps: int, inner_steps: int = 0, eval_lr_factor: float = 1.0, first_order: bool = False,
    checkpoint_steps: bool | str = False,
) -> None:  # fmt: skip
    """Raises ValueError for a rate or factor that is not above 0, a negative number of steps, or a wrong switch."""
    positive(inner_lr=inner_lr, eval_lr_factor=eval_lr_factor)
    not_negative(inner_steps=inner_steps, eval_steps=eval_steps)
    switches(first_order=first_order)
    if checkpoint_steps not in (True, False, "nested"):
        raise Invalid("checkpoint_steps", checkpoint_steps, "must be true, false or nested", "type KEY=true")


# Learners that compare features


def comparing_learner(model: Model, compare: Callable[[Params, Batch, Tensor], Tensor], init: Init) -> Algorithm:
    """An algorithm that adapts in closed form: `compare(params, support, x)` gives the logits [t, n, ways] of queries
    `x`, and their loss is the meta-loss. Raises ConfigError if the loss ignores a label: each support sample needs a
    class."""
    refuse_ignored(model, "it compares all samples of a support set, so each needs a class; type algorithm=maml")

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        return objective(_of_shown(compare(params, support, query.x), episode), query.y, model.loss)

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        return torch.no_grad()(lambda x: compare(params, support, x))

    return from_outcome(model, outcome, adapt, init=init)


def one_hot(support: Batch, dtype: torch.dtype) -> Tensor:
    """The classes of a support set as [t, n, ways]. Raises ConfigError if its targets are real numbers."""
    if support.y.is_floating_point():
        reason = "it needs classes, and this dataset's targets are real numbers"
        raise ConfigError(f"algorithm: {reason}; type algorithm=maml")
    # torch.export knows no numbers of tensors, but these are there.
    ways = 1 + max(map(max, support.y.tolist())) if torch.compiler.is_exporting() else surroundings().ways
    if ways is None:
        return F.one_hot(support.y, -1).to(dtype)
    # Not torch's function: on a GPU it makes the host wait, to check the labels.
    return (support.y.unsqueeze(2) == torch.arange(ways, device=support.y.device)).to(dtype)


def _of_shown(logits: Tensor, episode: Episode) -> Tensor:
    """The logits [t, n, ways] of an episode's queries. Raises DataError if a class has no support sample, and so no
    logit, or none that is a number. On a GPU, where the host would have to wait, torch's own check finds the one, and
    the run the other, as a loss that is not finite."""
    (support, query) = episode
    if query.y.device.type != "cpu" or query.y.is_floating_point():
        return logits
    ways = max(logits.shape[2], int(query.y.max()) + 1)
    shown = (support.y.unsqueeze(2) == torch.arange(ways)).any(dim=1)
    if ways == logits.shape[2] and (shown.all() or not logits.isnan().any()):
        return logits
    what = f"a support set has no sample of class {int((~shown).nonzero()[0, 1])}"
    advice = "this algorithm compares with samples of each class; type more dataset.shots, or algorithm=maml"
    raise DataError(f"dataset: {what}, and {advice}")


# Learners that are trained on samples, and evaluated on tasks


def trained_on_samples(
    model: Model, adapt: Adapt, evaluate: Evaluate | None = None, *, classify: Apply | None = None,
    init: Init | None = None,
) -> Algorithm:  # fmt: skip
    """An algorithm whose meta-loss is that of the model on single samples of all training classes. `classify` gives the
    outputs for samples, and `init` draws the meta-parameters, if they are not those of the model. Raises ConfigError if
    the loss ignores a label."""
    refuse_ignored(model, "this algorithm trains on plain samples; leave those with this label out of the dataset")
    outputs = classify or model.apply

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        # All samples are those of one task. In training there is no support set, so norms normalise by the micro-batch.
        support_x = support.x if support.x.shape[1] else None
        values = by_sample(outputs(per_task(params, 1), query.x, support_x), query.y, model.loss)
        return {name: value[0] for name, value in values.items()}

    learner = from_outcome(model, outcome, adapt, evaluate=evaluate, init=init)
    return learner._replace(trained_on="samples", classify=outputs)


def refuse_ignored(model: Model, why: str) -> None:
    """Raises ConfigError if the model's loss ignores a label."""
    if model.loss is not None and model.loss.ignored is not None:
        raise ConfigError(f"loss.ignored={model.loss.ignored}: not with this algorithm, since {why}")


# Learners on features of supervised learning: a classifier of all training classes is trained, and tasks compare its
# features, each of length 1 ("L2N" of Wang et al. 2019, arXiv 1911.04623)

CENTRE = f"{STATE}centre"
"""The meta-parameter of the mean of the training features, [d]. If features are `centred` ("CL2N"), it is subtracted
first. It is a carried state: step T moves it by max(1 / T, `RATE_OF_CENTRE`) of the way towards the mean of the
features of that step's samples. So it follows the network, and the features of the last hundred steps or so make it."""

RATE_OF_CENTRE = 0.01


def pretrained(
    model: Model, path: Callable[[Tensor, Tensor, Batch, int], Iterator[Tensor]], *, eval_steps: int, centred: bool
) -> Algorithm:
    """A learner on supervised features. The head of the model has an output for every training class.

    `path(examples, queries, support, steps)` yields the logits [t, n, ways] of queries, before the first step and after
    each, from the features of the support set [t, s, d] and of all queries [t, n, d]. Each has length 1; if `centred`,
    the mean of the training features is subtracted first. Raises ValueError if `centred` is no bool, or the model has
    no linear head, and ConfigError if the loss ignores a label.
    """
    switches(centred=centred)
    _, head = features_and_head(model)

    def along(params: Params, support: Batch, x: Tensor, steps: int) -> Iterator[Tensor]:
        features = model.features_of(without(STATE, params), support.x.shape[0])
        examples, queries = features(support.x), features(x, support.x)
        if centred:
            examples, queries = examples - params[CENTRE], queries - params[CENTRE]
        return path(F.normalize(examples, dim=2), F.normalize(queries, dim=2), support, steps)

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        outputs = along(params, support, query.x, eval_steps)
        return _by_step([objective(_of_shown(logits, episode), query.y, model.loss) for logits in outputs])

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        return torch.no_grad()(lambda x: last(along(params, support, x, eval_steps if steps is None else steps)))

    plain = trained_on_samples(model, adapt, evaluate)
    if not centred:
        return plain._replace(evaluated_on_features=True)

    def init(generator: Generator) -> Params:
        params = model.init(generator)
        weight = params[head.params[0]]
        return params | {CENTRE: weight.new_zeros(weight.shape[1])}

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        weights = without(STATE, params)
        result = plain.meta_grad(weights, episode, step)
        (features,) = model.features_of(weights, 1)(episode.query.x)
        # The step's mean over samples is subtracted, as the gradient of any state.
        change = max(1 / step, RATE_OF_CENTRE) * (params[CENTRE] - features).sum(dim=0)
        return result._replace(grads=result.grads | {CENTRE: change})

    return plain._replace(init=init, meta_grad=meta_grad, loss=None, outcome=None)


# The parts of a model


def features_and_head(model: Model) -> tuple[Apply, Stage]:
    """The function that computes the inputs of the last layer, and that layer. Raises ValueError if the model does not
    end in a linear layer."""
    if model.features is None or model.head is None:
        needs = "this algorithm needs a network whose outputs come from one linear layer (nn.Linear) that learns"
        why = f" ({model.headless})" if model.headless else ""
        raise ValueError(f"model: {needs}, and this one has none{why}; type model=conv4, for example")
    return model.features, model.head


def without_head(model: Model) -> Init:
    """Draws the model's parameters, without those of the head."""
    _, head = features_and_head(model)

    def init(generator: Generator) -> Params:
        return {name: value for name, value in model.init(generator).items() if name not in head.params}

    return init
