"""The loop that meta-trains, whatever the algorithm, and wherever the chunks are computed."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalearn.errors import DivergedError, RunError
from metalearn.reporting.logging import RunLog
from metalearn.runs.checkpoint import Checkpointer, Snapshot
from metalearn.runs.metrics import BEST_BY, better, deciding, summary
from metalearn.runs.signals import Interrupted, Stops
from metalearn.training.chunks import DATA_SECONDS
from metalearn.training.faults import explain
from metalearn.training.optimizers import OuterOptimizer
from metalearn.training.settings import Chunk, TrainerSettings
from metalearn.types import (
    FIXED,
    STATE,
    ChunkResult,
    DefersFigures,
    Metrics,
    NotFiniteError,
    Optimizer,
    Params,
    StepResult,
    Strategy,
    Unit,
    Updater,
)

Reduce = Callable[[Sequence[Params], Sequence[int]], Params]
"""From summed gradients and numbers of tasks to the meta-gradient: of the chunks in their order, or of their sum."""
StartOptimizer = Callable[[Params], Optimizer]


class Stopped(Exception):  # noqa: N818 (it is no error)
    """The run was asked to stop, and has saved; `progress` is where it stands."""

    def __init__(self, message: str, progress: "Progress") -> None:
        super().__init__(message)
        self.progress = progress


class Paused(Stopped):
    """The run has come to the step after which it was to pause."""


class Average:
    """An exponential moving average of meta-parameters θ: after k steps Σᵢ dᵏ⁻ⁱ θᵢ / Σᵢ dᵏ⁻ⁱ, over i = 1 … k.

    Its start has no weight: Kingma and Ba 2015 (arXiv 1412.6980), section 7.2. Of state (`metalearn.types.STATE`) it
    has the present value.

    Args:
        decay: d, 0 or above, and below 1.
        params: the average so far; before the first step, the parameters at their start. They are copied.
        steps: k.
    """

    def __init__(self, decay: float, params: Params, steps: int = 0) -> None:
        self.params = {name: value.detach().clone() for name, value in sorted(params.items())}
        self.steps = steps
        self._decay = decay

    def next_weight(self) -> float:
        """The weight of the parameters after a further step, which is counted."""
        self.steps += 1
        return (1 - self._decay) / (1 - self._decay**self.steps)

    def add(self, params: Params) -> None:
        """Takes in the parameters after a step."""
        weight = self.next_weight()
        for name, value in self.params.items():
            value.lerp_(params[name].detach(), 1.0 if name.startswith(STATE) else weight)


class TrainState(NamedTuple):
    """What a run changes, in place: the meta-parameters and the state of their optimiser; and, if the settings want it,
    the average of the meta-parameters over the steps."""

    params: Params
    optimizer: Optimizer
    average: Average | None = None

    @property
    def evaluated(self) -> Params:
        """What is validated, and saved as the meta-parameters: the average, or the latest."""
        return self.params if self.average is None else self.average.params


class Progress(NamedTuple):
    """Where a run stands: the last step done, the seconds spent, the best and the latest validation so far. If
    `stands_in`, the best one is of a pause, and the next one takes its place."""

    step: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    stands_in: bool = False


class Units(NamedTuple):
    """How many units a chunk has, and whether a unit is a task or a sample."""

    chunk: Chunk
    unit: Unit


class Run(NamedTuple):
    """What a run is made of; it stays the same throughout. `meta` is what all its checkpoints say of it: its config,
    and the classes that it has seen. `pause_after` is a step, or None. `updater` makes the updater of this process;
    None: it is `UpdateHere`."""

    settings: TrainerSettings
    strategy: Strategy
    outer: OuterOptimizer
    reduce: Reduce
    training: Units
    evaluation: Units
    checkpointer: Checkpointer
    log: RunLog
    meta: dict[str, Any]
    stops: Stops
    pause_after: int | None = None
    updater: "Callable[[Run, TrainState], Updater] | None" = None

    @property
    def last(self) -> int:
        """The step at which it ends or pauses."""
        return min(self.settings.steps, self.pause_after or self.settings.steps)


class TakenStep(NamedTuple):
    """A step whose figures are not in the log yet: its results, its further figures, and its seconds on the host."""

    step: int
    results: Sequence[ChunkResult]
    figures: dict[str, float]
    seconds: float


def fit(run: Run, learner: TrainState, progress: Progress) -> Progress:
    """Trains from where `progress` stands to the last step.

    Raises:
        Stopped: the run was asked to stop; a checkpoint of the last step done is saved.
        Paused: the step `pause_after` is done and validated, and its checkpoint is saved.
        DivergedError: a loss or gradient is not finite; the step is not applied. It names the task that spoils the
            step, and the worker that computes it.
    """
    steps, batch, last = run.settings.steps, run.settings.meta_batch_size, run.last
    saved, taken = progress.step, list[TakenStep]()
    here = (run.updater or UpdateHere)(run, learner)
    updater = run.strategy.updater(here, learner.params, learner.optimizer)
    try:
        # A stop may have cut the validation of the last step done. Without a step left to do there must be a best one
        # too, which a run lacks that begins, by resume=PATH, after its last step.
        is_done = progress.step >= last
        due = is_done or (progress.step > 0 and progress.step % run.settings.val_every == 0)
        if (due and not _is_validated(progress)) or (is_done and progress.best is None):
            progress, improved = validate(run, learner, progress)
            save(run, learner, progress, improved)
        for step in range(progress.step + 1, last + 1):
            if ended_by_patience(run.settings, progress):
                return progress
            began = time.perf_counter()
            tasks = tasks_in_chunks((step - 1) * batch, batch, run.training.chunk)
            rate = run.outer.rate(step, steps)
            try:
                results, of_update = updater.advance(tasks, step, rate)
            except FloatingPointError as error:
                raise diverged(run, learner, updater, tasks, step) from error
            seconds = time.perf_counter() - began
            progress = progress._replace(step=step, seconds=progress.seconds + seconds)
            validating = step % run.settings.val_every == 0 or step == last
            due = run.checkpointer.due(step, validating)
            taken.append(TakenStep(step, results, {"lr": rate, **of_update, **run.strategy.cost()}, seconds))
            if isinstance(updater, DefersFigures):
                if step % updater.every and not (validating or due or run.stops.requested()):
                    continue
                progress = progress._replace(seconds=progress.seconds + settle(run, learner, updater, taken))
            log_steps(run, taken)
            if validating or due:
                updater.fetch()
            improved = False
            if validating:
                progress, improved = validate(run, learner, progress)
            if improved or due or step == last or ended_by_patience(run.settings, progress):
                save(run, learner, progress, improved)
                saved = step
            if run.stops.requested():
                raise Interrupted
    except Interrupted:
        if taken and isinstance(updater, DefersFigures):  # cut while it waited for the tasks of the next step
            progress = progress._replace(seconds=progress.seconds + settle(run, learner, updater, taken))
            log_steps(run, taken)
        raise stopped(run, learner, updater, progress, saved) from None
    except DivergedError as error:
        error.progress = progress
        raise
    if last < steps:
        message = f"paused after step {progress.step}; pause_after=null goes on from there"
        raise Paused(message, progress)
    return progress


def ended_by_patience(settings: TrainerSettings, progress: Progress) -> bool:
    """Whether training ends here: the last `patience` scheduled validations were no better than the best one."""
    # Of the steps alone, so that a run that goes on, and every rank, finds the same.
    if settings.patience is None or progress.best is None or not _is_validated(progress):
        return False
    return progress.step < settings.steps and progress.step - progress.best["step"] >= (
        settings.patience * settings.val_every
    )


def log_steps(run: Run, taken: list[TakenStep]) -> None:
    """Logs the steps that are not in the log yet."""
    for step, results, of_step, seconds in taken:
        values = figures(results) | {"step_seconds": seconds} | of_step
        run.log.step(step, {name: float(value) for name, value in values.items()})
    taken.clear()


def settle(run: Run, learner: TrainState, updater: DefersFigures, taken: list[TakenStep]) -> float:
    """Waits for steps whose figures are on a device; returns the seconds. They count for all these steps alike.

    Raises:
        DivergedError: as `fit`; the steps before are in the log.
    """
    began = time.perf_counter()
    try:
        updater.settle()
    except NotFiniteError as error:
        taken[:] = [step for step in taken if step.step < error.step]
        log_steps(run, taken)
        batch = run.settings.meta_batch_size
        tasks = tasks_in_chunks((error.step - 1) * batch, batch, run.training.chunk)
        raise diverged(run, learner, updater, tasks, error.step) from error  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    each = (seconds + sum(step.seconds for step in taken)) / len(taken)
    taken[:] = [step._replace(seconds=each) for step in taken]
    return seconds


def stopped(run: Run, learner: TrainState, updater: Updater, progress: Progress, saved: int) -> Stopped:
    """Saves the last step done if it is after the step `saved`; returns what to raise.

    If its validation was cut, a run that goes on from there validates first.
    """
    if progress.step == 0:
        return Stopped("stopped before step 1 was done; the same command begins again", progress)
    if progress.step > saved:
        updater.fetch()
        save(run, learner, progress, improved=False)
    message = f"stopped after step {progress.step}, which is saved; resume=auto, the default, goes on from there"
    return Stopped(message, progress)


def _is_validated(progress: Progress) -> bool:
    return progress.latest is not None and progress.latest["step"] == progress.step


# One step


def diverged(run: Run, learner: TrainState, updater: Updater, tasks: Sequence[Tensor], step: int) -> DivergedError:
    """The error that names the task which spoils a step."""
    updater.fetch()
    diagnosis = run.strategy.diagnose(learner.params, tasks, step)
    cause = explain(diagnosis, torch.cat(list(tasks)), step, run.training.unit)
    return DivergedError(f"{cause}. The step is not applied, and the last checkpoint stands", step)


class UpdateHere:
    """The `Updater` of this process: adds up the chunks' gradients, and updates the learner by its optimiser."""

    def __init__(self, run: Run, learner: TrainState) -> None:
        self._run, self._learner = run, learner

    def advance(self, tasks: Sequence[Tensor], step: int, rate: float) -> StepResult:
        chunk = self._run.training.chunk
        if isinstance(chunk, int) and len(tasks[0]) > chunk:  # they did not fit the memory of a device
            tasks = torch.cat(list(tasks)).split(chunk)
        with self._run.stops.interruptible():
            results = self._run.strategy.map(self._learner.params, tasks, step)
        began = time.perf_counter()
        gradient, change = meta_gradient(self._run.reduce, results)
        losses = torch.stack([r.metrics["loss"].cpu() for r in results])
        numbers = torch.cat([value.flatten() for value in gradient.values()])
        if not all(value.isfinite().all() for value in (losses, numbers, *change.values())):
            raise FloatingPointError("a loss or gradient is not finite")
        update(self._learner, gradient | change, rate)
        norm = torch.linalg.vector_norm(numbers).item()
        return results, {"update_seconds": time.perf_counter() - began, "gradient_norm": norm}

    def fetch(self) -> None:
        """The learner is always up to date."""


