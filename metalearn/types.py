"""The types that every part of the program shares."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Generator, Tensor

from metalearn.nn.layers import per_task
from metalearn.nn.network import CompiledNetwork, gradient_at, is_packed, leaves, sum_of_tasks, usual_metrics

Params = dict[str, Tensor]
"""Parameters by name. Meta-parameters are plain leaves without a graph; inside an inner loop every
tensor carries one more leading dimension, the tasks of the chunk."""

STATE = "state."
"""The prefix of meta-parameters that are no weights but a state, carried from step to step. Their gradient is, for each
task, the old value minus the new one. Its mean over the tasks is subtracted, and no outer optimiser touches them."""

FIXED = f"{STATE}fixed."
"""The prefix of meta-parameters that never change: those of a network that do not require a gradient."""

EXAMPLES = "examples"
"""The name of a parameter that weighs training examples, [n]: the larger, the more an example counts."""

Metrics = dict[str, Tensor]
T = TypeVar("T")

BITS, POSITIONS = "bits", "position"
"""Names of values of documents, [t, k + 1]: the mean bits of a symbol in each of k spans, and at last in the whole
document; and the place at which each span begins, at last the number of symbols."""

Unit = Literal["tasks", "samples"]

Targets = Literal["classes", "labels", "numbers"]
"""What is to be predicted for a sample: one of the task's classes (`y` [t, n] int64); any of its classes (`y` [t, n,
classes], 0 or 1 each); or real numbers (`y` [t, n, d]), if the source's `classes` are None."""


class Batch(NamedTuple):
    """Examples of `t` tasks: `x` [t, n, …]; `y` as `Targets` explains."""

    x: Tensor
    y: Tensor


class Episode(NamedTuple):
    """`t` tasks: each is adapted on its `support` set and evaluated on its `query` set."""

    support: Batch
    query: Batch


class ChunkResult(NamedTuple):
    """Sums over the tasks of a chunk: gradients of the meta-loss, metrics, and the number of tasks."""

    grads: Params
    metrics: Metrics
    count: int  # type: ignore[assignment]  # a tuple's method has this name too


def summed(values: Metrics) -> Metrics:
    """Per-task values [t], summed over the tasks and without their graph, as float64."""
    return {name: value.detach().double().sum() for name, value in values.items()}


class Loss(NamedTuple):
    """A loss, and the metric beside it, by their names, as pure functions of outputs [t, n, d] and targets.

    It `allows` some kinds of targets. `of_tasks` gives the values of each task [t], `of_samples` those of each sample
    [t, n]. `weights` is the number of classes that it has weights for. Samples with the label `ignored` have no part in
    it. `compiled`: it is what compiled networks compute.
    """

    name: str
    allows: tuple[Targets, ...]
    metric: str
    of_tasks: Callable[[Tensor, Tensor], Metrics]
    of_samples: Callable[[Tensor, Tensor], Metrics]
    weights: int | None = None
    ignored: int | None = None
    compiled: bool = False


class Metric(NamedTuple):
    """A metric by its name, one of `metalearn.runs.metrics.METRIC_NAMES`, as pure functions of outputs [t, n, d] and
    targets. It `allows` some kinds of targets. `of_samples` gives the values of samples [t, n], `of_tasks` those of
    tasks [t]; None: the mean over the samples."""

    name: str
    allows: tuple[Targets, ...]
    of_samples: Callable[[Tensor, Tensor], Tensor]
    of_tasks: Callable[[Tensor, Tensor], Tensor] | None = None


