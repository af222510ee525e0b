"""Inner optimisers, descent by them, and learners, for all tasks of a chunk at once. Both can be differentiated.

Each optimiser computes what torch's of the same name does, as a pure function: from gradients and state it gives the
directions and the new state. A step subtracts the rate times the directions.

Learners are of two kinds: those that adapt by descent, and those that compare features.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of

from metalearn.algorithms.common.losses import by_sample, objective
from metalearn.errors import (
    ConfigError,
    DataError,
    Invalid,
    first_line,
    fraction,
    not_negative,
    positive,
    real_number,
    true_or_false,
)
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
    Features,
    Metrics,
    Model,
    Params,
    Stage,
)

TaskLoss = Callable[[Params, int], Tensor]
"""`loss(params, step)`: the losses [t] of per-task parameters, at an inner step (from 0)."""

Rate = float | Params  # one rate for all parameters, or one for each, of a shape that broadcasts to the parameter's

State = dict[str, Params]

Checkpoint = bool | Literal["nested"]  # whether steps are computed again for their derivative; see `descent`

Step = Callable[[Params, State, int], tuple[Params, State]]
"""`step(params, state, number)`: parameters and the optimiser's state after inner step `number`."""

Point = TypeVar("Point")


class InnerOptimizer(NamedTuple):
    """`start(params)` gives the state before the first step. `direct(grads, state, step)` gives the directions, which a
    step subtracts, and the new state. Steps count from 0. Each part of the state is a sum that a step multiplies by its
    number in `decays`, and adds to. It is `plain` if the directions are the gradients."""

    start: Callable[[Params], State]
    direct: Callable[[Params, State, int], tuple[Params, State]]
    decays: Mapping[str, float] = MappingProxyType({})
    plain: bool = False


def sgd() -> InnerOptimizer:
    """Plain gradient descent."""
    return InnerOptimizer(lambda params: {}, lambda grads, state, step: (grads, state), plain=True)


SGD = sgd()


def momentum(*, momentum: float) -> InnerOptimizer:
    """Gradient descent with momentum (Sutskever et al. 2013), as torch has it: m ← μ m + g, and m is the direction.

    Args:
        momentum: μ.

    Raises:
        ValueError: a decay outside [0, 1).
    """
    fraction("momentum", momentum)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: momentum * state["m"][name] + g for name, g in grads.items()}
        return kept, {"m": kept}

    return InnerOptimizer(lambda params: {"m": _zeros(params)}, direct, {"m": momentum})


def rmsprop(*, decay: float, eps: float) -> InnerOptimizer:
    """RMSprop (Tieleman and Hinton 2012): v ← ρ v + (1 − ρ) g², and the direction is g / (√v + ε).

    Args:
        decay: ρ.
        eps: ε.

    Raises:
        ValueError: a decay outside [0, 1), or an ε that is not above 0.
    """
    fraction("decay", decay)
    real_number("eps", eps, above=0)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: decay * state["v"][name] + (1 - decay) * g.square() for name, g in grads.items()}
        return {name: g / (_root(kept[name]) + eps) for name, g in grads.items()}, {"v": kept}

    return InnerOptimizer(lambda params: {"v": _zeros(params)}, direct, {"v": decay})


