"""A run from its first step to its result, once its parts are built and its workers are there."""

import logging
import math
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from metalearn.app.host import described
from metalearn.app.job import Job
from metalearn.app.parts import Parts, evaluation_chunk, first_tasks, idle_workers, training_chunk
from metalearn.app.unseen import UNKNOWN, check_unseen, seen_in, warn_of_seen_drawers
from metalearn.config.values import to_container
from metalearn.errors import ConfigError, DataError, DiskError, DivergedError, RunError
from metalearn.nn.native import describe
from metalearn.reporting.loggers import Window
from metalearn.reporting.logging import SILENT, RunLog
from metalearn.reporting.page import Picture, episode_picture, has_pictures
from metalearn.reporting.plots import adaptation, learning_curve
from metalearn.reporting.report import REPORT, ShownLearner, ShownTask, write_report
from metalearn.runs.checkpoint import (
    NO_CHECKPOINTS,
    ORIGIN,
    Checkpointer,
    Snapshot,
    fitted,
    from_bytes,
    rewind,
    to_bytes,
)
from metalearn.runs.folder import (
    PATIENCE,
    PAUSED,
    FolderState,
    check_copy,
    copy_best,
    inspect,
    is_own,
    report_if_done,
    write_result,
)
from metalearn.runs.metrics import KEY, Seen, figures_of, from_meta, main_metric, to_meta, write_table
from metalearn.runs.signals import NEVER, Interrupted, Stops
from metalearn.storage.files import is_disk_fault, unwritten, writing
from metalearn.tasks.common.identities import class_names_of
from metalearn.training.chunks import episodes_of, placing
from metalearn.training.compatibility import check_compatible
from metalearn.training.loop import (
    Progress,
    Run,
    Stopped,
    TrainState,
    Units,
    ended_by_patience,
    evaluate,
    fit,
    new_learner,
    restore,
    snapshot,
)
from metalearn.types import Batch, Episode, Model, Params, Strategy

Result = dict[str, Any]

Commands = list[tuple[int, list[str]]]

DATA = "data"
"""The key of the digest of the data in checkpoints and in result.json."""

COMMANDS = "commands"
"""The key of the commands that have made a run, in its checkpoints: pairs of the step from which on, and the words."""

CHUNK = "chunk"
"""What rank zero shares of its chunks, since they may depend on the kernels that a host can compile."""

DONE = b"done"
"""What rank zero shares in place of the learner if there is nothing left to do."""

SHOWN_TASKS, SHOWN_SAMPLES = 4, 60
"""So many test tasks, or test samples, are in the report."""

log = logging.getLogger("metalearn")


# Before a run


def look_into_folder(job: Job, parts: Parts) -> tuple[FolderState, str | None]:
    """Inspects the run folder, which stays as it is; returns its state, and the report if nothing is left to do. If the
    run is complete already, its model is handed out.

    Raises:
        ConfigError: the run may not go on in this folder; see `inspect`. Or the model cannot be handed out there.
    """
    check_copy(job.config.launch.model)
    state = inspect(job.run_dir, job.config, parts.start, lambda saved: restored(saved, parts))
    done = report_if_done(job.run_dir, job.config, state)
    if done is not None and state.snapshot is not None:
        compare_with_saved(job, parts, state.snapshot, goes_on=False)
    if state.result is not None:
        hand_out(job)
    return state, done


def check_run(job: Job, parts: Parts, begun: Snapshot | None) -> None:
    """Checks what is about to be trained: the first tasks fit the network, and no test class was trained on.

    `begun` is the checkpoint that the run goes on from; a rank that does not see the run folder has None.

    Raises:
        ConfigError: they do not, or one was.
        DataError: data that is missing or damaged.
    """
    check_compatible(parts.algorithm, parts.model, parts.start, parts.source, first_tasks(parts))
    if begun is not None and begun.meta["step"]:
        compare_with_saved(job, parts, begun, goes_on=True)
    seen = seen_by(parts, begun)
    for split in ("test", "val"):
        warn_of_seen_drawers(check_unseen(seen, parts.source, split, job.config.seen_classes))


