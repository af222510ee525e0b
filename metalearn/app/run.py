"""A run from its folder to its result, once its parts are built: what rank zero does, and what the others do."""

import logging
import math
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, read_write

from distributed.errors import StoppedByLeader
from distributed.info import GOODBYE_SECONDS, get_world_info, on_one_host
from distributed.launch.meeting import note_end
from distributed.launch.processes import FOLLOWS
from metalearn.app import process
from metalearn.app.job import Job
from metalearn.app.parts import UNKNOWN, Parts, check_unseen, described, seen_in, warn_of_seen_drawers
from metalearn.config.check import on_several_hosts, started_by_launcher
from metalearn.config.options import CONF
from metalearn.config.values import to_container
from metalearn.errors import ConfigError, DataError, DiskError, DivergedError, MixedWorkersError, RunError, as_typed
from metalearn.nn.backends import describe
from metalearn.reporting.loggers import Window, rows_of
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal
from metalearn.reporting.page import episode_picture, has_pictures, save
from metalearn.reporting.report import (
    REPORT,
    ShownTask,
    adaptation_chart,
    learning_charts,
    position_charts,
    write_report,
)
from metalearn.runs import folder, metrics
from metalearn.runs.checkpoint import ORIGIN, Checkpointer, Snapshot, fitted, rewind
from metalearn.runs.signals import Interrupted, Stops, StopSignal
from metalearn.storage.files import comes_from_disk, is_disk_fault, unwritten, writing
from metalearn.tasks.common.episodes import class_names_of
from metalearn.training.chunks import check_compatible, episodes_of, placing
from metalearn.training.settings import tasks_in_chunks
from metalearn.training.trainer import Paused, Stopped, Trainer, TrainState
from metalearn.types import Batch, Episode, Model, Params, Strategy

Result = dict[str, Any]
Commands = list[tuple[int, list[str]]]  # those that have made a run: the step from which on, and the words

DATA = "data"  # the key of the digest of the data in checkpoints and in result.json
COMMANDS = "commands"  # the key of the run's `Commands` in checkpoints
CHUNK = "chunk"  # what rank zero shares of its chunks, since they may depend on the kernels that a host can compile
SHOWN_TASKS, SHOWN_SAMPLES = 4, 60  # how many test tasks, or test samples, the report shows

log = logging.getLogger("metalearn")


# Before a run


def look_into_folder(parts: Parts) -> tuple[folder.FolderState, str | None]:
    """Inspects the run folder, which stays as it is; returns its state, and the report if nothing is left to do. Hands
    out the model of a complete run. Raises ConfigError if it cannot, or the run may not go on there; see `inspect`."""
    job = parts.job
    folder.check_copy(job.config.launch.model)
    inspected = folder.inspect(job.run_dir, job.config, parts.start, parts.restored)
    done = folder.report_if_done(job.run_dir, job.config, inspected)
    if done is not None and inspected.snapshot is not None:
        compare_with_saved(parts, inspected.snapshot, goes_on=False)
    if inspected.result is not None:
        hand_out(job)
    return inspected, done


def check_run(parts: Parts, begun: Snapshot | None) -> None:
    """Checks what is about to be trained: the first tasks fit the network, and no test class was trained on. `begun` is
    the checkpoint that the run goes on from; a rank that does not see the run folder has None."""
    check_compatible(parts.algorithm, parts.model, parts.start, parts.source, parts.first_tasks())
    if begun is not None and begun.meta["step"]:
        compare_with_saved(parts, begun, goes_on=True)
    seen = seen_by(parts, begun)
    for split in ("test", "val"):
        warn_of_seen_drawers(check_unseen(seen, parts.source, split, parts.job.config.seen_classes))


def compare_with_saved(parts: Parts, saved: Snapshot, *, goes_on: bool) -> None:
    """Compares what a checkpoint was trained with and what is asked for, where the keys alone do not tell: the content
    of the data, and the rates of a schedule that falls towards another last step. One line names what differs. The run
    `goes_on` from the checkpoint; else only its result is reported. Raises ConfigError if it is to go on with other
    data, or these lie elsewhere, and no `resume` names the checkpoint."""
    job, changes = parts.job, []
    try:
        other_data = parts.content.is_known_otherwise(saved.meta.get(DATA))
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
    log.warning("%s%s", what, "Type run=NAME for a run with these" if job.config.resume == "auto" else "")