def adam(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> InnerOptimizer:
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980), Algorithm 1.

    Args:
        beta1, beta2, eps: as in the paper.

    Raises:
        ValueError: a decay outside [0, 1), or an ε that is not above 0.
    """
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    real_number("eps", eps, above=0)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        first = {name: beta1 * state["m"][name] + (1 - beta1) * g for name, g in grads.items()}
        second = {name: beta2 * state["v"][name] + (1 - beta2) * g.square() for name, g in grads.items()}
        of_first, of_second = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        directions = {name: first[name] / of_first / (_root(second[name] / of_second) + eps) for name in grads}
        return directions, {"m": first, "v": second}

    return InnerOptimizer(lambda params: {"m": _zeros(params), "v": _zeros(params)}, direct, {"m": beta1, "v": beta2})


def constant(lr: Rate) -> Callable[[int], Rate]:
    """The same rate at every inner step."""
    return lambda step: lr


def descent(
    loss: TaskLoss, params: Params, *, optimizer: InnerOptimizer, rate: Callable[[int], Rate], steps: int, order: int,
    checkpoint: Checkpoint = False,
) -> Iterator[Params]:  # fmt: skip
    """Descent on any losses of the tasks, by autograd: yields `params`, then the parameters after each step.

    `order` says what the steps' derivative is. 2: the exact one. 1: each step's gradient counts as a constant
    (first-order MAML). 0: there is none, and no graph is kept (evaluation). `checkpoint` is as for `descend`, but
    `nested` is True: a step here calls autograd, which torch cannot nest in computations that it repeats.
    """

    def gradient(params: Params, step: int) -> Params:
        at = leaves(params) if order == 0 else params  # in evaluation the parameters do not require a gradient
        with torch.enable_grad():
            return gradient_at(at, loss(at, step), twice=order == 2)

    step = step_along(gradient, optimizer, rate, order)
    return descend(step, params, optimizer.start(params), steps, checkpoint=bool(checkpoint) and order == 2)


def step_along(
    gradient: Callable[[Params, int], Params], optimizer: InnerOptimizer, rate: Callable[[int], Rate], order: int
) -> Step:
    """A step by the optimiser, from the `gradient(params, step)` of the losses; `order` as for `descent`."""

    def step(params: Params, state: State, number: int) -> tuple[Params, State]:
        grads = gradient(params, number)
        with graph_of(order):
            directions, state = optimizer.direct(grads, state, number)
            by = rate(number)
            if isinstance(by, float | int):
                # Not p − rate · d, which rounds twice: `Model.step` takes such a step in one pass, to the same bits.
                return {name: p.add(directions[name], alpha=-by) for name, p in params.items()}, state
            return {name: p - by[name] * directions[name] for name, p in params.items()}, state

    return step


def graph_of(order: int) -> torch.set_grad_enabled:
    """Within it, a step has a graph if its `order` and the caller want one."""
    return torch.set_grad_enabled(order > 0 and torch.is_grad_enabled())


def descend(
    step: Step, params: Params, state: State, steps: int, *, checkpoint: Checkpoint = False
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
    for number in range(steps):
        params, state = (
            computed_again(step, params, state, number) if checkpoint else step(params, state, number)
        )  # fmt: skip
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


# Implicit gradients


def conjugate_gradient(product: Callable[[Params], Params], right: Params, steps: int) -> tuple[Params, Tensor]:
    """Solves A x = b from x = b, for every task by itself (Hestenes and Stiefel 1952).

    Args:
        product: v ↦ A v. A must be symmetric; only a system with a positive definite A is solved.
        right: b, each [t, …].
        steps: the most steps. A task stops early if its residual is zero, or if b or a direction shows that its A is
            not positive definite.

    Returns:
        x, and ‖A x − b‖ / ‖b‖ [t].
    """
    x, image = right, product(right)  # from b: iMAML's first solution is then first-order MAML's gradient
    residual = direction = {name: value - image[name] for name, value in right.items()}
    before, going = _dot(residual, residual), _dot(right, image) > 0
    for _ in range(steps):  # no early end: all tasks are computed together, and a GPU would have to be waited for
        image = product(direction)
        curvature = _dot(direction, image)
        going = going & (curvature > 0)
        length = torch.where(going, _ratio(before, curvature), 0.0)
        x, residual = _along(x, direction, length), _along(residual, image, -length)
        now = _dot(residual, residual)
        direction = _along(residual, direction, _ratio(now, before))
        before = now
    return x, _ratio(before, _dot(right, right)).sqrt()


def _dot(a: Params, b: Params) -> Tensor:
    """The inner product of every task's parameters, [t]."""
    return torch.stack([(a[name] * b[name]).reshape(len(a[name]), -1).sum(dim=1) for name in a]).sum(dim=0)


def _along(start: Params, direction: Params, lengths: Tensor) -> Params:
    """start + length · direction; each task has its own length [t]."""
    return {name: p + lengths.view(-1, *[1] * (p.dim() - 1)) * direction[name] for name, p in start.items()}


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


