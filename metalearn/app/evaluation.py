"""The evaluation of a checkpoint on validation or test tasks, by one worker or several."""

import functools
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from metalearn.algorithms.common.wrappers import ensemble, joined
from metalearn.app.job import Job, Program, Role, role_of, to_job
from metalearn.app.parts import UNKNOWN, Parts, assemble, check_unseen, put_together, warn_of_seen_drawers
from metalearn.app.process import BAD_CONFIG, FAILED, print_all, report_error, set_up_torch
from metalearn.app.run import DATA, closing, serve
from metalearn.config.saved import changed_config, check_saved, trained_otherwise
from metalearn.config.values import differences, quoted, to_container
from metalearn.errors import ConfigError, DataError, MixedWorkersError, RunError
from metalearn.reporting.loggers import Window
from metalearn.reporting.logging import SILENT, RunProgress, log_to_terminal
from metalearn.runs.checkpoint import Snapshot, fitted, read_named
from metalearn.runs.folder import evaluation_report, write_result
from metalearn.runs.metrics import Seen, figures_of, from_meta, write_table
from metalearn.saved.form import TENSORS, digest_of
from metalearn.storage.files import creating, is_folder
from metalearn.training.chunks import check_evaluation
from metalearn.training.settings import tasks_in_chunks
from metalearn.types import Metrics, Params, Strategy

log = logging.getLogger("metalearn")


class Member(NamedTuple):
    """A checkpoint, or a published model, that is evaluated alone or in an ensemble. The command line has `key`=`path`;
    it is read in `folder`, which a link such as `best` named at that moment."""

    key: str
    path: Path
    folder: Path
    saved: Snapshot


class Request(NamedTuple):
    """What to evaluate: a checkpoint, others of an ensemble, the split, changes of the config, the output folder."""

    checkpoint: Path
    ensemble: list[Path]
    split: str
    overrides: list[str]
    output: Path


def evaluate_checkpoint(request: Request, program: Program, arguments: Sequence[str]) -> int:
    """Evaluates as one of the workers, or starts them; `program` with `arguments` is the command that asks for it.
    Returns the exit code. Raises ConfigError for a checkpoint, overrides or an output folder that cannot be used."""
    named = [("checkpoint", request.checkpoint), *(("ensemble", path) for path in request.ensemble)]
    members = [Member(key, path, path.resolve(), read_named(key, path.resolve())) for key, path in named]
    notes = []  # classes that are not known, and networks that differ
    configs = [check_saved(member.saved.meta["config"]) for member in members]
    for (key, path, _, saved), config_of_member in zip(members, configs, strict=True):
        if not from_meta(saved.meta).complete:
            notes.append(f"{key}={path}: {UNKNOWN}")
        notes += trained_otherwise(f"{key}={path}", config_of_member, configs[0], ("model", "algorithm"))
    if any(is_folder(request.output / name) for name in (".hydra", "checkpoints")):
        raise ConfigError(
            f"output={request.output}: is the folder of a run, and its result.json would be lost; type "
            f"output={request.output}/mine"
        )
    aliases = {name: f"dataset.{name}" for name in ("ways", "shots", "queries")}
    aliases["tasks"] = f"trainer.{request.split}_tasks"
    config = changed_config(members[0].saved.meta["config"], request.overrides, aliases)
    if any(override.startswith("algorithm=") for override in request.overrides):
        # Nothing is trained, and another algorithm may refuse the training tasks of this one.
        config.dataset.update({key: None for key in ("train_ways", "train_queries") if key in config.dataset})
    job = to_job(config, request.output, "evaluate", None, program, arguments)
    job = job._replace(arguments=pinned(arguments, members, request.output))
    set_up_torch(config)
    return evaluate_members(request, members, notes, job)


def evaluate_members(request: Request, members: Sequence[Member], notes: Sequence[str], job: Job) -> int:
    """Evaluates what is read already, as launcher or rank; returns the exit code. A rank that is a fork begins here."""
    parts = assemble(job)
    fitting = [params_for(parts, member) for member in members]
    params = fitting[0]
    if request.ensemble:
        parts = put_together(job, parts.source, parts.model, ensemble(parts.algorithm, len(members)))
        params = joined(fitting)
    check_tasks(parts, params, request.split)
    seen = functools.reduce(Seen.joined, (from_meta(member.saved.meta) for member in members))
    counted = check_unseen(seen, parts.source, request.split, job.config.seen_classes)
    role = role_of(job)
    if role is not Role.WORKER:
        with creating("output", request.output):
            request.output.mkdir(parents=True, exist_ok=True)
    match role:
        case Role.LAUNCHER:
            from metalearn.app import ranks

            return ranks.launch_ranks(partial(evaluate_members, request, members, notes), job, max_restarts=0)
        case Role.WORKER:
            return serve(parts, lambda strategy: values_of(parts, strategy, params, request.split))
        case Role.LEADER:
            log_to_terminal()
            for note in notes:
                log.warning("%s", note)
            warn_of_seen_drawers(counted)
            warn_of_other_data(parts, job.config, members[0], request.overrides)
            return lead(request, job, parts, members, params, counted)