def seen_by(parts: Parts, begun: Snapshot | None) -> metrics.Seen:
    """The classes that a run sees, or that the parameters have seen that it begins from or goes on from."""
    seen = seen_in(parts.source, parts.settings.steps).joined(parts.start_seen)
    return seen.joined(metrics.from_meta(begun.meta)) if begun else seen


# Rank zero


def lead(parts: Parts) -> int:
    """Rank zero: checks the run, if no launcher has, trains, tests and writes everything; returns the exit code."""
    job, launched = parts.job, started_by_launcher()
    log_to_terminal(logging.ERROR if launched else logging.INFO)  # the launcher has logged what is checked here
    if not launched:  # before the run folder is made or changed
        inspected, done = look_into_folder(parts)
        if done is not None:
            return _report(parts, done)
        check_run(parts, inspected.snapshot)
    with folder.lock(job.run_dir, wait=job.in_sweep):
        inspected, done = look_into_folder(parts)  # another process may have been in it before the lock was held
        if done is not None:
            return _report(parts, done)
        if launched:
            check_run(parts, inspected.snapshot)
        log_to_terminal()
        if job.in_sweep:
            return _train_and_close(parts, inspected)
        assert job.whole is not None

        def task(config: DictConfig) -> int:
            return process.exit_code_of(lambda: _train_and_close(parts, inspected))  # Hydra would report an error too

        return run_by_hydra(task, job.whole, job.run_dir)


def _report(parts: Parts, done: str) -> int:
    """Reports a run in which nothing is left to do. Ranks on other hosts, which wait for this one, are let go."""
    process.print_all(done)
    if on_several_hosts(parts.job.config):
        try:
            strategy = parts.connect()
            strategy.share(None)  # in place of the learner
            strategy.close()
        except (RuntimeError, ConnectionError, TimeoutError, MixedWorkersError) as error:
            log.debug("%s", error)  # they were not started, or have ended: nothing is lost
    return process.OK


def _train_and_close(parts: Parts, inspected: folder.FolderState) -> int:
    """Connects the workers, trains, and closes what was opened, whatever has happened; returns the exit code."""
    stop = StopSignal()
    handler = log_to_file(parts.job.run_dir / "train.log")
    try:
        with stop.interruptible():
            strategy = parts.connect()
        assert strategy.drives
        with closing(strategy):
            code = train(parts, inspected, strategy, stop)
            note_end(code)  # before the others are dismissed: whatever becomes of them then, nothing is started again
            return code
    except DivergedError as error:
        return process.report_error(error, process.DIVERGED)
    except MixedWorkersError as error:
        note_end(process.BAD_CONFIG)
        return process.report_error(error, process.BAD_CONFIG)
    except Interrupted:
        log.info("stopped before the workers had met")
        note_end(stop.exit_code)
        return stop.exit_code
    except DiskError as error:
        log.debug("ended by DiskError: %s", error)  # for train.log
        raise
    except (ConfigError, DataError, RunError, ConnectionError, TimeoutError) as error:
        code = process.DISK if comes_from_disk(error) else process.FAILED
        if not isinstance(error, ConnectionError | TimeoutError):  # no worker is lost: it would fail so again
            note_end(code)
        return process.report_error(error, code)
    except Exception as error:
        note_end(process.DISK if is_disk_fault(error) else process.FAILED)
        if (why := process.without_memory(error)) is not None:
            return process.report_error(RunError(why), process.FAILED)
        if is_disk_fault(error):
            raise
        log.exception("the run failed")
        process.note_cause(f"error: the run failed: {type(error).__name__}: {error}")
        return process.FAILED
    finally:
        detach(handler)
        stop.restore()


@contextmanager
def closing(strategy: Strategy) -> Iterator[None]:
    """Ends the strategy's session, however this is left: Python must not end while a thread of torch is in it. On rank
    zero a failure is noted as the end of the run, unless a worker is lost: then the run is started again."""
    try:
        yield
    except BaseException as error:
        lost_or_stopped = ConnectionError | TimeoutError | KeyboardInterrupt
        if strategy.drives and get_world_info().rank == 0 and not isinstance(error, lost_or_stopped):
            broken = process.DISK if comes_from_disk(error) else process.FAILED
            note_end(process.DIVERGED if isinstance(error, DivergedError) else broken)
        strategy.close(failure=error)
        raise
    strategy.close()