RATE = "inner_lr."  # the prefix of the names of learned inner rates

Init = Callable[[Generator], Params]

Evaluate = Callable[[Params, Episode], Metrics]

Outcome = Callable[[Params, Episode, int], Metrics]
"""`outcome(params, episode, step)`: the values per task [t]; their `loss` has a graph."""

InnerPath = Callable[[Params, Batch, int, int], Iterator[Params]]
"""`path(params, support, steps, order)` yields the parameters of every task, before the first inner step and after
each. `metalearn.algorithms.common.inner.descent` explains `order`."""

Compare = Callable[[Params, Batch, Tensor], Tensor]
"""`compare(params, support, x)`: logits [t, n, ways] of the queries `x`."""

PathOfLogits = Callable[[Params, Batch, Tensor, int], Iterator[Tensor]]
"""`path(params, support, x, steps)` yields the logits [t, n, ways] of the queries `x`, before the first step and after
each."""


# Meta-gradients


def summed(values: Metrics) -> Metrics:
    """Per-task values [t], summed over the tasks and without their graph, as float64."""
    return {name: value.detach().double().sum() for name, value in values.items()}


def total_of(outcome: Outcome) -> Callable[[Params, Episode, int], Tensor]:
    """The summed loss of an outcome, with its graph."""
    return lambda params, episode, step: outcome(params, episode, step)["loss"].sum()


def gradient_of(outcome: Outcome) -> Callable[[Params, Episode, int], ChunkResult]:
    """The gradient of the summed loss of an outcome, and the other values' sums."""

    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        theta = leaves(params)
        try:
            with torch.enable_grad():
                values = outcome(theta, episode, step)
                losses = values["loss"]
                if not losses.requires_grad:
                    raise ConfigError(
                        "model: no loss of this algorithm depends on a parameter that learns; let a parameter of the "
                        "features learn, or type another algorithm, such as algorithm=maml"
                    )
                # Factors that are known as 1 spare a GPU a look at their value, which the host would wait for. On a CPU
                # not so: torch imports sympy, for a second, to compare the shapes of losses and factors.
                total, factors = (losses, one_for_each(losses)) if losses.is_cuda else (losses.sum(), None)
                grads = torch.autograd.grad(
                    total, list(theta.values()), factors, allow_unused=True, materialize_grads=True
                )
        except NotImplementedError as error:  # torch's, of an operation with one derivative only
            raise ConfigError(
                f"model: {first_line(error).rstrip('.')}; type algorithm.first_order=true where there is such a key, "
                "or take another layer"
            ) from error
        return ChunkResult(dict(zip(theta, grads, strict=True)), summed(values), len(values["loss"]))

    return meta_grad


# Learners that adapt by descent


