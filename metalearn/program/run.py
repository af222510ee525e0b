"""A run from its first step to its result, once its parts are made and its workers are there."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from metalearn.config.compose import Job, leaves, to_container
from metalearn.errors import ConfigError, RunError
from metalearn.nn.native import describe
from metalearn.runs.checkpoint import KEEPS_NOTHING, Keeper, from_bytes, rewind, to_bytes
from metalearn.runs.folder import Found, write_result
from metalearn.runs.logging import SILENT, OpenLog, RunLog, Span
from metalearn.runs.metrics import summary, write_table
from metalearn.runs.plots import adaptation, learning_curve
from metalearn.training.loop import (
    Learner,
    Progress,
    Reduce,
    Run,
    Settings,
    Units,
    begin,
    chunk_size,
    fit,
    fitting,
    judge,
    restore,
    snapshot,
)
from metalearn.training.optimizers import OuterOptimizer
from metalearn.types import Algorithm, Episode, Model, Params, Strategy, TaskSource

Result = dict[str, Any]

log = logging.getLogger("metalearn")


class Parts(NamedTuple):
    """The components that the config describes; `start` is what the meta-parameters are at the outset."""

    settings: Settings
    source: TaskSource
    model: Model
    start: Params
    algorithm: Algorithm
    device: torch.device
    outer: OuterOptimizer
    reduce: Reduce
    connect: Callable[[], Strategy]
    keeper: Keeper
    open_log: OpenLog


def check_sizes(settings: Settings, source: TaskSource) -> None:
    """Raises ConfigError where more is to be judged by than the source has."""
    for key, split, wanted in (("val_tasks", "val", settings.val_tasks), ("test_tasks", "test", settings.test_tasks)):
        size = source.size(split)
        if size is not None and wanted > size:
            raise ConfigError(
                f"trainer.{key}={wanted}: the split '{split}' has {size} samples; type trainer.{key}={size} or fewer"
            )


def first_tasks(parts: Parts) -> Episode:
    """The first training task; or as many samples as the smallest micro-batch has, but no more than two. Asking for
    it finds, verifies and decodes the data.

    Raises:
        DataError: data that is missing or damaged.
    """
    if parts.algorithm.learns_from == "tasks":
        return parts.source.episodes("train", torch.tensor([0]))
    left_over = parts.settings.meta_batch_size % chunk_size(parts.settings, parts.model, 1, parts.device)
    return parts.source.episodes("train", torch.arange(1 if left_over == 1 else 2))


def lead(job: Job, parts: Parts, found: Found, strategy: Strategy, should_stop: Callable[[], bool]) -> Result:
    """Rank zero: trains to the end, tests the best checkpoint, writes result and plots.

    Raises:
        Stopped: `should_stop` said so; a checkpoint is saved.
        RunError: what has been computed is not finite, or a checkpoint is gone.
    """
    learner, progress = take_up(job, parts, found)
    config = to_container(job.config)
    span = Span(progress.step, parts.settings.steps, parts.settings.meta_batch_size, parts.algorithm.learns_from)
    run_log = parts.open_log(job.run_dir, span)
    run = make_run(job, parts, strategy, parts.keeper, run_log, should_stop)
    log.info("%s: %d steps, %d workers, %d %s a chunk", job.run_dir, span.steps, job.workers, *run.training)
    log.info("the layers are computed by %s", describe(parts.device, next(iter(parts.start.values())).dtype))
    if parts.model.remark:
        log.info("%s", parts.model.remark)
    try:
        strategy.share(to_bytes(snapshot(learner, progress, config)))
        progress = fit(run, learner, progress)
        best = parts.keeper.best()
        if best is None:
            raise RunError(f"{job.run_dir / 'checkpoints/best'}: is not there any more; the same command trains on")
        values = judge(run, best.params, "test", parts.settings.test_tasks)
        write_table(job.run_dir / "test.csv", values)
        test = summary(values, run.judging.unit)
        run_log.evaluation(progress.step, "test", test)
        result = {
            "status": "completed", "experiment": job.experiment, "run": str(job.config.run),
            "seed": job.config.seed, "steps": progress.step, "seconds": round(progress.seconds, 3),
            "workers": job.workers, "val": progress.best, "test": test | {"transductive": parts.model.transductive},
        }  # fmt: skip
        figures = {f"hparam/test_{name}": value for name, value in test.items() if isinstance(value, int | float)}
        run_log.result(dict(leaves(config)), figures)
    finally:
        run_log.close()
    draw(job, parts, best.params)
    write_result(job.run_dir, result)
    return result


def follow(job: Job, parts: Parts, strategy: Strategy) -> None:
    """The other ranks of a strategy under which all drive: the same steps, and nothing written.

    Raises:
        Stopped: rank zero was asked to stop.
        RunError: what has been computed is not finite.
    """
    learner, progress = restore(from_bytes(strategy.share(b"")), parts.outer.start)
    run = make_run(job, parts, strategy, KEEPS_NOTHING, SILENT, lambda: False)
    fit(run, learner, progress)
    judge(run, learner.params, "test", parts.settings.test_tasks)


def make_run(
    job: Job, parts: Parts, strategy: Strategy, keeper: Keeper, run_log: RunLog, should_stop: Callable[[], bool]
) -> Run:
    """What the loop needs on this rank."""
    training = Units(chunk_of(parts), parts.algorithm.learns_from)
    judging = Units(judging_chunk_of(parts), parts.algorithm.judged_by)
    return Run(
        parts.settings, strategy, parts.outer, parts.reduce, training, judging, keeper, run_log,
        to_container(job.config), should_stop,
    )  # fmt: skip


def chunk_of(parts: Parts) -> int:
    """Tasks, or samples, that are computed together in training."""
    (support, query) = first_tasks(parts)
    images = support.x.shape[1] + query.x.shape[1] if parts.algorithm.learns_from == "tasks" else 1
    return chunk_size(parts.settings, parts.model, images, parts.device)


def judging_chunk_of(parts: Parts) -> int:
    """Tasks, or samples, that are computed together in validation and test. `trainer.task_chunk` is about what is
    trained on; where that is something else, as many as fit."""
    if parts.algorithm.judged_by == "samples":
        return chunk_of(parts)
    if parts.algorithm.learns_from == "tasks" and isinstance(parts.settings.task_chunk, int):
        return parts.settings.task_chunk
    (support, query) = parts.source.episodes("test", torch.tensor([0]))
    return fitting(parts.model, support.x.shape[1] + query.x.shape[1], parts.device)


def take_up(job: Job, parts: Parts, found: Found) -> tuple[Learner, Progress]:
    """The learner where the run folder left it, or at its start."""
    if found.snapshot is None:
        return begin(parts.start, parts.outer.start), Progress()
    learner, progress = restore(found.snapshot, parts.outer.start)
    if found.goes_back:
        rewind(job.run_dir, progress.step)
    if parts.keeper.best() is None:  # it belonged to another folder, or to steps that are gone
        progress = progress._replace(best=None)
    log.info("going on after step %d", progress.step)
    return learner, progress


def draw(job: Job, parts: Parts, params: Params) -> None:
    """The pictures of a completed run."""
    learning_curve(job.run_dir)
    episode = parts.source.episodes("test", torch.tensor([0]))
    if episode.query.y.is_floating_point() and episode.query.x.shape[2:] == (1,):
        single = {name: value.float() for name, value in params.items()}
        adaptation(job.run_dir, parts.algorithm.adapt, single, episode)