def compare_with_saved(job: Job, parts: Parts, saved: Snapshot, *, goes_on: bool) -> None:
    """Compares what a checkpoint was trained with and what is asked for, where the keys alone do not tell: the content
    of the data, and the rates of a schedule that falls towards another last step. One line names what differs.

    Args:
        goes_on: the run goes on from the checkpoint; else only its result is reported.

    Raises:
        ConfigError: the run is to go on with other data, or these lie elsewhere, and no `resume` names the checkpoint.
    """
    changes = []
    try:
        other_data = parts.content().is_known_otherwise(saved.meta.get(DATA))
    except (ConfigError, DataError):
        if goes_on:
            raise
        other_data = False  # they are not here any more, which makes the result no other
    if other_data:
        changes.append(f"dataset={job.config.dataset._target_} has another content now")
    done, before, steps = saved.meta["step"], saved.meta["config"]["trainer"]["steps"], parts.settings.steps
    if goes_on and parts.outer.rate(done, before) != parts.outer.rate(done, steps):
        changes.append(f"trainer.steps={steps}: the rates so far were those of a run of {before}")
    if not changes:
        return
    what = f"{job.run_dir}: step {done} was not trained with what is asked for now: {'; '.join(changes)}. "
    # A result stands though its data have changed since; those of another root are asked for, and are another run's.
    elsewhere = saved.meta["config"]["dataset"].get("root") != job.config.dataset.get("root")
    if other_data and (goes_on or elsewhere) and job.config.resume == "auto":
        raise ConfigError(
            f"{what}Bring the data back, or type run=NAME for a run with these, or run=NAME "
            f"resume={job.run_dir}/checkpoints/last to go on with these"
        )
    log.warning("%sType run=NAME for a run with these", what)


# The run


