"""The loop that meta-trains, whatever the algorithm, wherever the chunks are computed."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalearn.checks import whole_number
from metalearn.errors import RunError
from metalearn.runs.checkpoint import Keeper, Snapshot
from metalearn.runs.logging import RunLog
from metalearn.runs.metrics import better, headline, summary
from metalearn.training.chunks import DATA_SECONDS
from metalearn.training.faults import explain
from metalearn.training.optimizers import OuterOptimizer
from metalearn.types import ChunkResult, Metrics, Model, Params, Strategy, Unit

CHUNK_FLOATS = {"cpu": 1_400_000, "cuda": 45_000_000}
"""How many floats the activations of a chunk's forward pass may take under `task_chunk=auto`, by type of device.
Omniglot's 5-way 1-shot episodes with 64 filters then come in chunks of 8 on a CPU, and in one chunk on a GPU."""

PAIR_FLOATS = 12_000_000
"""How many those of two tasks may take that are computed together all the same, so that two threads have work."""

Reduce = Callable[[Sequence[Params], Sequence[int]], Params]
"""From the chunks' summed gradients and numbers of tasks, both in chunk order, to the meta-gradient."""
StartOptimizer = Callable[[Params], torch.optim.Optimizer]


class Stopped(Exception):  # noqa: N818 (it is no error)
    """The run was asked to stop, and has saved."""


class Settings(NamedTuple):
    """What the user may set about the loop; see `trainer`."""

    steps: int
    meta_batch_size: int
    task_chunk: int | str
    val_every: int
    val_tasks: int
    test_tasks: int


class Learner(NamedTuple):
    """What a run changes, in place: the meta-parameters and the state of their optimiser."""

    params: Params
    optimizer: torch.optim.Optimizer


class Progress(NamedTuple):
    """Where a run stands: the last step done, the seconds spent, the best validation so far."""

    step: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None


class Units(NamedTuple):
    """Tasks, or samples, that are computed together."""

    chunk: int
    unit: Unit


class Run(NamedTuple):
    """What a run is made of, and stays the same throughout."""

    settings: Settings
    strategy: Strategy
    outer: OuterOptimizer
    reduce: Reduce
    training: Units
    judging: Units
    keeper: Keeper
    log: RunLog
    config: dict[str, Any]
    should_stop: Callable[[], bool]


def trainer(
    *,
    steps: int,
    meta_batch_size: int,
    task_chunk: int | str,
    val_every: int,
    val_tasks: int,
    test_tasks: int,
    eval_seed: int,
) -> Settings:
    """Checks the settings of the loop.

    Args:
        steps: meta-steps.
        meta_batch_size: tasks of a meta-step.
        task_chunk: tasks computed together, or `auto`.
        val_every: steps between validations; there is one at the last step in any case.
        val_tasks, test_tasks: tasks of a validation, and of the test.
        eval_seed: what validation and test tasks are drawn from (the task source uses it).

    Raises:
        ValueError: a number out of range.
    """
    whole_number("steps", steps, at_least=0)
    whole_number("meta_batch_size", meta_batch_size, at_least=1)
    whole_number("val_every", val_every, at_least=1)
    whole_number("val_tasks", val_tasks, at_least=2)
    whole_number("test_tasks", test_tasks, at_least=2)
    whole_number("eval_seed", eval_seed, at_least=0)
    if task_chunk != "auto":
        whole_number("task_chunk", task_chunk, at_least=1)
    return Settings(steps, meta_batch_size, task_chunk, val_every, val_tasks, test_tasks)


def chunk_size(settings: Settings, model: Model, images: int, device: torch.device) -> int:
    """Tasks of so many images that are computed together. `auto` is a formula of model, episode, type of device and
    constants, not of anything else about the machine: as many as are `fitting`, evened out over the meta-batch."""
    if isinstance(settings.task_chunk, int):
        return settings.task_chunk
    chunks = math.ceil(settings.meta_batch_size / fitting(model, images, device))
    return math.ceil(settings.meta_batch_size / chunks)