def pinned(arguments: Sequence[str], members: Sequence[Member], output: Path) -> list[str]:
    """The command line of the ranks: all read these very checkpoints, and write to this folder."""
    first, *others = (member.folder for member in members)
    fixed = {"checkpoint": str(first), "output": str(output)}
    if others:
        fixed["ensemble"] = f"[{','.join(map(quoted, others))}]"
    free = [argument for argument in arguments if argument.partition("=")[0] not in fixed]
    return [*free, *(f"{key}={value}" for key, value in fixed.items())]


def warn_of_other_data(parts: Parts, config: DictConfig, member: Member, overrides: Sequence[str]) -> None:
    """Logs a line if the data are not those of the training, as where its folder is gone and `METALEARN_DATA` names
    another one, unless the overrides ask for others."""
    saved, present = member.saved.meta["config"], to_container(config)
    # What the digest depends on; some algorithms see the data as plain samples.
    changed = differences(saved["dataset"], present["dataset"]).keys() - {"root", "download"}
    changed |= differences(saved["algorithm"], present["algorithm"]).keys()
    typed = any(text.startswith("dataset.root=") for text in overrides)
    if not typed and not changed and parts.content.is_known_otherwise(member.saved.meta.get(DATA)):
        log.warning(
            "dataset.root=%s: holds other data than %s=%s was trained on; bring those back, or type this key to "
            "evaluate on these", present["dataset"].get("root"), member.key, member.path,
        )  # fmt: skip


def params_for(parts: Parts, member: Member) -> Params:
    """The parameters that the evaluation reads of a checkpoint. Raises ConfigError if it holds another model."""
    key, checkpoint, _, saved = member
    advice = "; leave out what changes the network, such as model=… or algorithm=…"
    head = parts.model.head
    if head is None or not parts.algorithm.evaluated_on_features:
        return fitted(key, checkpoint, saved.params, parts.start, advice)
    body = {name: value for name, value in parts.start.items() if name not in head.params}
    return fitted(key, checkpoint, {name: v for name, v in saved.params.items() if name in body}, body, advice)


def check_tasks(parts: Parts, params: Params, split: str) -> None:
    """Raises ConfigError where the checkpoint's network does not fit the tasks, with what can be typed here."""
    try:
        check_evaluation(parts.algorithm, parts.model, params, parts.source, split)
    except ConfigError as error:
        what, _, advice = str(error).partition("; type ")
        heads = "ways that fit it, or take a checkpoint of algorithm=protonet or r2d2, which need no head"
        advice = f"{heads}: the network of a checkpoint stays as it is" if "outputs" in what else advice
        raise ConfigError(f"{what}; type {advice}" if advice else what) from error


def lead(
    request: Request, job: Job, parts: Parts, members: Sequence[Member], params: Params, counted: dict[str, Any]
) -> int:
    """Rank zero: evaluates, writes and prints; returns the exit code. `counted` is what `check_unseen` has returned."""
    split, output = request.split, request.output
    try:
        evaluated = [  # what result.json says of each; the digest is that of its parameters
            {"checkpoint": str(one.folder), "params": digest_of(one.folder / TENSORS), "step": one.saved.meta["step"]}
            for one in members
        ]
        strategy = parts.connect()
        with closing(strategy):
            began = time.perf_counter()
            values = values_of(parts, strategy, params, split, shown=True)
            figures = figures_of(values, parts.source, split, parts.algorithm.evaluated_on, parts.model.reach)
            figures |= {"transductive": parts.transductive} | counted
            seconds = time.perf_counter() - began
            write_table(output / f"{split}.csv", values)
            others = {"ensemble": evaluated[1:]} if request.ensemble else {}
            result = {
                "status": "completed", **evaluated[0], **others, "seconds": round(seconds, 3), "workers": job.workers,
                "overrides": request.overrides, split: figures,
            }  # fmt: skip
            OmegaConf.save(job.config, output / "config.yaml")
            write_result(output, result)
        what = f"mean of {len(evaluated)} checkpoints" if request.ensemble else f"step {evaluated[0]['step']}"
        print(f"{split} {evaluation_report(figures)}")
        return print_all(f"{what}, {seconds:.1f} s, {job.workers} workers; all in {output}")
    except (ConfigError, DataError, RunError, OSError) as error:  # ConnectionError and TimeoutError are OSErrors
        return report_error(error, BAD_CONFIG if isinstance(error, MixedWorkersError) else FAILED)


def values_of(parts: Parts, strategy: Strategy, params: Params, split: str, *, shown: bool = False) -> Metrics:
    """The values of every task. If `shown`, one sees how far it is."""
    count = parts.settings.val_tasks if split == "val" else parts.settings.test_tasks
    progress = RunProgress(Window(0, 0, 0, 1, test_tasks=count)) if shown else SILENT
    done = progress.evaluating(split, count)
    try:
        return strategy.evaluate(params, split, tasks_in_chunks(0, count, parts.evaluation_chunk(), split), done)
    finally:
        progress.close()