def meta_gradient(reduce: Reduce, results: Sequence[ChunkResult]) -> tuple[Params, Params]:
    """The meta-gradient of the weights, and of state (see `metalearn.types.STATE`) the mean over the tasks."""
    counts = [result.count for result in results]
    weights, states = (
        [{name: grad for name, grad in r.grads.items() if name.startswith(STATE) == carried} for r in results]
        for carried in (False, True)
    )
    means = {name: torch.stack([state[name] for state in states]).sum(dim=0) / sum(counts) for name in states[0]}
    return reduce(weights, counts), means


def update(learner: TrainState, grads: Params, rate: float) -> None:
    """One step of the outer optimiser at `rate`; state changes by itself."""
    for name, param in learner.params.items():
        param.grad = None if name.startswith(STATE) else grads[name]
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    learner.optimizer.step()
    with torch.no_grad():
        for name in (name for name in learner.params if name.startswith(STATE) and not name.startswith(FIXED)):
            learner.params[name].sub_(grads[name])
    if learner.average is not None:
        learner.average.add(learner.params)


def figures(results: Sequence[ChunkResult]) -> dict[str, float]:
    """The chunks' metrics per task; of seconds the sum over all workers."""
    count = sum(result.count for result in results)
    sums = {name: sum(r.metrics[name].item() for r in results) for name in results[0].metrics}
    return {name: value if name == DATA_SECONDS else value / count for name, value in sums.items()}