def train_and_test(job: Job, parts: Parts, state: FolderState, strategy: Strategy, stops: Stops) -> Result:
    """Rank zero: trains to the last step, tests the best checkpoint, draws, and writes the result.

    Raises:
        Stopped: the run was asked to stop; a checkpoint is saved.
        RunError: a value that is not finite, a checkpoint that is gone, or a file that cannot be written.
    """
    learner, progress = resume_or_begin(job, parts, state)
    with writing(job.run_dir):  # of a run that was complete, or paused, and goes on
        (job.run_dir / "result.json").unlink(missing_ok=True)
    config = to_container(job.config)
    saved = state.snapshot.state if state.snapshot else {}
    window = Window(
        done=progress.step,
        validated=progress.latest["step"] if progress.latest else 0,
        steps=parts.settings.steps,
        meta_batch_size=parts.settings.meta_batch_size,
        unit=parts.algorithm.trained_on,
        pending=saved.get("pending", {}),
        digest=saved.get("digest"),
        val_every=parts.settings.val_every,
        val_tasks=parts.settings.val_tasks,
        test_tasks=parts.settings.test_tasks,
    )
    run_log = parts.open_log(job.run_dir, window)
    seen = seen_by(parts, state.snapshot)
    content = parts.content()
    data = content.digest
    for line in filter(None, (content.copies, content.shared) if state.snapshot is None else ()):
        log.warning("dataset: %s", line)
    commands = commands_of(job, state.snapshot)
    noted = {DATA: data, COMMANDS: commands, ORIGIN: state.snapshot and state.snapshot.meta.get(ORIGIN)}
    run = make_run(job, parts, strategy, parts.checkpointer, run_log, stops, seen, noted)
    log_start(job, parts, run)
    try:
        run_log.start(config, first_pictures(parts))
        size = run.training.chunk if isinstance(run.training.chunk, int) else None  # else it is computed anywhere
        strategy.share(to_bytes(snapshot(learner, progress, run.meta | {CHUNK: size}, {})))
        progress = fit(run, learner, progress)
        ended = ended_by_patience(run.settings, progress)
        if ended:
            log.info(
                "training ends after step %d of %d: trainer.patience=%d validations were no better than that of step "
                "%d; trainer.patience=null goes on", progress.step, run.settings.steps, run.settings.patience,
                progress.best["step"] if progress.best else 0,
            )  # fmt: skip
        check_finite(job.config, "val", progress.best or {}, progress)
        best = parts.checkpointer.best()
        if best is None:
            raise RunError(f"{job.run_dir / 'checkpoints/best'}: is not there any more; the same command trains on")
        tested = fitted("checkpoint", job.run_dir / "checkpoints/best", best.params, parts.start)
        try:
            values = evaluate(run, tested, "test", run.settings.test_tasks)
        except Interrupted:
            raise Stopped("stopped in the test, which the same command makes again", progress) from None
        write_table(job.run_dir / "test.csv", values)
        test = figures_of(values, parts.source, "test", run.evaluation.unit) | check_unseen(
            seen, parts.source, "test", job.config.seen_classes
        )
        run_log.evaluation(progress.step, "test", test)
        check_finite(job.config, "test", test, progress)
        result = result_of(job, "completed", progress) | {
            **({PATIENCE: run.settings.patience} if ended else {}),
            DATA: data,
            "test": test | {"transductive": parts.transductive},
        }
        figures = {f"hparam/test_{name}": value for name, value in test.items() if isinstance(value, int | float)}
        run_log.result(config, figures)
    finally:
        run_log.close()
    # Draw before writing result.json: a finished run is never drawn again.
    drawn = {name: value.float() for name, value in tested.items()}  # in the type of the data
    shown = partial(draw_report, commands)
    for wanted, path, draw in ((run_log.plots, "plots", draw_plots), (run_log.report, REPORT, shown)):
        if wanted:
            try:
                draw(job, parts, drawn, result)
            except DiskError:  # the same command tests again, and draws
                raise
            except Exception as error:  # whatever fails in the drawing, the run is complete
                if isinstance(error, OSError) and is_disk_fault(error):
                    raise unwritten(job.run_dir / path, error, "drawn") from error
                log.warning("%s: cannot be drawn: %s", job.run_dir / path, error)
                log.debug("where the drawing failed:", exc_info=True)  # for train.log
    write_result(job.run_dir, result)
    return result


def check_finite(config: DictConfig, split: str, figures: Mapping[str, Any], progress: Progress) -> None:
    """Raises DivergedError for a validation or a test whose loss or metric is not finite: nothing can be compared with
    it."""
    wrong = [name for name in (main_metric(figures), "loss") if not math.isfinite(figures.get(name, 0.0))]
    if not wrong:
        return
    rate = OmegaConf.select(config, "algorithm.inner_lr")
    advice = "" if rate is None else f"; it may be algorithm.inner_lr={rate}: type algorithm.inner_lr={rate / 10:g}"
    message = f"{split} {wrong[0]} is {figures[wrong[0]]}, so this run has no result{advice}"
    raise DivergedError(message, progress.step + 1, progress)


def result_of(job: Job, status: str, progress: Progress) -> Result:
    """The fields of result.json that every run has; `val` is the best validation, or the latest of a paused run."""
    return {
        "status": status, "experiment": job.experiment, "run": str(job.config.run), "seed": job.config.seed,
        "steps": progress.step, "seconds": round(progress.seconds, 3), "workers": job.workers,
        "device": described(job.config.device),
        "val": progress.latest if status == PAUSED else progress.best,
    }  # fmt: skip


def follow(job: Job, parts: Parts, strategy: Strategy) -> None:
    """The other ranks of a strategy that all ranks drive: take the same steps and write nothing.

    Raises:
        Paused: as on rank zero. If that is asked to stop, it ends this process.
        RunError: a value that is not finite.
    """
    shared = strategy.share(b"")
    if shared == DONE:
        return
    begun = from_bytes(shared)
    learner, progress = restored(begun, parts)
    run = make_run(job, parts, strategy, NO_CHECKPOINTS, SILENT, NEVER, Seen())
    if begun.meta[CHUNK] is not None:
        run = run._replace(training=run.training._replace(chunk=begun.meta[CHUNK]))
    progress = fit(run, learner, progress)
    check_finite(job.config, "val", progress.best or {}, progress)  # as on rank zero, which ends then
    evaluate(run, learner.params, "test", parts.settings.test_tasks)


