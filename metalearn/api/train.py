"""Training without a command line, a run folder and other processes: `metalearn.train`."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from metalearn.algorithms.common.losses import measured_by
from metalearn.algorithms.common.metrics import reporting
from metalearn.algorithms.common.wrappers import of_present_classes
from metalearn.api import objects
from metalearn.api.learner import Learner, Taught, check_tasks, learner_of
from metalearn.api.pictures import form_of
from metalearn.app.job import Job, installed
from metalearn.app.parts import (
    REFUSE,
    REPORT,
    Parts,
    check_device,
    check_unseen,
    chosen_loss,
    plain_samples_of,
    put_together,
    with_outputs,
)
from metalearn.app.run import check_finite, log_network, seen_by
from metalearn.config.build import build
from metalearn.config.check import check_top_level
from metalearn.config.options import Named, as_named, plain_config
from metalearn.config.saved import OWN
from metalearn.errors import ConfigError, one_of
from metalearn.models.common.adapter import Vectorize
from metalearn.nn.surroundings import computing_with, with_gradients
from metalearn.reporting.loggers import Window
from metalearn.reporting.logging import SILENT, bar_log
from metalearn.runs.checkpoint import Checkpointer, Snapshot
from metalearn.training.chunks import check_compatible
from metalearn.types import Algorithm, Loss, Metric, Model

log = logging.getLogger("metalearn")


def train(
    algorithm: objects.Learns, model: objects.Network, tasks: objects.Tasks, *, steps: int, inner: str | Named = "sgd",
    loss: str | Named | Loss | Callable[[Tensor, Tensor], Tensor] = "auto",
    metric: str | Named | Metric | Callable[[Tensor, Tensor], Tensor] = "auto", optimizer: str | Named = "adam",
    seed: int = 0, device: str = "auto", precision: str = "float32", transductive: bool = True, dropout: bool = True,
    running_statistics: bool = False, vectorize: Vectorize = "auto", progress: bool = True, seen_classes: str = REFUSE,
    **trainer: Any,
) -> Learner:  # fmt: skip
    """Trains in this process, with the loop of train.py. Nothing is written.

    With the same settings, and if torch computes with as many threads as `threads` says there, the parameters have the
    bits of train.py's `checkpoints/best`. A part that is a name is that option of `conf/`; `metalearn.named` gives it
    settings.

    Args:
        algorithm: a name; a function that takes `model` and gives an `Algorithm`; or an `Algorithm`.
        model: a name; a `Model`; an `nn.Module`, which begins with its own weights; or a class or function that gives
            one, whose weights are then drawn from `seed`. A module takes the inputs [n, …] of the tasks, those of a
            dictionary as keywords, and gives [n, classes], or [n, outputs] for real numbers.
        tasks: a name, or an object of your own (`metalearn.types.TaskSource`).
        steps: meta-steps.
        inner: a name: the optimiser of the inner steps.
        loss: a name; or a function from the outputs [n, d] and the targets ([n] classes, or [n, d]) of one task to one
            number, such as any loss of torch; or a `metalearn.types.Loss`.
        metric: a name; or a function as `loss`, whose value is reported as `score`, more is better; or a
            `metalearn.types.Metric`. It is no part of what `Learner.save` saves.
        optimizer: a name: the optimiser of the meta-parameters.
        seed: of the parameters, and of the training tasks of a name.
        device, precision: as the keys of `conf/config.yaml`.
        transductive: of a module with batch norm: normalise a batch by its own statistics, not by the support set's.
        dropout: of a module: dropout, and what else its training mode changes, is on in training.
        running_statistics: of a module: batch norms use the running statistics that it came with, as constants.
        vectorize: of a module: true, false or `auto`: whether the tasks of a chunk are computed at once, by torch.vmap.
        progress: show how far it is where stderr is a terminal, or in a notebook.
        seen_classes: `refuse`, or `report`, which allows that validation tasks are of training classes.
        trainer: other keys of `conf/trainer/default.yaml`, such as `meta_batch_size`.

    Raises:
        ValueError: a name, key or value that is not allowed, parts that do not fit together, or validation classes
            that are among the training classes.
        RunError: a loss, a gradient or the best validation is not finite.
    """
    keys = {"seed": seed, "device": device, "precision": precision, "trainer": {"steps": steps, **trainer}}
    arguments: dict[str, Any] = {"algorithm": algorithm, "model": model, "dataset": tasks, "inner": inner, "loss": loss}
    arguments |= {"optimizer": optimizer, "metric": metric}
    one_of("seen_classes", seen_classes, (REFUSE, REPORT))
    with with_gradients(), computing_with(precision):
        try:
            options = {
                "transductive": transductive, "dropout": dropout, "running_statistics": running_statistics,
                "vectorize": vectorize,
            }  # fmt: skip
            parts = _assemble(arguments, keys, options)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{reason}; give that key a value by metalearn.named(NAME, KEY=VALUE)") from error
        check_compatible(parts.algorithm, parts.model, parts.start, parts.source, parts.first_tasks())
        config, seen = parts.job.config, seen_by(parts, None)
        check_unseen(seen, parts.source, "val", seen_classes)
        log_network(parts.model)
        best, validation = _trained(parts, progress)
        check_finite(config, "val", validation, parts.settings.steps)
        # The sizes of a source of the user's own say nothing of how a photograph shall be shown.
        named = isinstance(tasks, str | Named)
        return learner_of(
            as_named(algorithm).name if isinstance(algorithm, str | Named) else objects.name_of(algorithm),
            {name: value.to(parts.device) for name, value in best.params.items()},
            Taught(config, parts.source, parts.model, parts.algorithm, seen),
            form=form_of(parts.source, config.dataset if named else {}),
            shape=objects.shape_of(parts.source, parts.algorithm.computes),
            validation=validation,
        )


def _trained(parts: Parts, progress: bool) -> tuple[Snapshot, dict[str, Any]]:
    """The checkpoint of the best validation, and its figures."""
    settings = parts.settings
    window = Window(
        0, 0, settings.steps, settings.meta_batch_size, parts.algorithm.trained_on,
        val_every=settings.val_every, val_tasks=settings.val_tasks,
    )  # fmt: skip
    in_memory = _BestInMemory()
    trainer = parts.trainer(parts.connect(), parts.new_state())
    trainer.checkpointer = in_memory
    trainer.log = bar_log(window) if progress else SILENT
    try:
        trainer.fit()
    finally:
        trainer.log.close()
    best = in_memory.best()
    assert best is not None
    return best, trainer.state.best or {}


class _BestInMemory(Checkpointer):
    """Keeps a copy of the best snapshot, without files."""

    _best: Snapshot | None = None

    def save(self, snapshot: Snapshot, best: bool) -> None:
        if best:
            params = {name: value.detach().clone() for name, value in snapshot.params.items()}
            self._best = snapshot._replace(params=params)

    def best(self) -> Snapshot | None:
        return self._best


# From the arguments to the parts


def _assemble(arguments: dict[str, Any], keys: dict[str, Any], options: Mapping[str, Any]) -> Parts:
    check_tasks(arguments["dataset"])
    for argument, (kind, words) in _KINDS.items():
        part = arguments[argument]
        if not (isinstance(part, str | Named) or (kind is not None and (callable(part) or isinstance(part, kind)))):
            raise ConfigError(f"{argument}={part!r}: must be a name of conf/, or {words}")
    described: dict[str, Named | dict[str, Any]] = {
        group: as_named(part) if isinstance(part, str | Named) else {} for group, part in arguments.items()
    }
    source = arguments["dataset"]
    loss, metric = (
        build(plain_config({group: note}, {}), group)
        if isinstance(note := described[group], Named)
        else arguments[group]
        for group in ("loss", "metric")
    )
    # An object is asked for its shapes, which the config of the model needs; a named source is built later.
    if not isinstance(described["dataset"], Named):
        loss = reporting(chosen_loss(loss, source), metric, source)
        described["dataset"] = objects.note_of_tasks(source, loss)
    for group in ("algorithm", "loss", "metric"):
        if not isinstance(described[group], Named):
            described[group] = {OWN: objects.name_of(arguments[group])}
    config = plain_config(described, keys)
    check_top_level(config)
    check_device(config.device, config.precision)
    if isinstance(source, str | Named):
        source = build(config, "dataset")
        loss = reporting(chosen_loss(loss, source), metric, source)

    def learner() -> tuple[Model, Algorithm]:
        model, algorithm = arguments["model"], arguments["algorithm"]
        if isinstance(described["model"], Named):
            model = build(config, "model")
        else:
            note = objects.note_of_network(model, source, options, loss)
            model, config.model = objects.model_from(model, note), note
        model = of_present_classes(measured_by(model, loss), source)
        if isinstance(described["algorithm"], Named):
            return model, build(config, "algorithm", model=model, inner=build(config, "inner"))
        return model, objects.algorithm_from(algorithm, model)

    model, algorithm = learner()
    if (plain := plain_samples_of(source, algorithm)) is not None:
        # The learner is made again: it has an output for each class of the samples, not of a task.
        source, words = plain
        log.info("%s", "; ".join([words, *with_outputs(source, config, None)]))
        model, algorithm = learner()
    job = Job(config, Path(), "library", None, installed(), [], workers=1)
    return put_together(job, source, model, algorithm)


_KINDS: dict[str, tuple[type | None, str]] = {
    "algorithm": (Algorithm, "a function of `model`, or a metalearn.types.Algorithm"),
    "model": (Model, "an nn.Module, a class of one, or a metalearn.types.Model"),
    "loss": (Loss, "a function of outputs and targets, or a metalearn.types.Loss"),
    "metric": (Metric, "a function of outputs and targets, or a metalearn.types.Metric"),
    "inner": (None, "metalearn.named(NAME, KEY=VALUE)"),
    "optimizer": (None, "metalearn.named(NAME, KEY=VALUE)"),
}
"""By argument: the class of values that are neither names nor functions; None: it must be a name; and what it may be,
in words."""