# Evaluation


def validate(run: Run, learner: TrainState, progress: Progress) -> tuple[Progress, bool]:
    """Validates; also returns whether this is the best validation so far.

    A pause may validate between the steps at which the run validates anyway. Such a validation stands in for the best
    one until there is another, so that a run that has paused ends as one that has not.
    """
    began = time.perf_counter()
    result = summary(evaluate(run, learner.evaluated, "val", run.settings.val_tasks), run.evaluation.unit)
    run.log.evaluation(progress.step, "val", result | {"elapsed_seconds": progress.seconds})
    if run.settings.best_by == "loss":
        result[BEST_BY] = "loss"
    metric, best, counts = deciding(result), progress.best, _counts(run.settings, progress.step)
    improved = best is None or progress.stands_in or (counts and better(metric, result[metric], best.get(metric)))
    latest = result | {"step": progress.step}
    progress = progress._replace(seconds=progress.seconds + time.perf_counter() - began, latest=latest)
    return progress._replace(best=latest, stands_in=not counts) if improved else progress, improved


def _counts(settings: TrainerSettings, step: int) -> bool:
    """Whether a run validates after this step even if it does not pause there."""
    return step % settings.val_every == 0 or step == settings.steps


def evaluate(run: Run, params: Params, split: str, tasks: int) -> Metrics:
    """The values of the first `tasks` tasks of a split.

    Raises:
        Interrupted: the run was asked to stop.
    """
    done = run.log.evaluating(split, tasks)
    with run.stops.interruptible():
        return run.strategy.evaluate(params, split, tasks_in_chunks(0, tasks, run.evaluation.chunk, split), done)


