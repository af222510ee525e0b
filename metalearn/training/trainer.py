"""Meta-training: the state of a run, and the loop that changes it, whatever the algorithm, and wherever the chunks are
computed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalearn.errors import DivergedError
from metalearn.reporting.logging import SILENT, RunLog
from metalearn.runs.checkpoint import Checkpointer, Snapshot
from metalearn.runs.metrics import BEST_BY, better, deciding, summary
from metalearn.runs.signals import NEVER, Interrupted, Stops
from metalearn.training.chunks import DATA_SECONDS, explain
from metalearn.training.optimizers import OuterOptimizer
from metalearn.training.settings import TrainerSettings, Units, tasks_in_chunks
from metalearn.types import (
    FIXED,
    STATE,
    ChunkResult,
    Metrics,
    NotFiniteError,
    Optimizer,
    Params,
    StepResult,
    Strategy,
    Updater,
)

Reduce = Callable[[Sequence[Params], Sequence[int]], Params]
"""From summed gradients and numbers of tasks to the meta-gradient: of the chunks in their order, or of their sum."""


class Stopped(Exception):  # noqa: N818 (it is no error)
    """The run was asked to stop, and has saved."""


class Paused(Stopped):
    """The run has come to the step after which it was to pause."""


class Average:
    """An exponential moving average of meta-parameters θ: after k steps Σᵢ dᵏ⁻ⁱ θᵢ / Σᵢ dᵏ⁻ⁱ, over i = 1 … k.

    Its start has no weight: Kingma and Ba 2015 (arXiv 1412.6980), section 7.2. Of state (`metalearn.types.STATE`) it
    has the present value. `decay` is d in [0, 1), `steps` is k, and `params` are copied: the average so far, or before
    the first step the parameters at their start.
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


@dataclass(eq=False)
class TrainState:
    """All that a run changes. Parameters and optimiser change in place."""

    params: Params  # the meta-parameters, sorted by name
    optimizer: Optimizer
    average: Average | None = None  # of the meta-parameters over the steps, if the settings ask for it
    step: int = 0  # the last one done
    seconds: float = 0.0  # spent so far
    best: dict[str, Any] | None = None  # the figures of the best validation, with its step
    latest: dict[str, Any] | None = None  # the same of the latest validation
    stands_in: bool = False  # the best validation is that of a pause, and the next scheduled one replaces it

    @classmethod
    def new(cls, params: Params, start: Callable[[Params], Optimizer], ema_decay: float | None = None) -> "TrainState":
        """The state before the first step."""
        # Sorted, since the optimiser keeps its state by position. In one layout in memory, as checkpoints and messages
        # give it: the last bits may depend on that.
        copied = {name: params[name].detach().clone(memory_format=torch.contiguous_format) for name in sorted(params)}
        fresh = {name: value.requires_grad_() for name, value in copied.items()}
        return cls(fresh, start(fresh), None if ema_decay is None else Average(ema_decay, fresh))

    @classmethod
    def restored(
        cls, saved: Snapshot, start: Callable[[Params], Optimizer], ema_decay: float | None = None
    ) -> "TrainState":
        """The state as it was when `saved` was taken. The optimiser has the settings of `start`. An average goes on
        with `ema_decay`, and begins at the next step if none was saved. Raises Exception if `saved` holds the state of
        another optimiser, or no state."""
        averaged = saved.state.get("average")  # then the latest parameters are beside the average
        state = cls.new(averaged["latest"] if averaged else saved.params, start, ema_decay)
        if ema_decay is not None and averaged:
            state.average = Average(ema_decay, saved.params, averaged["steps"])
        groups = state.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        state.optimizer.load_state_dict(saved.state["optimizer"])
        for group, configured in zip(state.optimizer.param_groups, settings, strict=True):
            group.update(configured)
        return cls(state.params, state.optimizer, state.average, **saved.state["progress"])

    def snapshot(self, meta: dict[str, Any], logged: dict[str, Any]) -> Snapshot:
        """All that the run needs to go on from here. `meta` is added to meta.json. `logged` has what its log needs: the
        sums over the steps that are not in a line yet (`pending`), and the digest of metrics.jsonl (`digest`).

        An average takes the place of the latest parameters, and these are in the state.
        """
        progress = {name: getattr(self, name) for name in ("step", "seconds", "best", "latest", "stands_in")}
        state = {"optimizer": self.optimizer.state_dict(), "progress": progress, **logged}
        if self.average is not None:
            latest = {name: value.detach() for name, value in self.params.items()}
            state["average"] = {"latest": latest, "steps": self.average.steps}
        return Snapshot(self.evaluated, state, {"step": self.step, "metrics": {"best": self.best}, **meta})

    @property
    def evaluated(self) -> Params:
        """What is validated, and saved as the meta-parameters: the average, or the latest."""
        return self.params if self.average is None else self.average.params

    @property
    def is_validated(self) -> bool:
        """Whether there is a validation after the last step done."""
        return self.latest is not None and self.latest["step"] == self.step

    def update(self, grads: Params, rate: float) -> None:
        """One step of the outer optimiser at `rate`; state (`metalearn.types.STATE`) changes by itself."""
        for name, param in self.params.items():
            param.grad = None if name.startswith(STATE) else grads[name]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            for name, param in self.params.items():
                if name.startswith(STATE) and not name.startswith(FIXED):
                    param.sub_(grads[name])
        if self.average is not None:
            self.average.add(self.params)