def fitting(model: Model, images: int, device: torch.device) -> int:
    """How many tasks of so many images fit `CHUNK_FLOATS`; or two that fit `PAIR_FLOATS`; else one."""
    floats = images * model.activations
    return max(CHUNK_FLOATS[device.type] // floats, 2 if 2 * floats <= PAIR_FLOATS else 1)


def fit(run: Run, learner: Learner, progress: Progress) -> Progress:
    """Trains from where `progress` stands to the last step.

    Raises:
        Stopped: `should_stop` said so; a checkpoint of the last step done is saved.
        RunError: a loss or gradient is not finite; the step is not applied.
    """
    (steps, batch, *_) = run.settings
    if run.strategy.home is not None:
        run.strategy.home.push(learner.params, learner.optimizer.state_dict())
    for step in range(progress.step + 1, steps + 1):
        began = time.perf_counter()
        tasks = tasks_in_chunks((step - 1) * batch, batch, run.training.chunk)
        rate = run.outer.rate(step, steps)
        results, update_seconds = advance(run, learner, tasks, step, rate)
        seconds = time.perf_counter() - began
        progress = progress._replace(step=step, seconds=progress.seconds + seconds)
        times = {"step_seconds": seconds, "update_seconds": update_seconds}
        run.log.step(step, figures(results) | {"lr": rate} | times | run.strategy.cost())

        stopping = run.strategy.agree(run.should_stop())
        judging = step % run.settings.val_every == 0 or step == steps
        if judging or stopping or run.keeper.due(step):
            bring_home(run, learner)
        improved = False
        if judging:
            progress, improved = validate(run, learner, progress)
        if improved or stopping or run.keeper.due(step) or step == steps:
            run.keeper.save(snapshot(learner, progress, run.config), improved)
        if stopping:
            raise Stopped(f"stopped after step {step}, which is saved; resume=auto, the default, goes on from there")
    if progress.best is None:  # no step was left to be done
        progress, improved = validate(run, learner, progress)
        run.keeper.save(snapshot(learner, progress, run.config), improved)
    return progress


def advance(
    run: Run, learner: Learner, tasks: Sequence[Tensor], step: int, rate: float
) -> tuple[Sequence[ChunkResult], float]:
    """One step, by this process or where the parameters live; and the seconds that adding up the gradients and
    changing the parameters took, 0 where they do not live here.

    Raises:
        RunError: a loss or gradient is not finite; the step is not applied.
    """
    if run.strategy.home is not None:
        try:
            return run.strategy.home.advance(tasks, step, rate), 0.0
        except FloatingPointError as error:
            bring_home(run, learner)
            raise not_finite(run, learner, tasks, step) from error
    results = run.strategy.map(learner.params, tasks, step)
    began = time.perf_counter()
    gradient = run.reduce([r.grads for r in results], [r.count for r in results])
    losses = torch.stack([r.metrics["loss"].cpu() for r in results])
    if not all(torch.isfinite(value).all() for value in (losses, *gradient.values())):
        raise not_finite(run, learner, tasks, step)
    update(learner, gradient, rate)
    return results, time.perf_counter() - began


def not_finite(run: Run, learner: Learner, tasks: Sequence[Tensor], step: int) -> RunError:
    """Names the task that spoils a step, and the worker that computes it."""
    found = run.strategy.examine(learner.params, tasks, step)
    told = explain(found, torch.cat(list(tasks)), step, run.training.unit)
    return RunError(f"{told}. The step is not applied, and the last checkpoint stands")


def bring_home(run: Run, learner: Learner) -> None:
    """Puts into the learner what is newer where the parameters live."""
    if run.strategy.home is not None:
        params, state = run.strategy.home.pull()
        with torch.no_grad():
            for name, param in learner.params.items():
                param.copy_(params[name])
        learner.optimizer.load_state_dict(state)


def validate(run: Run, learner: Learner, progress: Progress) -> tuple[Progress, bool]:
    """Validates; says whether it was the best so far."""
    began = time.perf_counter()
    found = summary(judge(run, learner.params, "val", run.settings.val_tasks), run.judging.unit)
    metric = headline(found)
    improved = better(metric, found[metric], progress.best[metric] if progress.best else None)
    run.log.evaluation(progress.step, "val", found | {"elapsed_seconds": progress.seconds})
    best = found | {"step": progress.step} if improved else progress.best
    seconds = progress.seconds + time.perf_counter() - began
    return progress._replace(seconds=seconds, best=best), improved


def judge(run: Run, params: Params, split: str, tasks: int) -> Metrics:
    """The values of the first `tasks` tasks of a split."""
    return run.strategy.evaluate(params, split, tasks_in_chunks(0, tasks, run.judging.chunk))


def tasks_in_chunks(first: int, count: int, size: int) -> list[Tensor]:
    """The task numbers from `first` on, `count` of them, in chunks of `size`; the last has what is left."""
    return list(torch.split(torch.arange(first, first + count), size))


def figures(results: Sequence[ChunkResult]) -> dict[str, float]:
    """Per-task means of the chunks' summed metrics; of seconds the sum, over all workers."""
    count = sum(result.count for result in results)
    sums = {name: sum(r.metrics[name].item() for r in results) for name in results[0].metrics}
    return {name: value if name == DATA_SECONDS else value / count for name, value in sums.items()}


def update(learner: Learner, grads: Params, rate: float) -> None:
    """One step of the outer optimiser at `rate`."""
    for name, param in learner.params.items():
        param.grad = grads[name]
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    learner.optimizer.step()


def begin(params: Params, start: StartOptimizer) -> Learner:
    """A learner at its start. By name, since the optimiser keeps its state by position."""
    fresh = {name: params[name].detach().clone().requires_grad_() for name in sorted(params)}
    return Learner(fresh, start(fresh))


def snapshot(learner: Learner, progress: Progress, config: dict[str, Any]) -> Snapshot:
    """All that the run needs to go on from here."""
    state = {"optimizer": learner.optimizer.state_dict(), "progress": progress._asdict()}
    meta = {"step": progress.step, "config": config, "metrics": {"best": progress.best}}
    return Snapshot(learner.params, state, meta)


def restore(saved: Snapshot, start: StartOptimizer) -> tuple[Learner, Progress]:
    """The learner and its progress as they were when `saved` was taken."""
    learner = begin(saved.params, start)
    learner.optimizer.load_state_dict(saved.state["optimizer"])
    return learner, Progress(**saved.state["progress"])