def tasks_in_chunks(first: int, count: int, size: Chunk, split: str = "train") -> list[Tensor]:
    """The task numbers from `first` on, `count` of them, in chunks of `size`; the last chunk has what is left."""
    if isinstance(size, int):
        return list(torch.split(torch.arange(first, first + count), size))
    chunks, last = list[Tensor](), first + count
    while first < last:
        end = min(size(split, first), last)
        chunks.append(torch.arange(first, end))
        first = end
    return chunks


# The learner, and its snapshots


def new_learner(params: Params, start: StartOptimizer, ema_decay: float | None = None) -> TrainState:
    """A learner at its start. Its parameters are sorted by name, since the optimiser keeps its state by position."""
    # In one layout in memory, which checkpoints and messages give them anyway, and with which the last bits may differ.
    copied = {name: params[name].detach().clone(memory_format=torch.contiguous_format) for name in sorted(params)}
    fresh = {name: value.requires_grad_() for name, value in copied.items()}
    return TrainState(fresh, start(fresh), None if ema_decay is None else Average(ema_decay, fresh))


def save(run: Run, learner: TrainState, progress: Progress, improved: bool) -> None:
    """Writes a checkpoint; with `improved`, it is that of the best validation."""
    logged = {"pending": run.log.pending(), "digest": run.log.digest()}
    counts = _is_validated(progress) and _counts(run.settings, progress.step)
    meta = run.meta | {"validation": progress.latest if counts else None}
    run.checkpointer.save(snapshot(learner, progress, meta, logged), improved)


def snapshot(learner: TrainState, progress: Progress, run: dict[str, Any], logged: dict[str, Any]) -> Snapshot:
    """All that the run needs to go on from here. `run` is `Run.meta`. `logged` has what its log needs: the sums over
    the steps that are not in a line yet (`pending`), and the digest of metrics.jsonl (`digest`).

    An average takes the place of the latest parameters, and these are in the state.
    """
    state = {"optimizer": learner.optimizer.state_dict(), "progress": progress._asdict(), **logged}
    if learner.average is not None:
        latest = {name: value.detach() for name, value in learner.params.items()}
        state["average"] = {"latest": latest, "steps": learner.average.steps}
    meta = {"step": progress.step, "metrics": {"best": progress.best}, **run}
    return Snapshot(learner.evaluated, state, meta)


def restore(saved: Snapshot, start: StartOptimizer, ema_decay: float | None = None) -> tuple[TrainState, Progress]:
    """The learner and its progress as they were when `saved` was taken. The optimiser has the settings of `start`. An
    average goes on with `ema_decay`, and begins anew if none was saved.

    Raises:
        RunError: the state is that of another optimiser, or no state.
    """
    try:
        averaged = saved.state.get("average")  # then the latest parameters are beside the average
        learner = new_learner(averaged["latest"] if averaged else saved.params, start, ema_decay)
        if ema_decay is not None and averaged:
            learner = learner._replace(average=Average(ema_decay, saved.params, averaged["steps"]))
        settings = [{k: v for k, v in group.items() if k != "params"} for group in learner.optimizer.param_groups]
        learner.optimizer.load_state_dict(saved.state["optimizer"])
        for group, own in zip(learner.optimizer.param_groups, settings, strict=True):
            group.update(own)
        return learner, Progress(**saved.state["progress"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"step {saved.meta['step']}: the checkpoint's state.pt does not fit this run ({error!r})"
        ) from error