class Apply(Protocol):
    def __call__(self, params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """Outputs [t, n, d] for `x` [t, n, …] under per-task parameters (each with a leading `t`).

        `support_x` [t, s, …] is the support set that the parameters were adapted on; a model that is
        not transductive takes its normalisation statistics from there.
        """


class Stage(NamedTuple):
    """One part of a network that is a sequence of parts.

    `apply(params, h, support_size)` takes the outputs `h` of the stage before; `params` names the parameters that it
    uses. If `support_size` is above 0, only the first `support_size` samples give normalisation statistics. `layers`
    are those of `metalearn.nn.layers`, if the stage is made of them; then the network can be compiled.
    """

    name: str
    params: tuple[str, ...]
    apply: Callable[[Params, Tensor, int], Tensor]
    layers: tuple[Any, ...] = ()


class Features(Protocol):
    def __call__(self, x: Tensor, support_x: Tensor | None = None, /) -> Tensor:
        """The features [t, n, d] of samples, by the statistics of a support set if one is given."""


class Predictive(NamedTuple):
    """What a network's outputs [t, n, d] for real numbers say: the `mean` [t, n, 1], and `quantiles(outputs, levels)`
    [t, n, q] at levels [q] between 0 and 1."""

    mean: Callable[[Tensor], Tensor]
    quantiles: Callable[[Tensor, Tensor], Tensor]


Past = dict[int, tuple[Tensor, Tensor]]
"""What later symbols may attend to: keys and values [t, heads, n, d] of each block."""


class Reader(NamedTuple):
    """A network of documents in two parts, so that matrices of its last `blocks` blocks can change while it reads.

    `learns(blocks)` are the names of these matrices. `body(params, x, past, start, blocks)` computes all that comes
    before the first of them, for symbols `x` [t, n, 1] of which the first is at place `start`. `tail(params, h, past,
    start, blocks)` goes on from there, and gives the outputs [t, n, d]. Both also give the past of later symbols.
    An output depends on the last `reach` symbols alone; None: on all.
    """

    learns: Callable[[int], tuple[str, ...]]
    body: Callable[[Params, Tensor, Past, int, int], tuple[Tensor, Past]]
    tail: Callable[[Params, Tensor, Past, int, int], tuple[Tensor, Past]]
    reach: int | None


class InContext(NamedTuple):
    """A network that reads the labelled samples of a task, and answers for others, in one pass.

    `outputs(params, support, x)` [t, n, d] for `x` [t, n, …] is quick to train. `remember(params, support)` gives what
    all queries read of the support set, and `answer(params, remembered, x)` the outputs by it. No query depends on
    another. `predictive` says what outputs for real numbers mean, and `loss` measures them; both are None for classes.
    """

    outputs: Callable[[Params, Batch, Tensor], Tensor]
    remember: Callable[[Params, Batch], Any]
    answer: Callable[[Params, Any, Tensor], Tensor]
    predictive: Predictive | None = None
    loss: Loss | None = None


class Model(NamedTuple):
    """A network as pure functions.

    `activations` counts the floats that a forward pass keeps for one input; `task_chunk=auto` depends on it. A
    network that can be cut has `stages`. `note` says what a user should know about how the network is computed, if
    anything. `features` computes the inputs [t, n, d] of the `head`, the last linear layer; both are None if the
    network does not end in one; `headless` may say why. `norms` names the parameters of the normalisation layers.
    `network` computes the whole network at once, and `body` the features, if they can be compiled. `cautions` are
    lines on what the network has and this program does not use. `fixed` draws the parameters that do not learn,
    from a generator as `init` gets it. They are not in the `params` of `apply`, which finds them in
    `metalearn.nn.surroundings`. `loss` measures what it predicts; None: cross-entropy for classes, the squared
    error for real numbers. A network that reads labels too is `in_context`; it has no outputs without them. One of
    documents may have a `reader`. Tasks that torch computes `at_once` have a fixed cost for each operation, so that
    `task_chunk=auto` takes more of them.
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
    network: CompiledNetwork | None = None
    body: CompiledNetwork | None = None
    cautions: tuple[str, ...] = ()
    fixed: Callable[[Generator], Params] | None = None
    loss: Loss | None = None
    in_context: InContext | None = None
    reader: Reader | None = None
    headless: str = ""
    at_once: bool = False

    # What algorithms ask of a model, whatever computes it. `theta` are the parameters of all tasks, as `start` gives
    # them: of a compiled network one row a task, else each with a leading task dimension.

    def start(self, params: Params, tasks: int) -> Params:
        """Where the inner steps of `tasks` tasks start: meta-parameters for every task, sharing memory. Gradients add
        up over the tasks."""
        if self.network is not None and self.network.computes(params):
            return self.network.pack(params, tasks)
        return per_task(params, tasks)

    def metrics(self, theta: Params, batch: Batch, support_x: Tensor | None = None, *, twice: bool = False) -> Metrics:
        """The `loss` and the metric of each task [t]. The statistics of `support_x` normalise if the model is not
        transductive. `twice`: the loss will be differentiated twice."""
        if self.network is not None and is_packed(theta):
            return self.network.metrics(theta, *batch, support_x, twice=twice)
        outputs = self.apply(theta, batch.x, support_x)
        return usual_metrics(outputs, batch.y) if self.loss is None else self.loss.of_tasks(outputs, batch.y)

    def gradient(self, theta: Params, batch: Batch, *, twice: bool = False) -> Params:
        """The gradient of each task's loss by its parameters. With `twice`, it has a derivative of its own."""
        with torch.enable_grad():
            if self.network is not None and is_packed(theta):
                return self.network.gradient(theta, *batch, twice=twice)
            at = theta if twice else leaves(theta)  # a gradient that counts as a constant needs no graph behind it
            return gradient_at(at, self.metrics(at, batch)["loss"], twice=twice)

    def step(self, theta: Params, batch: Batch, rate: float, *, twice: bool = False) -> Params:
        """The parameters after a step of gradient descent, θ − rate · ∇L(θ). Without `twice`, the derivative of the
        step takes the gradient as a constant."""
        if self.network is not None and is_packed(theta):
            return self.network.stepped(theta, *batch, rate, twice=twice)  # the same bits, in one pass over memory
        grads = self.gradient(theta, batch, twice=twice)
        return {name: p.add(grads[name], alpha=-rate) for name, p in theta.items()}

    @property
    def reach(self) -> int | None:
        """The last symbols of a document on which an output depends, if it is not all, or not known."""
        return self.reader.reach if self.reader is not None else None

    def features_of(self, params: Params, tasks: int) -> Features:
        """The features by meta-parameters that `tasks` tasks share. The model must have features."""
        if self.body is not None and self.body.computes(params):
            return partial(self.body.outputs, self.body.pack(params, tasks))
        assert self.features is not None
        return partial(self.features, per_task(params, tasks))

    def replaced(self, theta: Params, values: Params) -> Params:
        """The parameters of all tasks with other values of some: [*shape], which all tasks share, or [t, *shape]."""
        if self.network is not None and is_packed(theta):
            return self.network.replaced(theta, values)
        shared = {name: value for name, value in values.items() if value.dim() < theta[name].dim()}
        return theta | values | per_task(shared, len(next(iter(theta.values()))))

    def by_name(self, values: Params) -> Params:
        """Values of parameters as of `theta`, or sums of such, under the parameters' own names."""
        return values if self.network is None else self.network.unpack(values)

    def sums(self, values: Params) -> Params:
        """Values of parameters as of `theta`, summed over the tasks and by name."""
        return self.by_name({name: sum_of_tasks(value) for name, value in values.items()})


class Adapt(Protocol):
    def __call__(self, params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        """A predictor for one task (`support.x` [1, n, …]) after `steps` inner steps (default: `eval_steps`)."""


class Algorithm(NamedTuple):
    """A learner as a set of pure functions.

    `meta_grad(params, episode, step)` sums over the tasks. `evaluate(params, episode)` gives per-task values
    [t, k + 1]; column i holds those after i inner steps. `outcome(params, episode, step)` gives per-task values [t];
    its query `loss` has a graph. `loss(params, episode, step)` sums that loss. Both are None if the meta-gradient
    is not the gradient of such a graph.

    A learner may be trained on single samples (`trained_on`). Then it takes one episode whose queries are the samples
    of a micro-batch, and every per-task value above is a per-sample value. `evaluated_on` says the same of evaluation.
    `classify` gives the logits of such samples, if they are not the outputs of the model.

    A learner is `transductive` if it predicts the queries of a task together, even if its model is not transductive.

    If it `adds_in_pairs`, and its network is compiled as a whole, the gradients of tasks are added in pairs, so that
    chunks of 1, 2, 4, … tasks give the bits of a single chunk.

    If `evaluated_on_features`, `evaluate` and `adapt` read the parameters of the model's features only. So they may be
    given those of any learner.

    `computes` says that the losses above are those of the model that it was made of, `Model.loss`. A learner that reads
    documents begins one by `stream(params)`, which has the methods of
    `metalearn.algorithms.reading.OneDocument`.
    """

    init: Callable[[Generator], Params]
    meta_grad: Callable[[Params, Episode, int], ChunkResult]
    evaluate: Callable[[Params, Episode], Metrics]
    adapt: Adapt
    loss: Callable[[Params, Episode, int], Tensor] | None
    outcome: Callable[[Params, Episode, int], Metrics] | None = None
    trained_on: Unit = "tasks"
    evaluated_on: Unit = "tasks"
    classify: Apply | None = None
    transductive: bool = False
    adds_in_pairs: bool = False
    evaluated_on_features: bool = False
    computes: Loss | None = None
    stream: Callable[[Params], Any] | None = None


class TaskSource(Protocol):
    def classes(self, split: str) -> int | None:
        """The number of classes; None for regression."""

    def episodes(self, split: str, indices: Tensor) -> Episode:
        """The tasks of `split` with the numbers `indices` (int64 [t]). The same numbers always give the same tasks.

        If several tasks are asked for that differ in shape, it may give a list of episodes of one task each. If it
        fails, it is asked for one task at a time.

        A source of plain samples gives one episode. Its queries are the samples with these numbers. Its support set is
        empty in training; in evaluation it is a fixed set of training samples, for normalisation statistics.
        """

    def unit(self, split: str) -> Unit:
        """Whether a number stands for a task or for a sample."""

    def size(self, split: str) -> int | None:
        """The number of tasks or samples to evaluate on; None: there is no limit."""


def ways_differ(source: TaskSource) -> bool:
    """Whether the tasks of a source have classes from 0 on, some fewer than others, as its attribute `ways_differ`
    says. Then a head with an output for each of the most classes is read up to those of the task."""
    return getattr(source, "ways_differ", False) is True


@runtime_checkable
class ComesInGroups(Protocol):
    """An optional part of a source of tasks that differ in shape: those with the numbers 0 to G − 1, G to 2 G − 1, …
    are a group of G, and share their shape. A chunk is a part of a group."""

    def group(self, split: str) -> int:
        """How many tasks a group has."""

    def cells(self, split: str, index: int) -> int:
        """The numbers of inputs and targets of the task with this number."""


@runtime_checkable
class NamesClasses(Protocol):
    """An optional part of a task source: the identities of the classes that a split is drawn from."""

    def identities(self, split: str) -> Sequence[str]:
        """The identities of the split's classes: texts without blanks, the same for a class wherever it appears."""


@runtime_checkable
class TellsClasses(Protocol):
    """An optional part of a task source: what people call the classes."""

    def class_names(self, split: str, index: int) -> Sequence[str]:
        """The names of the classes of task number `index` of a split, by their labels; of plain samples, of all
        classes. Empty if they are not known."""


@runtime_checkable
class NamesDrawers(Protocol):
    """An optional part of a task source: who has drawn, or designed, the pictures of a split."""

    def drawers(self, split: str) -> Mapping[str, str]:
        """What people call them, by identities: texts without blanks. Of a test that holds drawers back, only these;
        of other tests, none."""


@runtime_checkable
class OfSets(Protocol):
    """An optional part of a task source: its tasks are of several data sets, named `sets`; task number `index` of a
    split is of `set_of` it."""

    @property
    def sets(self) -> Sequence[str]: ...

    def set_of(self, split: str, index: int) -> str:
        """The name of the set that task number `index` of a split is of."""


@runtime_checkable
class KnowsOptimum(Protocol):
    """A source of documents whose best prediction is known."""

    def optimum(self, episode: Episode, last: int | None = None) -> Tensor:
        """The loss of the best prediction of every query symbol [t, n], in nats; with `last`, of one by that
        number of last symbols alone."""


@runtime_checkable
class TellsWrongLabels(Protocol):
    """A source that has made some labels of its training examples wrong."""

    def wrong_labels(self) -> Tensor:
        """Whether the label of each training example is wrong, bool [n]."""


@runtime_checkable
class GivesSamples(Protocol):
    """An optional part of a source of tasks: the same data for algorithms that are trained on plain samples.

    `samples(evaluated_on)` gives a source of plain training samples, which evaluates on tasks or on samples; and how it
    has divided the data, in words.
    """

    samples: Callable[[Unit], tuple[TaskSource, str]]


class Optimizer(Protocol):
    """An outer optimiser, with a part of the interface of torch's: `step` uses the `grad` of the parameters, and the
    rate `lr` of each of the `param_groups`."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class DrawsByNumber(Protocol):
    """A `TaskSource` whose tasks are numbers of pictures, so that a GPU can keep the pictures and gather them."""

    def shots_of(self, split: str) -> int | None:
        """The support pictures of a class of a task; None where they differ, and then no task is drawn by numbers."""

    def bytes_of(self, split: str) -> int:
        """How many bytes `pictures_of` takes."""

    def pictures_of(self, split: str) -> Tensor:
        """All pictures of a split, uint8 [n, h, w] or [n, h, w, 3]."""

    def numbers(self, split: str, indices: Tensor) -> Tensor:
        """[t, ways, 1 + shots + queries] int64: of each class the quarter turns, then the numbers of its pictures. The
        tasks are those of `TaskSource.episodes`."""


StepResult = tuple[Sequence[ChunkResult], dict[str, float]]
"""The results of a step's chunks, and its figures: `update_seconds`, which the process took to add up the gradients and
update the parameters (0 where others do), and `gradient_norm`, if it has seen them."""


class Updater(Protocol):
    """Takes the meta-steps of a run: has the chunks computed, and updates the parameters, wherever they are.

    `every` is how many steps it can take until the host must read their figures: above 1 if it does not wait for a
    device at every step, so that the metrics of its results are there after `settle`.
    """

    every: int

    def advance(self, chunks: Sequence[Tensor], step: int, rate: float) -> StepResult:
        """Takes one step at `rate`. The chunks' results may be without gradients. Raises FloatingPointError if a loss
        or gradient is not finite; the step is not applied then."""

    def settle(self) -> None:
        """Waits for the steps so far. Raises NotFiniteError if a loss or gradient is not finite; that step and later
        ones are not applied."""

    def fetch(self) -> None:
        """Brings the parameters and the optimiser in this process up to date."""


class NotFiniteError(FloatingPointError):
    """A loss or gradient of a `step` is not finite; the step is not applied."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}: a loss or gradient is not finite")
        self.step = step


class Shares(Protocol):
    """How the ranks that hold the parameters share a step that stays on their devices. Every rank calls the methods in
    the same order. `through_host`: the sums pass through the host, so that a step cannot be a graph."""

    ranks: int
    through_host: bool

    def run(self, count: int) -> range:
        """The numbers of the chunks that this rank computes, of `count`: consecutive. A rank that gets none computes
        chunk 0, which is not added."""

    def add(self, terms: Sequence[T], count: int) -> T:
        """The sum of the terms of all ranks, in the order of `distributed.reduce.tree_sum`. This rank's are those of
        `run`, nested in any way, with tensors as leaves."""

    def agree(self, text: str) -> list[str]:
        """The text of every rank."""

    def started(self) -> None:
        """Called when the operations of a step have been started on the device."""

    def wait(self) -> None:
        """Waits for the steps that have been started. Raises ConnectionError or TimeoutError if a rank is lost, or does
        not take part."""


class Strategy(Protocol):
    """Distributes chunks of tasks over workers and collects the results. `shares`: how ranks share steps that stay on
    their devices; None where they cannot."""

    shares: Shares | None

    @property
    def drives(self) -> bool:
        """Whether this process runs the training loop."""

    def updater(self, here: Updater, params: Params, optimizer: Optimizer) -> Updater:
        """What takes the steps of a run that begins with these parameters: `here`, which updates them in this process;
        or an updater of its own, if other workers keep and update them. Its optimiser has a `state_dict` over the
        parameters sorted by name."""

    def map(self, params: Params, chunks: Sequence[Tensor], step: int) -> Sequence[ChunkResult]:
        """The results of the chunks, in chunk order; or one result, their sum."""

    def evaluate(
        self, params: Params, split: str, chunks: Sequence[Tensor], done: Callable[[int], None] = ...
    ) -> Metrics:
        """The values of every task, in task order. It calls `done` with the number of tasks whenever some are done."""

    def diagnose(self, params: Params, chunks: Sequence[Tensor], step: int) -> Metrics:
        """For every training task, in task order: its `fault`, a place in `metalearn.training.chunks.FAULTS`, and the
        `worker` that computed it."""

    def cost(self) -> dict[str, float]:
        """The costs of the last step for each worker: seconds in compute, waiting and communication, and bytes sent."""

    def share(self, value: Any) -> Any:
        """Rank zero's value, on every rank that drives."""

    def dismiss(self) -> None:
        """Rank zero, before it closes: ends the processes of the other ranks that drive, wherever they are."""

    def close(self, failure: BaseException | None = None) -> None:
        """Ends the session. With `failure`, the other workers stop at once."""