def hand_out(job: Job) -> None:
    """Copies what a completed run has learned to where the config asks for it; jobs of a multirun copy nothing.

    Raises:
        RunError: the folder cannot be written.
    """
    target = job.config.launch.model
    if target is not None and not job.in_sweep:
        copy_best(job.run_dir, Path(target))


def restored(saved: Snapshot, parts: Parts) -> tuple[TrainState, Progress]:
    """The learner of a checkpoint and its progress, with the optimiser and the average that the config describes."""
    return restore(saved, parts.outer.start, parts.settings.ema_decay)


def resume_or_begin(job: Job, parts: Parts, state: FolderState) -> tuple[TrainState, Progress]:
    """The learner as the run folder has it, or at its start."""
    if state.snapshot is None:
        parts.checkpointer.settle(0, None)
        for note in parts.start_notes:
            log.warning("%s", note)
        return new_learner(parts.start, parts.outer.start, parts.settings.ema_decay), Progress()
    learner, progress = restored(state.snapshot, parts)
    if state.rewinds:
        rewind(job.run_dir, progress.step)
    if not parts.checkpointer.settle(progress.step, progress.best["step"] if progress.best else None):
        progress = progress._replace(best=None)  # it belonged to another folder, or to steps that are gone
    if job.config.resume not in ("auto", "never") and not from_meta(state.snapshot.meta).complete:
        log.warning("resume=%s: %s", job.config.resume, UNKNOWN)
    log.info("going on after step %d", progress.step)
    return learner, progress


def seen_by(parts: Parts, begun: Snapshot | None) -> Seen:
    """The classes that a run sees, with those that the parameters have seen that it begins from, or goes on from. A run
    without steps only validates."""
    seen = seen_in(parts.source, parts.settings.steps).joined(parts.start_seen)
    return seen.joined(from_meta(begun.meta)) if begun else seen


def commands_of(job: Job, begun: Snapshot | None) -> Commands:
    """The commands that have made the run so far, in order. One that changes no number of the run replaces the last."""
    own = [*job.program.name.split(), *(word for word in job.arguments if not _is_free(word, job))]
    earlier = [(step, words) for step, words in begun.meta.get(COMMANDS, ())] if begun else []
    if begun is None or not earlier:
        return [(0, own)]
    return earlier if earlier[-1][1] == own else [*earlier, (begun.meta["step"], own)]


def _is_free(word: str, job: Job) -> bool:
    """Whether an argument only says how, or how long, this process runs."""
    key, _, value = word.partition("=")
    if key == "resume":
        return value in ("auto", "never") or is_own(job.run_dir, job.config.resume)
    return key in ("pause_after", "workers", "checkpoint.every")


def make_run(
    job: Job,
    parts: Parts,
    strategy: Strategy,
    checkpointer: Checkpointer,
    run_log: RunLog,
    stops: Stops,
    seen: Seen,
    noted: Mapping[str, Any] | None = None,
) -> Run:
    """What the loop needs on this rank; its checkpoints also have what is `noted`."""
    return Run(
        settings=parts.settings,
        pause_after=job.config.pause_after,
        strategy=strategy,
        outer=parts.outer,
        reduce=parts.reduce,
        training=Units(training_chunk(parts), parts.algorithm.trained_on),
        evaluation=Units(evaluation_chunk(parts), parts.algorithm.evaluated_on),
        checkpointer=checkpointer,
        log=run_log,
        meta={"config": to_container(job.config), KEY: to_meta(seen), **(noted or {})},
        stops=stops,
        updater=parts.updater,
    )