class TakenStep(NamedTuple):
    """A step whose figures are not in the log yet: its results, its further figures, and its seconds on the host."""

    step: int
    results: Sequence[ChunkResult]
    figures: dict[str, float]
    seconds: float


@dataclass(eq=False)
class Trainer:
    """Trains a learner: takes the steps, validates, and saves."""

    settings: TrainerSettings
    state: TrainState
    strategy: Strategy
    outer: OuterOptimizer
    reduce: Reduce
    training: Units  # what a chunk has
    evaluation: Units  # the same in validation and test
    checkpointer: Checkpointer = field(default_factory=Checkpointer)
    log: RunLog = SILENT
    stops: Stops = NEVER
    meta: dict[str, Any] = field(default_factory=dict)  # what checkpoints say of the run, such as its config
    pause_after: int | None = None
    updates: "Callable[[Trainer], Updater] | None" = None  # None: steps do not stay on a GPU
    _taken: list[TakenStep] = field(default_factory=list, init=False)
    _saved: int = field(default=0, init=False)

    def fit(self) -> None:
        """Trains from where the state stands to the last step. Raises Stopped if the run was asked to stop, and Paused
        if the step `pause_after` is done and validated; a checkpoint of the last step done is saved. Raises
        DivergedError if a loss or gradient is not finite; the step is not applied, and the error names the task that
        spoils it, and the worker that computes it."""
        state, last = self.state, self.last
        self._saved = state.step
        # No attribute: with it goes what it holds on a device, before the test is evaluated.
        updater = self.strategy.updater((self.updates or HostUpdater)(self), state.params, state.optimizer)
        try:
            if self._owes_validation():
                self.save(improved=self.validate())
            while state.step < last and not self.ended_by_patience:
                self._take(updater, step := state.step + 1)
                validates = step % self.settings.val_every == 0 or step == last
                saves = self.checkpointer.due(step, validates)
                if step % updater.every and not (validates or saves or self.stops.requested()):
                    continue
                self._read(updater, together=not step % updater.every or validates or saves)
                if validates or saves:
                    updater.fetch()
                improved = validates and self.validate()
                if improved or saves or step == last or self.ended_by_patience:
                    self.save(improved=improved)
                if self.stops.requested():
                    raise Interrupted
        except Interrupted:
            raise self._stopped(updater) from None
        except (ConnectionError, TimeoutError):
            # A worker is lost. The ranks are started again, and go on from the last step done. Where workers hold the
            # parameters (split), some may have taken the step that failed: then from the last checkpoint.
            if isinstance(updater, HostUpdater):
                self._stopped(updater)
            raise
        if last < self.settings.steps and state.step >= last:
            raise Paused(f"paused after step {state.step}; pause_after=null goes on from there")

    @property
    def last(self) -> int:
        """The step at which it ends or pauses."""
        return min(self.settings.steps, self.pause_after or self.settings.steps)

    @property
    def ended_by_patience(self) -> bool:
        """Whether training ends here: the last `patience` scheduled validations were no better than the best one."""
        # Of the steps alone, so that a run that goes on, and every rank, finds the same.
        state, settings = self.state, self.settings
        if settings.patience is None or state.best is None or not state.is_validated:
            return False
        without = state.step - state.best["step"]
        return state.step < settings.steps and without >= settings.patience * settings.val_every

    def _owes_validation(self) -> bool:
        """Whether the last step done lacks its validation, which a stop may have cut."""
        # Without a step left to do there must be a best validation too. A run that begins, by resume=PATH, after its
        # last step has none.
        state = self.state
        is_done = state.step >= self.last
        due = is_done or (state.step > 0 and state.step % self.settings.val_every == 0)
        return (due and not state.is_validated) or (is_done and state.best is None)

    def _take(self, updater: Updater, step: int) -> None:
        """Takes a step."""
        began, state = time.perf_counter(), self.state
        rate = self.outer.rate(step, self.settings.steps)
        try:
            results, of_update = updater.advance(self.tasks_of(step), step, rate)
        except FloatingPointError as error:
            raise self._diverged(updater, step) from error
        seconds = time.perf_counter() - began
        state.step, state.seconds = step, state.seconds + seconds
        self._taken.append(TakenStep(step, results, {"lr": rate, **of_update, **self.strategy.cost()}, seconds))

    def tasks_of(self, step: int) -> list[Tensor]:
        """The numbers of the tasks of a step, in chunks."""
        batch = self.settings.meta_batch_size
        return tasks_in_chunks((step - 1) * batch, batch, self.training.chunk)

    def _read(self, updater: Updater, *, together: bool) -> None:
        """Waits until the figures of the steps taken are there, and logs them. Where not all ranks that share a step do
        so `together`, as at a stop, these cannot look for the task at fault either. Raises DivergedError as `fit`; the
        steps before are in the log."""
        began = time.perf_counter()
        try:
            updater.settle()
        except NotFiniteError as error:
            self._log([step for step in self._taken if step.step < error.step])
            if together or self.strategy.shares is None or self.strategy.shares.ranks == 1:
                raise self._diverged(updater, error.step) from error
            raise DivergedError(f"{error}. {self._what_stands}", error.step) from error
        waited = time.perf_counter() - began
        self.state.seconds += waited
        # The device may have computed them all in one go, so each counts alike.
        each = (waited + sum(step.seconds for step in self._taken)) / len(self._taken)
        self._log([step._replace(seconds=each) for step in self._taken])

    def _log(self, steps: Sequence[TakenStep]) -> None:
        self._taken.clear()
        for step, results, of_step, seconds in steps:
            values = figures(results) | {"step_seconds": seconds} | of_step
            self.log.step(step, {name: float(value) for name, value in values.items()})

    def _diverged(self, updater: Updater, step: int) -> DivergedError:
        """The error that names the task which spoils a step."""
        updater.fetch()
        tasks = self.tasks_of(step)
        diagnosis = self.strategy.diagnose(self.state.params, tasks, step)
        cause = explain(diagnosis, torch.cat(tasks), step, self.training.unit)
        return DivergedError(f"{cause}. {self._what_stands}", step)

    @property
    def _what_stands(self) -> str:
        return f"The step is not applied, and {'the last checkpoint stands' if self._saved else 'nothing was saved'}"

    def _stopped(self, updater: Updater) -> Stopped:
        """Saves the last step done, if it is not; returns what a stop raises. Where its validation was cut, a run that
        goes on from there validates first."""
        if self._taken:  # cut while it waited for the tasks of the next step
            self._read(updater, together=False)
        step = self.state.step
        if step == 0:
            return Stopped("stopped before step 1 was done; the same command begins again")
        if step > self._saved:
            updater.fetch()
            self.save(improved=False)
        return Stopped(f"stopped after step {step}, which is saved; resume=auto, the default, goes on from there")

    def validate(self) -> bool:
        """Validates; returns whether this is the best validation so far.

        A pause may validate between the steps at which the run validates anyway. Such a validation counts as best only
        until the next scheduled one, so pausing never changes the result.
        """
        began, state = time.perf_counter(), self.state
        values = self.evaluate(state.evaluated, "val", self.settings.val_tasks)
        result = summary(values, self.evaluation.unit)
        self.log.evaluation(state.step, "val", result | {"elapsed_seconds": state.seconds})
        if self.settings.best_by == "loss":
            result[BEST_BY] = "loss"
        metric, best, counts = deciding(result), state.best, self._validates_without_pause(state.step)
        improved = best is None or state.stands_in or (counts and better(metric, result[metric], best.get(metric)))
        state.seconds += time.perf_counter() - began
        state.latest = result | {"step": state.step}
        if improved:
            state.best, state.stands_in = state.latest, not counts
        return improved

    def _validates_without_pause(self, step: int) -> bool:
        return step % self.settings.val_every == 0 or step == self.settings.steps

    def evaluate(self, params: Params, split: str, tasks: int) -> Metrics:
        """The values of the first `tasks` tasks of a split. Raises Interrupted if the run was asked to stop."""
        done = self.log.evaluating(split, tasks)
        with self.stops.interruptible():
            return self.strategy.evaluate(params, split, tasks_in_chunks(0, tasks, self.evaluation.chunk, split), done)

    def save(self, *, improved: bool) -> None:
        """Writes a checkpoint; with `improved`, it is that of the best validation."""
        state, logged = self.state, self.log.saved()
        counts = state.is_validated and self._validates_without_pause(state.step)
        meta = self.meta | {"validation": state.latest if counts else None}
        self.checkpointer.save(state.snapshot(meta, logged), improved)
        self._saved = state.step


