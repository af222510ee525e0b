"""From a job to the objects that it is made of. Nothing is started or opened here, but for pictures whose number the
network depends on. Checks come first: of this rank's device, whether every host computes the bits of rank zero, and
whether a learner is evaluated on classes that it has not seen."""

import functools
import hashlib
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from distributed.info import get_world_info
from distributed.launch.meeting import UnlikeWorkerError, compare_workers
from distributed.reduce import tree_sum
from distributed.strategies.common.work import Pieces, PipelineStage, Work, WorkPlan
from metalearn.algorithms.common.losses import measured_by, of_function
from metalearn.algorithms.common.metrics import reporting
from metalearn.algorithms.common.wrappers import of_present_classes, with_fixed, with_present_classes
from metalearn.app.job import Job
from metalearn.config.build import build, import_plugins
from metalearn.config.check import computes_elsewhere
from metalearn.config.saved import STARTS, check_checkpoint, trained_otherwise
from metalearn.config.values import FOLLOWS_WAYS, FREE_KEYS, is_below, leaves, to_container
from metalearn.errors import ConfigError, Invalid, MixedWorkersError
from metalearn.models.module import to_note
from metalearn.nn.backends import computed_by
from metalearn.nn.surroundings import type_of
from metalearn.reporting.logging import OpenLog
from metalearn.runs.checkpoint import Checkpointer, Snapshot, has_checkpoints, read_named, start_params
from metalearn.runs.metrics import KEY, SEEN_DRAWERS, UNKNOWN_OVERLAP, Seen, from_meta, overlap
from metalearn.storage.files import is_folder
from metalearn.tasks.common.episodes import Content, content_of, drawers_of, identities_of
from metalearn.tasks.common.pictures import first_few
from metalearn.training.chunks import chunk_functions, episodes_of, inputs_of_source, piece_functions, single_stage
from metalearn.training.on_device import DeviceWork, steps_on_device
from metalearn.training.optimizers import OuterOptimizer
from metalearn.training.settings import AUTO, Chunk, TrainerSettings, Units, chunk_in_group, chunk_size, tasks_that_fit
from metalearn.training.trainer import Trainer, TrainState
from metalearn.types import (
    Algorithm,
    ComesInGroups,
    Episode,
    GivesSamples,
    Loss,
    Model,
    OfSets,
    Params,
    Strategy,
    TaskSource,
    Updater,
)

TAKEN = 0.1  # the part of a GPU's memory that others may hold without a word: processes that only wait hold about 1%
DRIVER = Path("/proc/driver/nvidia/version")
RESIDENT = ("cuda",)  # types of devices on which steps stay
SOURCES = (".py", ".c", ".h", ".csv")  # endings of the files that make results
NOT_COMPARED = (*FREE_KEYS, *STARTS, "device", "dataset", "model.weights")
"""Keys that change no number, that may be another path on another host, or whose effect is compared instead."""

REFUSE, REPORT = "refuse", "report"

UNKNOWN = (
    "the identities of its training classes are not all known (its dataset does not name them, or it began from "
    "pretrained weights or another checkpoint without them), so it cannot be checked whether "
    "test classes are among them"
)

log = logging.getLogger("metalearn")


# The device


def check_device(name: str, precision: str, ranks: int | None = None) -> None:
    """Raises ConfigError where the config asks for a GPU, or for what only a GPU can do, and there is none, or fewer
    than `ranks` of this host, by default those that torchrun has started. With `auto` they share them."""
    if name == "cuda" and not torch.cuda.is_available():
        reason = why_no_gpu()
        raise ConfigError(
            f"device=cuda: torch sees no GPU here{f': {reason}' if reason else ''}; type device=auto or device=cpu"
        )
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"device=cuda: this host has {gpus} GPUs for {ranks} ranks; type workers={gpus} for each host, or "
            "device=auto to let ranks share a GPU"
        )
    if precision == "tf32" and own_device(name).type == "cpu":
        raise ConfigError("precision=tf32: is a mode of NVIDIA GPUs; type precision=float32, or precision=bf16")