def serve_run(parts: Parts) -> int:
    """Another rank of a run: checks it as rank zero does, without its folder, and serves; returns the exit code."""
    job = parts.job
    log_to_terminal(logging.ERROR)
    done = folder.report_if_done(job.run_dir, job.config, None)
    if done is not None and not on_several_hosts(job.config):  # where only rank zero may see the run folder
        return process.print_all(done) if done else process.OK
    check_run(parts, None)
    return serve(parts, lambda strategy: follow(parts, strategy))


def serve(parts: Parts, drive: Callable[[Strategy], object]) -> int:
    """The other ranks: compute what rank zero asks for; or `drive`, under a strategy that all ranks drive."""
    try:
        strategy = parts.connect()
        # Rank zero gets the same signals, if they are for the whole run. It saves, then ends this rank too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # If the agent of this host alone is stopped, rank zero does not know of it.
        # On one host the agent itself kills after 30 s, and rank zero may need this one to save (split).
        later = threading.Timer(25.0 if on_one_host() else GOODBYE_SECONDS, os._exit, (FOLLOWS,))
        later.daemon = True
        signal.signal(signal.SIGTERM, lambda *_: None if later.is_alive() else later.start())
        with closing(strategy), suppress(Paused):
            if strategy.drives:
                drive(strategy)
    except (StoppedByLeader, RunError) as error:
        log.debug("%s", error)  # rank zero has reported the cause
        return FOLLOWS
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        process.print_cause(f"error: {get_world_info().worker_name}: {error}")
        return process.FAILED
    return process.OK


def follow(parts: Parts, strategy: Strategy) -> None:
    """The other ranks of a strategy that all ranks drive: take the same steps and write nothing. Raises Paused as on
    rank zero, which ends this process if it is asked to stop; and RunError for a value that is not finite."""
    begun = strategy.share(None)
    if begun is None:  # there is nothing left to do
        return
    trainer = parts.trainer(strategy, parts.restored(begun))
    trainer.checkpointer = Checkpointer(parts.checkpointer.due)
    if begun.meta[CHUNK] is not None:
        trainer.training = trainer.training._replace(chunk=begun.meta[CHUNK])
    trainer.fit()
    state = trainer.state
    check_finite(parts.job.config, "val", state.best or {}, state.step)  # as on rank zero, which ends then
    trainer.evaluate(state.params, "test", parts.settings.test_tasks)


def train(parts: Parts, inspected: folder.FolderState, strategy: Strategy, stop: StopSignal) -> int:
    """Rank zero: trains to the end or a stop that was asked for, and writes what became of the run; returns the exit
    code. Raises RunError for a value that is not finite, or a checkpoint or file that cannot be read or written."""
    job, pause = parts.job, parts.job.run_dir / folder.STOP
    trainer = begin(parts, inspected, strategy)
    trainer.stops = Stops(lambda: stop.requested or pause.exists(), stop.interruptible)
    try:
        try:
            result, tested = train_and_test(parts, trainer)
        finally:
            trainer.log.close()
    except Paused as paused:
        folder.write_result(job.run_dir, result_of(job, folder.PAUSED, trainer.state))
        log.info("%s", paused)
        return process.OK
    except Stopped as stopped:
        if not stop.requested:  # a file has asked for it
            folder.write_result(job.run_dir, result_of(job, folder.PRUNED, trainer.state))
        note_end(stop.exit_code)
        log.info("%s", stopped)
        strategy.dismiss()
        if stop.requested:  # by the user, or by an agent of several, so only that agent knows whether the others go on
            strategy.close(failure=stopped)
        return stop.exit_code
    except DivergedError as error:
        folder.write_result(job.run_dir, result_of(job, "diverged", trainer.state) | {"steps": error.step - 1})
        raise
    # Draw before writing result.json: a finished run is never drawn again.
    draw(parts, trainer, tested, result)
    folder.write_result(job.run_dir, result)
    hand_out(job)
    return process.print_all(folder.run_report(job.run_dir, result))