def gradient_learner(
    model: Model, path: InnerPath, *, eval_steps: int, inner_steps: int = 0, order: int = 2, init: Init | None = None,
    outcome: Outcome | None = None,
) -> Algorithm:  # fmt: skip
    """An algorithm whose meta-loss is the query loss after `inner_steps` steps along `path`.

    Args:
        model: the network.
        path: how a task is adapted.
        eval_steps: inner steps in validation and test.
        inner_steps: inner steps in meta-training.
        order: 2, or 1 for first-order meta-gradients.
        init: draws the meta-parameters, if they are not those of the model.
        outcome: gives the values per task, if the meta-loss is not the query loss after the last step.
    """

    def after_the_last_step(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        adapted = last(path(params, support, inner_steps, order))
        return model.metrics(adapted, query, support.x)

    outcome = outcome or after_the_last_step
    evaluate, adapt = evaluated_by_descent(model, path, eval_steps)
    learned = (gradient_of(outcome), evaluate, adapt, total_of(outcome), outcome)
    return Algorithm(init or model.init, *learned, computes=model.loss)


def evaluated_by_descent(model: Model, path: InnerPath, eval_steps: int) -> tuple[Evaluate, Adapt]:
    """`Algorithm.evaluate` and `Algorithm.adapt` of a learner that adapts along `path`."""

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        return _by_step([
            model.metrics(adapted, query, support.x) for adapted in path(params, support, eval_steps, 0)
        ])  # fmt: skip

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        final = last(path(params, support, eval_steps if steps is None else steps, 0))

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return model.apply(final, x, support.x)

        return predict

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

    def with_features(params: Params, support: Batch) -> tuple[Features, Batch]:
        features = model.features_of(params, support.x.shape[0])
        return features, Batch(features(support.x), support.y)

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        features, support_features = with_features(params, support)
        return evaluate_features(params, Episode(support_features, Batch(features(query.x, support.x), query.y)))

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        features, support_features = with_features(params, support)
        of_features = adapt_to_features(params, support_features, steps)

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return of_features(features(x, support.x))

        return predict

    return evaluate, adapt


def _by_step(values: list[Metrics]) -> Metrics:
    """The values [t] before the first step and after each, as [t, steps + 1]."""
    return {name: torch.stack([after[name] for after in values], dim=1) for name in values[0]}


def support_descent(
    model: Model, weights: Params, support: Batch, *, inner: InnerOptimizer, rate: Rate, steps: int, order: int,
    checkpoint: Checkpoint = False, replaced: Params | None = None,
) -> Iterator[Params]:  # fmt: skip
    """Descent from weights and by rates that all tasks share, on each task's loss on its support set. Some weights may
    be `replaced` by those of each task [t, *shape]. `order` and `checkpoint` are as for `descent` and `descend`;
    `nested` needs a network that is compiled, else it is True."""
    tasks, twice = support.x.shape[0], order == 2
    start = model.replaced(model.start(weights, tasks), replaced or {})

    def at_once(theta: Params, state: State, number: int) -> tuple[Params, State]:
        assert isinstance(rate, float | int)
        with graph_of(order):
            return model.step(theta, support, rate, twice=twice), state

    def gradient(theta: Params, number: int) -> Params:
        return model.gradient(theta, support, twice=twice)

    if isinstance(rate, float | int):
        step = at_once if inner.plain else step_along(gradient, inner, constant(rate), order)
    else:
        step = step_along(gradient, inner, constant(model.start(rate, tasks)), order)
    # Without a compiled network a step calls autograd, which torch cannot nest in computations that it repeats.
    repeated = order == 2 and (checkpoint if is_packed(start) else bool(checkpoint))
    return descend(step, start, inner.start(start), steps, checkpoint=repeated)


def check_descent(
    *, inner_lr: float, eval_steps: int, inner_steps: int = 0, eval_lr_factor: float = 1.0, first_order: bool = False,
    checkpoint_steps: Checkpoint = False,
) -> None:  # fmt: skip
    """Raises ValueError for a rate or factor that is not above 0, a negative number of steps, or a wrong switch."""
    positive(inner_lr=inner_lr, eval_lr_factor=eval_lr_factor)
    not_negative(inner_steps=inner_steps, eval_steps=eval_steps)
    true_or_false("first_order", first_order)
    if checkpoint_steps not in (True, False, "nested"):
        raise Invalid("checkpoint_steps", checkpoint_steps, "must be true, false or nested", "type KEY=true")


# Learners that compare features


def comparing_learner(model: Model, compare: Compare, init: Init) -> Algorithm:
    """An algorithm that adapts in closed form: its meta-loss is that of the outputs of `compare`. Raises ConfigError if
    the loss ignores a label, and each support sample needs a class."""
    refuse_ignored(model, "it compares all samples of a support set, so each needs a class; type algorithm=maml")

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        return objective(_of_shown(compare(params, support, query.x), episode), query.y, model.loss)

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return compare(params, support, x)

        return predict

    learned = (gradient_of(outcome), evaluated_once(outcome), adapt, total_of(outcome), outcome)
    return Algorithm(init, *learned, computes=model.loss)


def evaluated_once(outcome: Outcome) -> Evaluate:
    """`Algorithm.evaluate` of a learner without inner steps: one column."""

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        return {name: values.unsqueeze(1) for name, values in outcome(params, episode, 0).items()}

    return evaluate


def one_hot(support: Batch, dtype: torch.dtype) -> Tensor:
    """The classes of a support set as [t, n, ways]. Raises ConfigError if its targets are real numbers."""
    if support.y.is_floating_point():
        raise ConfigError(
            "algorithm: it needs classes, and this dataset's targets are real numbers; type algorithm=maml"
        )
    # torch.export knows no numbers of tensors, but these are there.
    ways = 1 + max(map(max, support.y.tolist())) if torch.compiler.is_exporting() else surroundings().ways
    if ways is None:
        return F.one_hot(support.y, -1).to(dtype)
    # Not torch's function: on a GPU it makes the host wait, to check the labels.
    return (support.y.unsqueeze(2) == torch.arange(ways, device=support.y.device)).to(dtype)


def class_means(features: Tensor, classes: Tensor) -> Tensor:
    """The mean of the features [t, n, d] of each class: [t, ways, d], for `classes` [t, n, ways] as by `one_hot`. It is
    NaN for a class without a sample."""
    return classes.transpose(1, 2) @ features / classes.sum(dim=1).unsqueeze(2)


def _of_shown(logits: Tensor, episode: Episode) -> Tensor:
    """The logits [t, n, ways] of an episode's queries.

    Raises:
        DataError: a class has no support sample, and so no logit, or none that is a number. On a GPU, where the host
            would have to wait, torch's own check finds the one, and the run the other, as a loss that is not finite.
    """
    (support, query) = episode
    if query.y.device.type != "cpu" or query.y.is_floating_point():
        return logits
    ways = max(logits.shape[2], int(query.y.max()) + 1)
    shown = (support.y.unsqueeze(2) == torch.arange(ways)).any(dim=1)
    if ways == logits.shape[2] and (shown.all() or not logits.isnan().any()):
        return logits
    missing = int((~shown).nonzero()[0, 1])
    raise DataError(
        f"dataset: a support set has no sample of class {missing}, and this algorithm compares with samples of each "
        "class; type more dataset.shots, or algorithm=maml"
    )


def cholesky(systems: Tensor) -> Tensor:
    """The Cholesky roots of symmetric systems [..., n, n]; NaN where there is none."""
    # torch.linalg.cholesky raises where a run diverges, for which it waits for a GPU. NaN makes the loss not finite,
    # which the run reports.
    roots, failed = torch.linalg.cholesky_ex(systems)
    return torch.where((failed > 0)[..., None, None], torch.nan, roots)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵢ − bⱼ‖² for `a` [t, n, d] and `b` [t, m, d]: [t, n, m]."""
    return (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(dim=3)


def squared_distances_by_products(a: Tensor, b: Tensor) -> Tensor:
    """As `squared_distances`, in less time and memory."""
    # Where a and b are near to each other, the rounding errors of ‖a‖² and ‖b‖² are all that is left.
    squares = a.square().sum(dim=2, keepdim=True) + b.square().sum(dim=2).unsqueeze(1)
    return squares - 2 * a @ b.transpose(1, 2)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """The cosines between the vectors `a` [t, n, d] and `b` [t, m, d]: [t, n, m]."""
    return F.normalize(a, dim=2) @ F.normalize(b, dim=2).transpose(1, 2)


# Learners whose steps need the queries


def evaluated_together(model: Model, path: PathOfLogits, eval_steps: int) -> tuple[Evaluate, Adapt]:
    """`Algorithm.evaluate` and `Algorithm.adapt` of a learner that predicts all queries of a task along `path`."""

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        along = path(params, support, query.x, eval_steps)
        return _by_step([objective(_of_shown(logits, episode), query.y, model.loss) for logits in along])

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return last(path(params, support, x, eval_steps if steps is None else steps))

        return predict

    return evaluate, adapt


# Learners that are trained on samples, and evaluated on tasks


def trained_on_samples(
    model: Model, evaluate: Evaluate, adapt: Adapt, *, classify: Apply | None = None, init: Init | None = None
) -> Algorithm:
    """An algorithm whose meta-loss is that of the model on single samples of all training classes. `classify` gives the
    outputs for samples, and `init` draws the meta-parameters, if they are not those of the model. Raises ConfigError if
    the loss ignores a label."""
    refuse_ignored(model, FOR_SAMPLES)
    outputs = classify or model.apply

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        query = episode.query
        # All samples are those of one task, so norms normalise by the micro-batch.
        values = by_sample(outputs(per_task(params, 1), query.x), query.y, model.loss)
        return {name: value[0] for name, value in values.items()}

    learned = (gradient_of(outcome), evaluate, adapt, total_of(outcome), outcome)
    return Algorithm(init or model.init, *learned, trained_on="samples", classify=outputs, computes=model.loss)


FOR_SAMPLES = "this algorithm trains on plain samples; leave those with this label out of the dataset"


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


class PretrainedHeads(NamedTuple):
    """What a learner on supervised features is made of: `features(params, support, x)` gives those of the support set
    [t, s, d] and of the queries `x` [t, n, d], each of length 1; `learner(evaluate, adapt)` is the algorithm that
    trains the network on samples, and evaluates and adapts so."""

    features: Callable[[Params, Batch, Tensor], tuple[Tensor, Tensor]]
    learner: Callable[[Evaluate, Adapt], Algorithm]


def pretrained(model: Model, *, centred: bool) -> PretrainedHeads:
    """Supervised features of length 1, if they are `centred` less the mean of the training features. The head of the
    model has an output for every training class. Raises ValueError if `centred` is no bool, or the model has no linear
    head."""
    true_or_false("centred", centred)
    _, head = features_and_head(model)

    def unit_features(params: Params, support: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
        features = model.features_of(weights_of(params), support.x.shape[0])
        support_features, queries = features(support.x), features(x, support.x)
        if centred:
            support_features, queries = support_features - params[CENTRE], queries - params[CENTRE]
        return F.normalize(support_features, dim=2), F.normalize(queries, dim=2)

    def init(generator: Generator) -> Params:
        params = model.init(generator)
        (vectors,) = (params[name] for name in head.params if params[name].dim() == 2)
        return params | {CENTRE: vectors.new_zeros(vectors.shape[1])}

    def learner(evaluate: Evaluate, adapt: Adapt) -> Algorithm:
        plain = trained_on_samples(model, evaluate, adapt)
        if not centred:
            return plain._replace(evaluated_on_features=True)

        @torch.no_grad()
        def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
            weights = weights_of(params)
            result = plain.meta_grad(weights, episode, step)
            (features,) = model.features_of(weights, 1)(episode.query.x)
            # The step's mean over samples is subtracted, as the gradient of any state.
            change = max(1 / step, RATE_OF_CENTRE) * (params[CENTRE] - features).sum(dim=0)
            return result._replace(grads=result.grads | {CENTRE: change})

        return plain._replace(init=init, meta_grad=meta_grad, loss=None, outcome=None)

    return PretrainedHeads(unit_features, learner)


# The parts of a model


def weights_of(params: Params) -> Params:
    """The meta-parameters without the state."""
    return without(STATE, params)


def features_and_head(model: Model) -> tuple[Apply, Stage]:
    """The function that computes the inputs of the last layer, and that layer. Raises ValueError if the model does not
    end in a linear layer."""
    if model.features is None or model.head is None:
        raise ValueError(
            "model: this algorithm needs a network whose outputs come from one linear layer (nn.Linear) that learns, "
            f"and this one has none{f' ({model.headless})' if model.headless else ''}; type model=conv4, for example"
        )
    return model.features, model.head


def without_head(model: Model) -> Init:
    """Draws the model's parameters, without those of the head."""
    _, head = features_and_head(model)

    def init(generator: Generator) -> Params:
        return {name: value for name, value in model.init(generator).items() if name not in head.params}

    return init


def prefixed(prefix: str, params: Params) -> Params:
    """The same tensors; every name gets the prefix."""
    return {f"{prefix}{name}": value for name, value in params.items()}


def part(prefix: str, params: Params) -> Params:
    """The tensors whose names have the prefix, under names without it."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def without(prefix: str, params: Params) -> Params:
    """The tensors whose names do not have the prefix."""
    return {name: value for name, value in params.items() if not name.startswith(prefix)}
