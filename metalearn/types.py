"""The words that every part of the program shares."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Generator, Tensor

Params = dict[str, Tensor]
"""Parameters by name. Meta-parameters are plain leaves without a graph; inside an inner loop every
tensor carries one more leading dimension, the tasks of the chunk."""

Metrics = dict[str, Tensor]

Unit = Literal["tasks", "samples"]


class Batch(NamedTuple):
    """Examples of `t` tasks: `x` [t, n, …]; `y` [t, n] int64 (classes) or [t, n, d] (regression)."""

    x: Tensor
    y: Tensor


class Episode(NamedTuple):
    """`t` tasks: what each is adapted on (`support`) and what it is judged by (`query`)."""

    support: Batch
    query: Batch


class ChunkResult(NamedTuple):
    """Sums over the tasks of a chunk: gradients of the meta-loss, metrics, and the number of tasks."""

    grads: Params
    metrics: Metrics
    count: int  # type: ignore[assignment]  # a tuple's method has this name too


class Apply(Protocol):
    def __call__(self, params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """Outputs [t, n, d] for `x` [t, n, …] under per-task parameters (each with a leading `t`).

        `support_x` [t, s, …] is the support set that the parameters were adapted on; a model that is
        not transductive takes its normalisation statistics from there.
        """
        ...


class Stage(NamedTuple):
    """One step of a network that is a sequence of them: `apply(params, h, known)` takes what the stage before gave.

    `params` are the names of its own. If `known` is above 0, normalisation statistics are those of the first
    `known` samples only.
    """

    name: str
    params: tuple[str, ...]
    apply: Callable[[Params, Tensor, int], Tensor]


class Model(NamedTuple):
    """A network as pure functions.

    `activations` counts the floats that one input leaves behind in a forward pass: what
    `task_chunk=auto` reckons with. `stages` are what it can be cut into; none where it cannot be. `note` is
    what a user should know of how it is computed, if anything. `features` gives what the `head`, its last linear
    layer, is given: [t, n, d]; both are None where it does not end in one. `norms` are the parameters of its
    normalisation layers.
    """

    init: Callable[[Generator], Params]
    apply: Apply
    transductive: bool
    activations: int
    stages: tuple[Stage, ...] = ()
    note: str = ""
    features: Apply | None = None
    head: Stage | None = None
    norms: tuple[str, ...] = ()


class Adapt(Protocol):
    def __call__(self, params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        """A predictor for one task (`support.x` [1, n, …]) after `steps` inner steps (default: `eval_steps`)."""
        ...


class Algorithm(NamedTuple):
    """A learner as a set of pure functions.

    `meta_grad(params, episode, step)` sums over the tasks; `evaluate(params, episode)` gives per-task
    values [t, k + 1], column i after i inner steps; `loss(params, episode, step)` is the summed query
    loss with its graph, and `outcome(params, episode, step)` the per-task values [t] behind it, `loss` among
    them with its graph. Both are None where the meta-gradient is not that of such a graph.

    A learner may learn from single samples (`trained_on`): it is given one episode whose queries are the samples of
    a micro-batch, and what is per task above is per sample. The same goes for what it is judged by.
    """

    init: Callable[[Generator], Params]
    meta_grad: Callable[[Params, Episode, int], ChunkResult]
    evaluate: Callable[[Params, Episode], Metrics]
    adapt: Adapt
    loss: Callable[[Params, Episode, int], Tensor] | None
    outcome: Callable[[Params, Episode, int], Metrics] | None = None
    trained_on: Unit = "tasks"
    evaluated_on: Unit = "tasks"


class TaskSource(Protocol):
    def classes(self, split: str) -> int | None:
        """How many classes a label tells apart; None for regression."""
        ...

    def episodes(self, split: str, indices: Tensor) -> Episode:
        """The tasks numbered `indices` (int64 [t]) of `split`: the same for the same numbers, always.

        A source of plain samples gives one episode: its queries are the samples so numbered, its support set
        is empty in training, and later a fixed set of training samples, for normalisation statistics.
        """
        ...

    def unit(self, split: str) -> Unit:
        """What its numbers stand for."""
        ...

    def size(self, split: str) -> int | None:
        """How many tasks or samples there are to judge a learner by; None: without end."""
        ...


class ParameterOwner(Protocol):
    """Where the parameters live under a strategy that steps them where they are. An optimiser's state is a
    `state_dict` over the parameters sorted by name."""

    def push(self, params: Params, optimizer: dict[str, Any]) -> None:
        """Sends parameters and optimiser's state there."""
        ...

    def advance(self, chunks: Sequence[Tensor], step: int, rate: float) -> Sequence[ChunkResult]:
        """One step at `rate`; the chunks' results without gradients.

        Raises:
            FloatingPointError: a gradient is not finite; the step is not applied.
        """
        ...

    def pull(self) -> tuple[Params, dict[str, Any]]:
        """Parameters and optimiser's state as they are now."""
        ...


class Strategy(Protocol):
    """How chunks of tasks travel to whoever computes them."""

    @property
    def drives(self) -> bool:
        """Whether this process runs the training loop."""
        ...

    @property
    def owner(self) -> ParameterOwner | None:
        """None where the loop itself steps the parameters."""
        ...

    def map(self, params: Params, chunks: Sequence[Tensor], step: int) -> Sequence[ChunkResult]:
        """The chunks' results, in chunk order; or one result, their sum."""
        ...

    def evaluate(self, params: Params, split: str, chunks: Sequence[Tensor]) -> Metrics:
        """The values of every task, in task order."""
        ...

    def diagnose(self, params: Params, chunks: Sequence[Tensor], step: int) -> Metrics:
        """For every training task, in task order: its `fault`, numbered as in `metalearn.training.faults`, and the
        `worker` that computed it."""
        ...

    def cost(self) -> dict[str, float]:
        """What the last step cost each worker: seconds in compute, waiting and communication, and bytes sent."""
        ...

    def agree(self, answer: bool) -> bool:
        """Rank zero's answer, on every rank that drives."""
        ...

    def share(self, value: bytes) -> bytes:
        """Rank zero's value, on every rank that drives."""
        ...

    def close(self, failure: BaseException | None = None) -> None:
        """Ends the session; with `failure`, the other workers are told to stop at once."""
        ...