def own_device(name: str) -> torch.device:
    """This rank's device. `auto` takes a GPU where there is one, chosen by the local rank."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def warn_of_other_users(device: torch.device) -> None:
    """Says how much of a GPU's memory others use, if that is more than a driver and its contexts need."""
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    if taken > TAKEN * total:
        log.warning(
            "%s: other processes hold %.0f of its %.0f GiB, and may slow this run down; nvidia-smi lists them, and "
            "CUDA_VISIBLE_DEVICES chooses another GPU", device, taken / 2**30, total / 2**30,
        )  # fmt: skip


def why_no_gpu() -> str | None:
    """Why torch sees no GPU on a machine with a driver for one, in torch's own words; None where there is no driver."""
    if torch.cuda.is_available() or not DRIVER.exists():
        return None
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, and this torch is one without CUDA; install one with CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return "there is an NVIDIA driver, and torch counts no card"


def described(name: str) -> dict[str, Any]:
    """The device for result.json: its `type`; a GPU's `name`; and `why` it is no GPU, with `device=auto`."""
    device = own_device(name)
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    reason = why_no_gpu() if name == "auto" else None
    return {"type": "cpu", **({"why": reason} if reason else {})}


# What makes two hosts alike


@functools.cache
def code_digest(plugins: Sequence[str] = ()) -> str:
    """A digest of the sources of this program and of plugins at the first call; line endings do not count."""
    digest = hashlib.sha256()
    for name in ("distributed", "metalearn", *plugins):
        folders = getattr(sys.modules[name], "__path__", None)  # of a package
        files = [file for folder in folders or () for file in Path(folder).rglob("*") if file.suffix in SOURCES]
        for path in sorted(files if folders else [Path(str(sys.modules[name].__file__))]):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{name} {path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The model of the CPU, as far as the system says it, and the instructions that torch takes of it."""
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8").partition("\n\n")[0] if info.exists() else ""
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    parts = [named[key] for key in ("model name", "cpu family", "model", "CPU implementer", "CPU part") if key in named]
    parts = parts or [platform.machine(), platform.processor()]
    return " ".join([*parts, torch.backends.cpu.get_cpu_capability()])


# The classes of an evaluation


def seen_in(source: TaskSource, steps: int) -> Seen:
    """Classes seen when training on `source`; not complete if it does not name those it has. 0 steps only validate."""
    train, val = (identities_of(source, split) for split in ("train", "val"))
    complete = train is not None or not steps or source.classes("train") is None
    drawers = frozenset(drawers_of(source, "train")) if steps else frozenset()
    return Seen(train if train and steps else frozenset(), val or frozenset(), complete, drawers)


def check_unseen(seen: Seen, source: TaskSource, split: str, choice: str) -> dict[str, Any]:
    """Checks that no class of the tasks of a split has been `seen` in training and validation. Neither training tasks
    nor plain samples are checked: they are of known classes on purpose. Returns what result.json says of it: if the
    choice is `report`, `seen_classes`; and `seen_drawers`, if it holds back drawers whose pictures the training has
    shown. Raises ConfigError if some classes have been seen, and the `choice` is `refuse`."""
    if split == "train" or source.unit(split) == "samples":
        return {}
    held = drawers_of(source, split) if split == "test" else {}
    drawers = sorted(name for key, name in held.items() if key in seen.drawers)
    shown: dict[str, Any] = {SEEN_DRAWERS: drawers} if drawers else {}
    identities = identities_of(source, split)
    if identities is None:
        has_classes = source.classes(split) is not None
        return {KEY: UNKNOWN_OVERLAP} if choice == REPORT and has_classes else {}
    shared = overlap(seen, split, identities)
    if choice == REPORT:
        return shown | {KEY: shared}
    if shared["trained_on"] or shared["validated_on"]:
        also = f", and {shared['validated_on']} more were validated on" if shared["validated_on"] else ""
        raise ConfigError(
            f"dataset: {shared['trained_on']} of its {shared['classes']} {split} classes were trained on before{also}, "
            f"as their names say; type the dataset and dataset.split of the training, or {KEY}={REPORT} to evaluate on "
            "them and count them in the result"
        )
    return shown


def warn_of_seen_drawers(counted: Mapping[str, Any]) -> None:
    """Says so if `check_unseen` has found any: with the same test, they show what unseen drawers cost."""
    if names := counted.get(SEEN_DRAWERS):
        log.warning(
            "dataset.held_drawers: the training has shown pictures by %s, so this test is none of unseen drawers; "
            "result.json names them as %s", first_few(names), SEEN_DRAWERS,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Parts:
    """What a run is made of: the components that its config describes."""

    job: Job
    settings: TrainerSettings
    source: TaskSource
    model: Model
    algorithm: Algorithm
    start: Params  # the meta-parameters before the first step
    start_notes: list[str]  # lines for the start of the log, such as what `init_from` could not give
    start_seen: Seen  # the classes that `start` has seen
    outer: OuterOptimizer
    plan: WorkPlan  # what the strategy distributes
    begin_work: Callable[[], Strategy]  # starts the strategy
    checkpointer: Checkpointer
    open_log: OpenLog
    updates: Callable[[Trainer], Updater] | None  # as in `Trainer`

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.plan.work.device

    @property
    def transductive(self) -> bool:
        """Whether the queries of a task see each other."""
        return self.model.transductive or self.algorithm.transductive

    @functools.cached_property
    def content(self) -> Content:
        """What the data are, which are read for it."""
        return content_of(self.source)

    def connect(self) -> Strategy:
        """Joins this rank to its world, on its own device. Raises MixedWorkersError if a worker differs from rank zero
        before the world has begun; and ConfigError if the GPUs of the ranks do not fit this strategy."""
        config = self.job.config
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if get_world_info().local_world_size <= torch.cuda.device_count():  # else other ranks have it, too
                warn_of_other_users(self.device)
        if self.job.workers > 1:
            compare_workers(self._likeness, mixed=config.launch.mixed)
        try:
            return self.begin_work()
        except UnlikeWorkerError as error:
            raise MixedWorkersError(
                f"{error}; bring all hosts to one version, config and data, or start the run with launch.mixed=true, "
                "which promises no bits"
            ) from error
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _likeness(self) -> dict[str, str]:
        """What every host must have alike, by its name."""
        config, device = self.job.config, self.device
        rest = {key: str(value) for key, value in leaves(to_container(config)) if not is_below(key, NOT_COMPARED)}
        return {
            "code": code_digest(tuple(config.plugins)),
            "torch": torch.__version__,
            "kernels": computed_by(device, type_of(config.precision)),
            "processor": _processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
            "data": self.content.digest,
            **rest,
        }

    def new_state(self) -> TrainState:
        """The state before the first step."""
        return TrainState.new(self.start, self.outer.start, self.settings.ema_decay)

    def restored(self, saved: Snapshot) -> TrainState:
        """The state in a checkpoint, with the optimiser and the average that the config describes."""
        return TrainState.restored(saved, self.outer.start, self.settings.ema_decay)

    def trainer(self, strategy: Strategy, state: TrainState) -> Trainer:
        """The trainer of this rank. It leaves nothing behind."""
        training = Units(self.training_chunk(), self.algorithm.trained_on)
        evaluation = Units(self.evaluation_chunk(), self.algorithm.evaluated_on)
        return Trainer(
            self.settings, state, strategy, self.outer, self.plan.reduce, training=training, evaluation=evaluation,
            pause_after=self.job.config.pause_after, updates=self.updates,
        )  # fmt: skip

    def first_tasks(self) -> Episode:
        """The first training task; of plain samples as many as the smallest micro-batch of the run has, but two at
        most. This call finds, verifies and decodes the data, and raises DataError if it is missing or damaged."""
        first = torch.tensor([0])
        if self.algorithm.trained_on == "samples":
            chunk, settings = self._chunk_of(1), self.settings
            counts = [settings.meta_batch_size]
            if self.algorithm.evaluated_on == "samples":
                counts += [settings.val_tasks, settings.test_tasks]
            first = torch.arange(min(2, *(count % chunk or chunk for count in counts)))
        return episodes_of(self.source, "train", first, self.algorithm.computes)

    def training_chunk(self) -> Chunk:
        """Tasks, or samples, that are computed together in training."""
        if isinstance(self.source, ComesInGroups):
            return _in_group(self.settings, self.source, self.device)
        (support, query) = self.first_tasks()
        tasks = self.algorithm.trained_on == "tasks"
        return self._chunk_of(support.x.shape[1] + query.x.shape[1] if tasks else 1)

    def _chunk_of(self, images: int) -> int:
        pairs = in_pairs(self.algorithm, self.model, self.start, self.device)
        return chunk_size(self.settings, self.model, images, self.device, self.job.workers, pairs=pairs)

    def evaluation_chunk(self) -> Chunk:
        """Tasks, or samples, that are computed together in validation and test."""
        settings = self.settings
        chunk = evaluated_at_once(settings, self.algorithm, self.model, self.source, self.device)
        if not isinstance(chunk, int) or self.device.type == "cpu" or isinstance(settings.task_chunk, int):
            return chunk
        if self.algorithm.evaluated_on == "samples" and self.model.transductive:
            return chunk  # samples are normalised together, so their number must not follow from that of the workers
        # On a GPU as many fit as there are; every worker gets a share. No task sees the others of its chunk.
        return min(chunk, math.ceil(min(settings.val_tasks, settings.test_tasks) / self.job.workers))


def assemble(job: Job) -> Parts:
    """Builds every component, which checks its values. Raises ConfigError for a value that a component refuses."""
    config = job.config
    if not computes_elsewhere(config):
        check_device(config.device, config.precision)
    import_plugins(config.plugins)
    source = build(config, "dataset")
    if OmegaConf.select(config, "model.inputs") == "tasks":  # becomes what the tasks have, also in Hydra's record
        for node in filter(None, (config, job.whole)):
            OmegaConf.update(node, "model.inputs", to_note(inputs_of_source(source)))

    def learner() -> tuple[Model, Algorithm]:
        loss = reporting(chosen_loss(build(config, "loss"), source), build(config, "metric"), source)
        model = of_present_classes(measured_by(build(config, "model"), loss), source)
        return model, build(config, "algorithm", model=model, inner=build(config, "inner"))

    model, algorithm = learner()
    notes: list[str] = []
    if (plain := plain_samples_of(source, algorithm)) is not None:
        source, words = plain
        notes = [words, *with_outputs(source, config, job.whole)]
        model, algorithm = learner()
    return put_together(job, source, model, algorithm, notes)


def plain_samples_of(source: TaskSource, algorithm: Algorithm) -> tuple[TaskSource, str] | None:
    """The plain samples of a source of tasks, if the algorithm is trained on such, and a line on them; else None.
    Raises ConfigError if the source has no use for a value, and DataError for data that is missing or damaged."""
    if algorithm.trained_on == "tasks" or source.unit("train") == "samples" or not isinstance(source, GivesSamples):
        return None
    if "samples" not in vars(source):  # it belongs to a source within, whose pictures this one may change
        return None
    try:
        samples, words = source.samples(algorithm.evaluated_on)
    except Invalid as error:
        raise ConfigError(error.text("dataset")) from error
    return samples, f"dataset: plain samples to train on: {words}"


def with_outputs(source: TaskSource, config: DictConfig, recorded: DictConfig | None) -> list[str]:
    """Sets the outputs of a model that follow the classes of a task to the number of classes that are trained on, in
    the config and in what Hydra records of it; returns a line on that."""
    classes, ways = source.classes("train"), OmegaConf.select(config, "dataset.ways")
    keys = [key for key in FOLLOWS_WAYS if ways not in (None, classes) and OmegaConf.select(config, key) == ways]
    for node in filter(None, (config, recorded)):
        for key in keys:
            OmegaConf.update(node, key, classes)
    return [f"{key}={classes}, an output for each class, in place of dataset.ways={ways}" for key in keys]


def chosen_loss(loss: object, source: TaskSource) -> Loss | None:
    """The loss of tasks: None is `loss=auto`, a function is one of the user's own. Raises ConfigError otherwise."""
    if loss is None or isinstance(loss, Loss):
        return loss
    if not callable(loss):
        raise ConfigError(f"loss={loss!r}: must be a function of outputs and targets, or a metalearn.types.Loss")
    return of_function(loss, classes=source.classes("train") is not None)


def put_together(job: Job, source: TaskSource, model: Model, algorithm: Algorithm, notes: Sequence[str] = ()) -> Parts:
    """These components with those that the config describes beside them; `notes` are lines for the start of the log.
    Raises ConfigError for a value that a component refuses, or an algorithm that does not compute the model's loss."""
    config, algorithm = job.config, with_fixed(with_present_classes(algorithm, source), model)
    if model.loss is not None and algorithm.computes is not model.loss:
        raise ConfigError(
            f"loss={model.loss.name}: this algorithm has a loss of its own; type loss=auto and metric=auto, or let it "
            "compute model.loss and say so: metalearn.types.Algorithm(…, computes=model.loss)"
        )
    outer = build(config, "optimizer")
    start, start_notes, start_seen = initial_params(config, algorithm, job.run_dir)
    work = make_work(config, algorithm, model, source, start, outer)
    reduce = build(config, "reducer")
    settings = build(config, "trainer")
    averages, by_norm = settings.ema_decay is not None, outer.by_norm
    plan = WorkPlan(work, job.workers, build(config, "partitioner"), reduce, averages=averages, by_norm=by_norm)
    check_sizes(settings, source)
    if job.workers > 1:
        code_digest(tuple(config.plugins))  # before the files may change: a fork computes by what is imported already
    ahead = config.trainer.draw_ahead
    updates: Callable[[Trainer], Updater] | None = None  # the host takes the steps
    if work.device.type in RESIDENT:  # steps stay on the GPU if the strategy allows it
        every, dtype = config.logger.get("every", 1), type_of(config.precision)
        pairs = partial(in_pairs, algorithm, model, start, work.device)
        on_device = DeviceWork(algorithm, source, work.device, dtype, tree_sum, every, plan.only_adds, pairs, ahead)
        updates = partial(steps_on_device, on_device)
    elif ahead not in (AUTO, 0):
        raise ConfigError(
            f"trainer.draw_ahead={ahead}: processes draw tasks ahead where workers compute on a GPU, and here they "
            "compute on the processor; type trainer.draw_ahead=auto"
        )
    return Parts(
        job, settings, source, model, algorithm, start, [*notes, *start_notes], start_seen, outer, plan,
        begin_work=build(config, "strategy", plan=plan), checkpointer=build(config, "checkpoint")(job.run_dir),
        open_log=build(config, "logger"), updates=updates,
    )  # fmt: skip


def initial_params(config: DictConfig, algorithm: Algorithm, run_dir: Path) -> tuple[Params, list[str], Seen]:
    """The meta-parameters before the first step: drawn from the seed, or those of `init_from` as far as they fit. Also
    a line for each thing that it lacks, and the classes that it has seen. A run that has checkpoints in its folder goes
    on from these, and needs `init_from` no more. Raises ConfigError if the model has nothing to learn, or `init_from`
    cannot be read, holds another model or is refused by `init_strict`."""
    dtype = type_of(config.precision)
    drawn = algorithm.init(torch.Generator().manual_seed(config.seed))
    if not drawn:
        raise ConfigError(
            "algorithm, model: nothing to learn, since this algorithm leaves out the model's head, and the model has "
            "no other parameters; type model.hidden=[64], or another model"
        )
    # By name everywhere, as the optimiser and the files have them: an algorithm may go by their order.
    params = {name: drawn[name].to(dtype) for name in sorted(drawn)}
    from_scratch = config.model.get("weights") is None  # a file of weights does not say what it was trained on
    if config.init_from is None:
        return params, [], Seen(complete=from_scratch)
    path = Path(str(config.init_from))
    if not is_folder(path) and has_checkpoints(run_dir):
        return params, [], Seen()
    check_checkpoint("init_from", config.init_from)
    saved = read_named("init_from", path)
    start, notes = start_params(path, saved.params, params, strict=config.init_strict)
    notes += trained_otherwise("init_from", saved.meta["config"], to_container(config), ("model",))
    seen = from_meta(saved.meta).joined(Seen(complete=from_scratch))
    return start, notes if seen.complete else [*notes, f"init_from={path}: {UNKNOWN}"], seen


def make_work(
    config: DictConfig, algorithm: Algorithm, model: Model, source: TaskSource, start: Params, outer: OuterOptimizer
) -> Work:
    """What this rank computes, on its device and in the precision of the config."""
    device, dtype = own_device(config.device), type_of(config.precision)
    pieces = None
    if model.stages and algorithm.evaluated_on == "samples":
        stages = [
            PipelineStage(stage.name, stage.params, sum(start[name].numel() for name in stage.params), stage.apply)
            for stage in map(single_stage, model.stages)
        ]
        pieces = Pieces(stages, **piece_functions(model, source, device, dtype), start=outer.start)
    functions = chunk_functions(algorithm, source, device, dtype, tree_sum, seed=config.seed)
    return Work(**functions._asdict(), device=device, plain=algorithm.trained_on == "samples", pieces=pieces)


def check_sizes(settings: TrainerSettings, source: TaskSource) -> None:
    """Raises ConfigError where validation or test asks for more than the source has, or for too few of several sets."""
    asked = {"val": settings.val_tasks, "test": settings.test_tasks}
    least = 2 * len(source.sets) if isinstance(source, OfSets) else 0
    for split, count in asked.items():
        if count < least:
            raise ConfigError(
                f"trainer.{split}_tasks={count}: must be at least {least}, two tasks of each of the {least // 2} sets; "
                f"type trainer.{split}_tasks={least} or more"
            )
    sizes = {split: source.size(split) for split in asked}
    wrong = {split: size for split, size in sizes.items() if size is not None and asked[split] > size}
    if wrong:
        split, size = next(iter(wrong.items()))
        advice = " ".join(f"trainer.{name}_tasks={most}" for name, most in wrong.items())
        raise ConfigError(
            f"trainer.{split}_tasks={asked[split]}: the split '{split}' has {size} {source.unit(split)}; type {advice} "
            "or fewer"
        )


def _in_group(settings: TrainerSettings, source: ComesInGroups, device: torch.device) -> Chunk:
    try:
        return chunk_in_group(settings, source, device)
    except Invalid as error:
        raise ConfigError(error.text("trainer")) from error


def in_pairs(algorithm: Algorithm, model: Model, start: Params, device: torch.device) -> bool:
    """Whether the gradients of tasks are added in pairs, so that chunks of 1, 2, 4, … tasks give the bits of one."""
    return algorithm.adds_in_pairs and model.network is not None and model.network.computes(start, device)


def evaluated_at_once(
    settings: TrainerSettings, algorithm: Algorithm, model: Model, source: TaskSource, device: torch.device
) -> Chunk:
    """As `Parts.evaluation_chunk`, as many as fit: `trainer.task_chunk` counts what is trained on, and evaluation may
    be on something else."""
    if isinstance(source, ComesInGroups):
        return _in_group(settings, source, device)
    if algorithm.evaluated_on == "samples":
        return chunk_size(settings, model, 1, device)
    if algorithm.trained_on == "tasks" and isinstance(settings.task_chunk, int):
        return settings.task_chunk
    (support, query) = source.episodes("test", torch.tensor([0]))
    return tasks_that_fit(model, support.y.shape[1] + query.y.shape[1], device)