def figures(results: Sequence[ChunkResult]) -> dict[str, float]:
    """The chunks' metrics per task; of seconds the sum over all workers."""
    count = sum(result.count for result in results)
    sums = {name: sum(r.metrics[name].item() for r in results) for name in results[0].metrics}
    return {name: value if name == DATA_SECONDS else value / count for name, value in sums.items()}


class HostUpdater:
    """The `Updater` of this process: adds up the chunks' gradients, and updates the parameters by their optimiser."""

    every = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def advance(self, tasks: Sequence[Tensor], step: int, rate: float) -> StepResult:
        trainer = self._trainer
        with trainer.stops.interruptible():
            results = trainer.strategy.map(trainer.state.params, tasks, step)
        began = time.perf_counter()
        gradient, change = meta_gradient(trainer.reduce, results)
        losses = torch.stack([r.metrics["loss"].cpu() for r in results])
        numbers = torch.cat([value.flatten() for value in gradient.values()])
        if not all(value.isfinite().all() for value in (losses, numbers, *change.values())):
            raise NotFiniteError(step)
        trainer.state.update(gradient | change, rate)
        norm = torch.linalg.vector_norm(numbers).item()
        return results, {"update_seconds": time.perf_counter() - began, "gradient_norm": norm}

    def settle(self) -> None:
        """The figures are there already."""

    def fetch(self) -> None:
        """The parameters are up to date already."""


def meta_gradient(reduce: Reduce, results: Sequence[ChunkResult]) -> tuple[Params, Params]:
    """The meta-gradient of the weights, and of state (see `metalearn.types.STATE`) the mean over the tasks."""
    counts = [result.count for result in results]
    weights, states = (
        [{name: grad for name, grad in r.grads.items() if name.startswith(STATE) == carried} for r in results]
        for carried in (False, True)
    )
    means = {name: torch.stack([state[name] for state in states]).sum(dim=0) / sum(counts) for name in states[0]}
    return reduce(weights, counts), means