def run_by_hydra(task: Callable[[DictConfig], int], whole: DictConfig, run_dir: Path) -> int:
    """Lets Hydra make the run folder and its `.hydra`, then call `task`; returns the task's exit code. `hydra.main`
    would compose the config again, which `whole` is already: that takes half a second, and it cannot name a run by what
    was typed and differs from the defaults of its experiment."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import configure_log, run_job
    from hydra.types import HydraContext, RunMode

    with read_write(whole.hydra):
        whole.hydra.mode = RunMode.RUN
    configure_log(whole.hydra.hydra_logging, whole.hydra.verbose)
    callbacks = Callbacks(whole)
    with writing(run_dir), initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        callbacks.on_run_start(config=whole, config_name="config")
        done = run_job(task, whole, "hydra.run.dir", None, HydraContext(loader, callbacks))
        callbacks.on_run_end(config=whole, config_name="config", job_return=done)
        code: int = done.return_value  # or the error of the task
    return code


def begin(parts: Parts, inspected: folder.FolderState, strategy: Strategy) -> Trainer:
    """The trainer of a run that begins, or goes on, with its log."""
    job, begun, settings = parts.job, inspected.snapshot, parts.settings
    state = resume_or_begin(parts, inspected)
    with writing(job.run_dir):  # of a run that was complete, or paused, and goes on
        (job.run_dir / "result.json").unlink(missing_ok=True)
    saved = begun.state if begun else {}
    window = Window(
        done=state.step, validated=state.latest["step"] if state.latest else 0, steps=settings.steps,
        meta_batch_size=settings.meta_batch_size, unit=parts.algorithm.trained_on, pending=saved.get("pending", {}),
        digest=saved.get("digest"), val_every=settings.val_every, val_tasks=settings.val_tasks,
        test_tasks=settings.test_tasks,
    )  # fmt: skip
    run_log = parts.open_log(job.run_dir, window)
    trainer = parts.trainer(strategy, state)
    trainer.checkpointer, trainer.log = parts.checkpointer, run_log
    trainer.meta = {
        "config": to_container(job.config),
        metrics.KEY: metrics.to_meta(seen_by(parts, begun)),
        DATA: parts.content.digest,
        COMMANDS: commands_of(job, begun),
        ORIGIN: begun and begun.meta.get(ORIGIN),
    }
    log_start(parts, trainer)
    return trainer


def resume_or_begin(parts: Parts, inspected: folder.FolderState) -> TrainState:
    """The state as the run folder has it, or at its start."""
    if inspected.snapshot is None:
        parts.checkpointer.settle(0, None)
        for note in parts.start_notes:
            log.warning("%s", note)
        return parts.new_state()
    state, resume = parts.restored(inspected.snapshot), parts.job.config.resume
    if inspected.rewinds:
        rewind(parts.job.run_dir, state.step)
    if not parts.checkpointer.settle(state.step, state.best["step"] if state.best else None):
        state.best = None  # it belonged to another folder, or to steps that are gone
    if resume not in ("auto", "never") and not metrics.from_meta(inspected.snapshot.meta).complete:
        log.warning("resume=%s: %s", resume, UNKNOWN)
    log.info("going on after step %d", state.step)
    return state


def train_and_test(parts: Parts, trainer: Trainer) -> tuple[Result, Params]:
    """Trains to the last step, and tests the best checkpoint; returns the result, and the parameters tested. Raises
    Stopped if the run was asked to stop, when a checkpoint is saved; and RunError as `train`."""
    job, settings, state, run_log = parts.job, parts.settings, trainer.state, trainer.log
    pictures = {}
    for split in ("train", "test") if parts.algorithm.trained_on == "tasks" else ():
        first = episodes_of(parts.source, split, torch.tensor([0]), parts.algorithm.computes)
        if has_pictures(first):
            pictures[split] = episode_picture(first)
    run_log.start(trainer.meta["config"], pictures)
    size = trainer.training.chunk if isinstance(trainer.training.chunk, int) else None  # else it is computed anywhere
    trainer.strategy.share(state.snapshot(trainer.meta | {CHUNK: size}, {}))
    trainer.fit()
    if trainer.ended_by_patience:
        log.info(
            "training ends after step %d of %d: trainer.patience=%d validations were no better than that of step "
            "%d; trainer.patience=null goes on", state.step, settings.steps, settings.patience,
            state.best["step"] if state.best else 0,
        )  # fmt: skip
    check_finite(job.config, "val", state.best or {}, state.step)
    best, link = parts.checkpointer.best(), job.run_dir / "checkpoints/best"
    if best is None:
        raise RunError(f"{link}: is not there any more; the same command trains on")
    tested = fitted("checkpoint", link, best.params, parts.start)
    try:
        values = trainer.evaluate(tested, "test", settings.test_tasks)
    except Interrupted:
        raise Stopped("stopped in the test, which the same command makes again") from None
    metrics.write_table(job.run_dir / metrics.TESTS, values)
    seen = metrics.from_meta(trainer.meta)
    figures = metrics.figures_of(values, parts.source, "test", trainer.evaluation.unit, parts.model.reach)
    figures |= check_unseen(seen, parts.source, "test", job.config.seen_classes)
    figures |= metrics.of_wrong_labels(tested, parts.source)
    run_log.evaluation(state.step, "test", figures)
    check_finite(job.config, "test", figures, state.step)
    final = {f"hparam/test_{name}": value for name, value in figures.items() if isinstance(value, int | float)}
    run_log.result(trainer.meta["config"], final)
    result = result_of(job, "completed", state) | {
        **({folder.PATIENCE: settings.patience} if trainer.ended_by_patience else {}),
        DATA: trainer.meta[DATA],
        "test": figures | {"transductive": parts.transductive},
    }
    return result, tested


def check_finite(config: DictConfig, split: str, figures: Mapping[str, Any], step: int) -> None:
    """Raises DivergedError for a validation or a test after a step whose loss or metric is not finite."""
    wrong = [name for name in (metrics.main_metric(figures), "loss") if not math.isfinite(figures.get(name, 0.0))]
    if not wrong:
        return
    rate, steps = (OmegaConf.select(config, f"algorithm.{key}") for key in ("inner_lr", "inner_steps"))
    advice = "" if rate is None else f"; it may be algorithm.inner_lr={rate}: type algorithm.inner_lr={rate / 10:g}"
    if steps and steps < config.algorithm.eval_steps:
        advice += f", or algorithm.eval_steps={steps}, as in training"
    raise DivergedError(f"{split} {wrong[0]} is {figures[wrong[0]]}, so this run has no result{advice}", step + 1)


def result_of(job: Job, status: str, state: TrainState) -> Result:
    """The fields of result.json that every run has; `val` is the best validation, or the latest of a paused run."""
    return {
        "status": status, "experiment": job.experiment, "run": str(job.config.run), "seed": job.config.seed,
        "steps": state.step, "seconds": round(state.seconds, 3), "workers": job.workers,
        "device": described(job.config.device), "val": state.latest if status == folder.PAUSED else state.best,
    }  # fmt: skip


def hand_out(job: Job) -> None:
    """Copies what a complete run has learned to `launch.model`, if not in a multirun. Raises RunError if it cannot."""
    target = job.config.launch.model
    if target is not None and not job.in_sweep:
        folder.copy_best(job.run_dir, Path(target))


def commands_of(job: Job, begun: Snapshot | None) -> Commands:
    """The commands that have made the run so far, in order. One that changes no number of the run replaces the last."""

    def is_free(word: str) -> bool:
        """Whether an argument only says how, or how long, this process runs."""
        key, _, value = word.partition("=")
        if key == "resume":
            return value in ("auto", "never") or folder.is_own(job.run_dir, job.config.resume)
        return key in ("pause_after", "workers", "checkpoint.every")

    command = [*job.program.name.split(), *(word for word in job.arguments if not is_free(word))]
    earlier = [(step, words) for step, words in begun.meta.get(COMMANDS, ())] if begun else []
    if begun is None or not earlier:
        return [(0, command)]
    return earlier if earlier[-1][1] == command else [*earlier, (begun.meta["step"], command)]


# What is logged at the start


def log_start(parts: Parts, trainer: Trainer) -> None:
    """Logs what is about to be trained, and how it is computed."""
    job, settings, (chunk, unit) = parts.job, parts.settings, trainer.training
    size = chunk if isinstance(chunk, int) else f"up to {parts.source.group('train')}"  # type: ignore[attr-defined]
    log.info("%s: %d steps, %d workers, %s %s a chunk", job.run_dir, settings.steps, job.workers, size, unit)
    chunks = len(tasks_in_chunks(0, settings.meta_batch_size, chunk))
    if chunks < job.workers and settings.steps:
        log.warning(
            "%d of %d workers compute nothing, since a step has %d chunks; type trainer.task_chunk=%d, which %s, or "
            "take fewer workers", job.workers - chunks, job.workers, chunks,
            math.ceil(settings.meta_batch_size / job.workers),
            "rounds otherwise" if unit == "tasks" else "batch norms see as other batches",
        )  # fmt: skip
    if parts.device.type == "cuda" and job.workers == 1 and (gpus := torch.cuda.device_count()) > 1:
        log.info("this host has %d GPUs, of which one computes; type workers=%d to use all", gpus, gpus)
    if "why" in (device := described(job.config.device)):
        log.warning("device=auto: the CPU computes, since %s", device["why"])
    dtype, loss, network = next(iter(parts.start.values())).dtype, parts.model.loss, parts.model.network
    if loss is not None and not loss.compiled:
        by_metric = OmegaConf.select(job.config, "metric._target_", default="auto").rpartition(".")[2] != "auto"
        not_compiled: str | None = f"{f'metric={loss.metric}' if by_metric else f'loss={loss.name}'} is torch's"
    elif network is None:
        not_compiled = "this network has others than those of metalearn.nn"
    else:
        not_compiled = network.refusal(parts.start)
    log.info("the layers are computed by %s", describe(parts.device, dtype, not_compiled))
    log_network(parts.model)
    if words := parts.outer.in_words(parts.start):
        log.info("%s", words)


def log_network(model: Model) -> None:
    """Logs how the network is computed, and what of it is not used."""
    if model.note:
        log.info("%s", model.note)
    for caution in model.cautions:
        log.warning("%s", caution)


# What is drawn of a completed run


def draw(parts: Parts, trainer: Trainer, tested: Params, result: Result) -> None:
    """The plots, and the page report.html, as far as the config asks for them. Raises DiskError if the disk is full or
    has failed; the same command tests again, and draws."""
    params = {name: value.float() for name, value in tested.items()}  # in the type of the data

    def plots() -> None:
        place = parts.job.run_dir / "plots"
        save(learning_charts(list(rows_of(parts.job.run_dir))), place / "learning_curve.png")
        if charts := position_charts(result["test"]):
            save(charts, place / "bits_by_position.png")
        episode = shown_episode(parts, torch.tensor([0]))
        from_one_number = episode.query.y.is_floating_point() and episode.query.x.shape[2:] == (1,)
        if from_one_number and parts.source.classes("test") is None:
            save([adaptation_chart("", parts.algorithm.adapt, params, episode)], place / "adaptation.png")

    def report() -> None:
        commands = trainer.meta[COMMANDS]
        ends = [*([f"pause_after={step}"] for step, _ in commands[1:]), []]
        lines = [as_typed(shlex.join([*words, *end])) for (_, words), end in zip(commands, ends, strict=True)]
        tasks, learned = shown_tasks(parts, params), (parts.algorithm.adapt, params)
        write_report(parts.job.run_dir, lines, trainer.meta["config"], result, tasks, learned)

    for asked, name, make in ((trainer.log.plots, "plots", plots), (trainer.log.report, REPORT, report)):
        if asked:
            try:
                make()
            except DiskError:
                raise
            except Exception as error:  # whatever fails in the drawing, the run is complete
                path = parts.job.run_dir / name
                if isinstance(error, OSError) and is_disk_fault(error):
                    raise unwritten(path, error, "drawn") from error
                log.warning("%s: cannot be drawn: %s", path, error)
                log.debug("where the drawing failed:", exc_info=True)  # for train.log


def shown_tasks(parts: Parts, params: Params) -> list[ShownTask]:
    """The first test tasks, or the first test samples, and what is answered for them."""
    samples = parts.algorithm.evaluated_on == "samples"
    shown = {f"task {number}": torch.tensor([number]) for number in range(SHOWN_TASKS)}
    if samples:
        shown = {"first samples": torch.arange(min(SHOWN_SAMPLES, parts.settings.test_tasks))}
    tasks = []
    for title, indices in shown.items():
        (support, query) = shown_episode(parts, indices)
        outputs = parts.algorithm.adapt(params, support)(query.x)
        if samples:  # their support set gives statistics only
            support = Batch(support.x[:, :0], support.y[:, :0])
        names = class_names_of(parts.source, "test", int(indices[0]))
        tasks.append(ShownTask(title, Episode(support, query), outputs, names))
    return tasks


def shown_episode(parts: Parts, indices: torch.Tensor) -> Episode:
    """Test tasks or samples in the type of the parameters that are drawn with."""
    episode = episodes_of(parts.source, "test", indices, parts.algorithm.computes)
    return placing(torch.device("cpu"), torch.float32)(episode)
