"""Evaluates a checkpoint on the test tasks of its own run, or on others.

    metalearn evaluate checkpoint=outputs/maml_omniglot/seed0/checkpoints/best
    metalearn evaluate checkpoint=… dataset=glyphs shots=5 tasks=1000    another dataset, other tasks
    metalearn evaluate checkpoint=… model.transductive=false on=val      any key of the run; validation tasks
    metalearn evaluate checkpoint=… workers=2                            any number of workers: the same numbers
    metalearn evaluate checkpoint=…/seed0/checkpoints/best 'ensemble=[…/seed1/checkpoints/best]'
    metalearn evaluate checkpoint=… 'plugins=[my_parts]'                 a run with parts of a package of yours
    metalearn evaluate --config-dir=my_conf checkpoint=… dataset=mine    a dataset of your own
    torchrun --nproc_per_node=2 -m metalearn evaluate checkpoint=…

A checkpoint may be a model that metalearn export has published. With `ensemble`, each checkpoint is adapted by
itself, the predictions are averaged, and the first checkpoint's config counts. Short names: ways, shots and queries are
keys of the dataset; tasks is trainer.test_tasks (or val_tasks). The script writes result.json, config.yaml and test.csv
(or val.csv), with a line for each task, into output=FOLDER. Without it, they go to evaluations/… in the run folder, or
in the published model's folder. Exit codes are as for train.py.
"""

from collections.abc import Sequence
from pathlib import Path

from metalearn.app.job import Program, installed
from metalearn.app.process import end_with_starter, exit_code_of_process, set_up_process
from metalearn.cli.arguments import command_parser
from metalearn.config.compose import parsed
from metalearn.config.options import search
from metalearn.config.saved import check_checkpoint, run_folder_of
from metalearn.config.values import folder_name
from metalearn.errors import ConfigError

NO_OVERRIDES = ("checkpoint", "ensemble", "output", "on")  # what is typed as a key, and is none of the config
PLACES = ("checkpoint", "output", "workers", "strategy", "launch", "partitioner", "device", "threads", "plugins")
"""Keys that change no number. The name of the output folder leaves them out."""


def main(arguments: Sequence[str], program: Program | None = None) -> int:
    """Runs the command line of `program`, by default that of the installed package; returns the exit code."""
    end_with_starter()
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="checkpoint=FOLDER, and keys of the config")
    parser.add_argument("--config-dir", metavar="FOLDER", help="yamls of yours")
    options = parser.parse_args(arguments)
    search_in, started = options.config_dir, program or installed("evaluate")
    return exit_code_of_process(lambda: evaluate(options.keys, search_in, started, arguments))


def evaluate(words: Sequence[str], config_dir: str | None, program: Program, arguments: Sequence[str]) -> int:
    """Evaluates as these keys ask for; returns the exit code. Raises ConfigError if one is missing or wrong."""
    set_up_process(1)
    from metalearn.app.evaluation import Request, evaluate_checkpoint  # imports torch, after the line above

    typed = {key: value for key, _, value in (word.partition("=") for word in words) if key in NO_OVERRIDES}
    search(config_dir)
    if not typed.get("checkpoint"):
        raise ConfigError("checkpoint: missing; type checkpoint=…/checkpoints/best")
    check_checkpoint("checkpoint", typed["checkpoint"])
    checkpoint = Path(typed["checkpoint"])
    split = typed.get("on", "test")
    if split not in ("test", "val"):
        raise ConfigError(f"on={split}: must be one of test, val; type on=test")
    overrides = [word for word in words if word.partition("=")[0] not in NO_OVERRIDES]
    named = [word for word in words if word.partition("=")[0].partition(".")[0] not in PLACES]
    name = folder_name(",".join([checkpoint.resolve().name, *sorted(named)]))
    output = Path(typed["output"]) if typed.get("output") else run_folder_of(checkpoint) / "evaluations" / name
    others: list[Path] = []
    if "ensemble" in typed:
        (override,) = parsed([f"ensemble={typed['ensemble']}"])
        paths = override.value()
        if not isinstance(paths, list) or not paths:
            raise ConfigError(
                f"ensemble={typed['ensemble']}: must be a list of checkpoints; type 'ensemble=[…/checkpoints/best]'"
            )
        for path in paths:
            check_checkpoint("ensemble", path)
        others = list(map(Path, paths))
    return evaluate_checkpoint(Request(checkpoint, others, split, overrides, output), program, arguments)