def log_start(job: Job, parts: Parts, run: Run) -> None:
    """Logs what is about to be trained, and how it is computed."""
    chunk, unit = run.training
    size = chunk if isinstance(chunk, int) else f"up to {parts.source.group('train')}"  # type: ignore[attr-defined]
    log.info("%s: %d steps, %d workers, %s %s a chunk", job.run_dir, run.settings.steps, job.workers, size, unit)
    if (idle := idle_workers(parts)) and run.settings.steps:
        chunks, share = job.workers - idle, math.ceil(run.settings.meta_batch_size / job.workers)
        log.warning(
            "%d of %d workers compute nothing, since a step has %d chunks; type trainer.task_chunk=%d, which rounds "
            "otherwise, or take fewer workers", idle, job.workers, chunks, share,
        )  # fmt: skip
    if "why" in (device := described(job.config.device)):
        log.warning("device=auto: the CPU computes, since %s", device["why"])
    dtype = next(iter(parts.start.values())).dtype
    log.info("the layers are computed by %s", describe(parts.device, dtype, not_compiled(parts)))
    log_network(parts.model)
    if words := parts.outer.in_words(parts.start):
        log.info("%s", words)


def log_network(model: Model) -> None:
    """Logs how the network is computed, and what of it is not used."""
    if model.note:
        log.info("%s", model.note)
    for caution in model.cautions:
        log.warning("%s", caution)


def not_compiled(parts: Parts) -> str | None:
    """Why the network is not compiled as a whole; None: it can be."""
    loss = parts.model.loss
    if loss is not None and not loss.compiled:
        return f"loss={loss.name} is torch's"
    if parts.model.network is None:
        return "this network has others than those of metalearn.nn"
    return parts.model.network.refusal(parts.start)


def first_pictures(parts: Parts) -> dict[str, Picture]:
    """The first training task and the first test task as pictures; none where tasks are not made of pictures."""
    if parts.algorithm.trained_on != "tasks":
        return {}
    loss = parts.algorithm.computes
    tasks = {split: episodes_of(parts.source, split, torch.tensor([0]), loss) for split in ("train", "test")}
    return {split: episode_picture(task) for split, task in tasks.items() if has_pictures(task)}


# What is drawn of a completed run


def draw_plots(job: Job, parts: Parts, params: Params, result: Result) -> None:
    """The plots."""
    learning_curve(job.run_dir)
    episode = shown_episode(parts, torch.tensor([0]))
    from_one_number = episode.query.y.is_floating_point() and episode.query.x.shape[2:] == (1,)
    if from_one_number and parts.source.classes("test") is None:
        adaptation(job.run_dir, parts.algorithm.adapt, params, episode)


def draw_report(commands: Commands, job: Job, parts: Parts, params: Params, result: Result) -> None:
    """The page report.html."""
    ends = [*([f"pause_after={step}"] for step, _ in commands[1:]), []]
    lines = [shlex.join(["python", *words, *end]) for (_, words), end in zip(commands, ends, strict=True)]
    learned = ShownLearner(parts.algorithm.adapt, params)
    shown = {f"task {number}": torch.tensor([number]) for number in range(SHOWN_TASKS)}
    samples = parts.algorithm.evaluated_on == "samples"
    if samples:
        shown = {"first samples": torch.arange(min(SHOWN_SAMPLES, parts.settings.test_tasks))}
    tasks = []
    for title, indices in shown.items():
        (support, query) = shown_episode(parts, indices)
        outputs = learned.adapt(params, support)(query.x)
        if samples:  # their support set gives statistics only
            support = Batch(support.x[:, :0], support.y[:, :0])
        names = class_names_of(parts.source, "test", int(indices[0]))
        tasks.append(ShownTask(title, Episode(support, query), outputs, names))
    write_report(job.run_dir, lines, to_container(job.config), result, tasks, learned)


def shown_episode(parts: Parts, indices: torch.Tensor) -> Episode:
    """Test tasks or samples in the type of the parameters that are drawn with."""
    episode = episodes_of(parts.source, "test", indices, parts.algorithm.computes)
    return placing(torch.device("cpu"), torch.float32)(episode)
