"""Judges a checkpoint on test tasks: on those of its own run, or on others.

    python scripts/evaluate.py checkpoint=outputs/maml_omniglot/seed0/checkpoints/best
    python scripts/evaluate.py checkpoint=… dataset=glyphs shots=5 tasks=1000    another dataset, other tasks
    python scripts/evaluate.py checkpoint=… model.transductive=false on=val      any key of the run; validation tasks
    python scripts/evaluate.py checkpoint=… workers=2                            the same numbers on any number of them
    torchrun --nproc_per_node=2 scripts/evaluate.py checkpoint=…

Short names: ways, shots, queries are those of the dataset, tasks is trainer.test_tasks (or val_tasks). Writes
result.json, config.yaml and test.csv (or val.csv), a line a task, into output=FOLDER, by default evaluations/… in the
run folder. Exit codes are those of train.py.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402 (the path comes first)
from metalearn.config import compose as configs  # noqa: E402
from metalearn.errors import ConfigError, DataError, RunError  # noqa: E402
from metalearn.runs.signals import INTERRUPTED  # noqa: E402

ALIASES = {
    "ways": "dataset.ways",
    "shots": "dataset.shots",
    "queries": "dataset.queries",
}
OWN = ("checkpoint", "output", "on")
PLACES = ("checkpoint", "output", "workers", "strategy", "launch", "partitioner", "device", "threads")
"""What has no part in the name of the output folder: keys that change no number."""


class Request(NamedTuple):
    """What is to be judged: the checkpoint, on the tasks of which split, what to change, and where to write."""

    checkpoint: Path
    on: str
    overrides: list[str]
    output: Path


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return train.OK if arguments else train.BAD_CONFIG
    try:
        return train.exit_code_of(lambda: judge(read(arguments), arguments))
    except KeyboardInterrupt:
        return INTERRUPTED


def read(arguments: list[str]) -> Request:
    """The command line.

    Raises:
        ConfigError: something is missing or not known.
    """
    from metalearn.config.saved import run_folder_of

    own = {key: value for key, _, value in (argument.partition("=") for argument in arguments) if key in OWN}
    if not own.get("checkpoint"):
        raise ConfigError("checkpoint: missing; type checkpoint=…/checkpoints/best")
    checkpoint = Path(own["checkpoint"])
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint={checkpoint}: must be the folder of a checkpoint, such as …/checkpoints/best")
    on = own.get("on", "test")
    if on not in ("test", "val"):
        raise ConfigError(f"on={on}: must be one of test, val; type on=test")
    overrides = [argument for argument in arguments if argument.partition("=")[0] not in OWN]
    named = [argument for argument in arguments if argument.partition("=")[0].partition(".")[0] not in PLACES]
    name = configs.folder_name(",".join([checkpoint.resolve().name, *sorted(named)]).replace("/", "-"))
    return Request(
        checkpoint, on, overrides, Path(own.get("output") or run_folder_of(checkpoint) / "evaluations" / name)
    )


def judge(request: Request, arguments: list[str]) -> int:
    """Judges as one of the workers, or starts them."""
    train.set_up_process(1)
    import torch

    from distributed.engine import launch
    from metalearn.config.saved import changed_config
    from metalearn.nn.precision import compute_with
    from metalearn.runs.checkpoint import fitted, read_named
    from metalearn.runs.logging import log_to_terminal
    from metalearn.training.compatibility import check_judging_fit

    snapshot = read_named("checkpoint", request.checkpoint)
    aliases = ALIASES | {"tasks": f"trainer.{request.on}_tasks"}
    config = changed_config(snapshot.meta["config"], request.overrides, aliases)
    job = train.to_job(config, request.output, "evaluate", arguments, "scripts/evaluate.py")
    torch.set_num_threads(config.threads)
    compute_with(config.precision)
    launch.die_with_parent()
    if config.launch.interface is not None:
        launch.use_interface(config.launch.interface)
    parts = train.assemble(job)
    params = fitted("checkpoint", request.checkpoint, snapshot.params, parts.start)
    try:
        check_judging_fit(parts.algorithm, parts.model, params, parts.source, request.on)
    except ConfigError as error:
        what, _, advice = str(error).partition("; type ")
        heads = "ways that fit it, or take a checkpoint of algorithm=protonet or r2d2, which need no head"
        advice = f"{heads}: the network of a checkpoint stays as it is" if "outputs" in what else advice
        raise ConfigError(f"{what}; type {advice}" if advice else what) from error
    if job.workers > 1 and not configs.started_as_rank():
        return train.start_ranks(job, [sys.executable, str(Path(__file__).resolve()), *arguments], max_restarts=0)
    if int(os.environ.get("RANK", 0)) > 0:
        return train.serve(parts, lambda strategy: values_of(parts, strategy, params, request.on))
    log_to_terminal()
    return lead(request, job, parts, snapshot, params)


def lead(request: Request, job: configs.Job, parts: Any, snapshot: Any, params: Any) -> int:
    """Rank zero: judges, writes and tells."""
    try:
        request.output.mkdir(parents=True, exist_ok=True)
        strategy = train.connect(parts)
        try:
            began = time.perf_counter()
            values = values_of(parts, strategy, params, request.on)
            tell(request, job, parts, snapshot, values, time.perf_counter() - began)
        except BaseException as error:
            strategy.close(failure=error)
            raise
        strategy.close()
        return train.OK
    except (ConfigError, DataError, RunError, OSError) as error:  # ConnectionError and TimeoutError among the last
        return train.complain(error, train.FAILED)


def values_of(parts: Any, strategy: Any, params: Any, split: str) -> Any:
    """The values of every task."""
    from metalearn.program.run import judging_chunk_of
    from metalearn.training.loop import tasks_in_chunks

    count = parts.settings.val_tasks if split == "val" else parts.settings.test_tasks
    return strategy.evaluate(params, split, tasks_in_chunks(0, count, judging_chunk_of(parts)))


def tell(request: Request, job: configs.Job, parts: Any, snapshot: Any, values: Any, seconds: float) -> None:
    """Writes and prints what was found."""
    from metalearn.runs.folder import judgement, write_result
    from metalearn.runs.metrics import summary, write_table

    figures = summary(values, parts.algorithm.judged_by) | {"transductive": parts.model.transductive}
    digest = hashlib.sha256((request.checkpoint / "params.safetensors").read_bytes()).hexdigest()
    write_table(request.output / f"{request.on}.csv", values)
    result = {
        "status": "completed", "checkpoint": str(request.checkpoint.resolve()), "params": digest,
        "step": snapshot.meta["step"], "seconds": round(seconds, 3), "workers": job.workers,
        "overrides": request.overrides, request.on: figures,
    }  # fmt: skip
    OmegaConf.save(job.config, request.output / "config.yaml")
    write_result(request.output, result)
    step, workers = snapshot.meta["step"], job.workers
    print(f"{request.on} {judgement(figures)}")
    print(f"step {step}, {seconds:.1f} s, {workers} workers; all in {request.output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
