"""The command `metalearn`, also `python -m metalearn`: runs the sub-command that comes first. KEY=VALUE trains."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from metalearn.cli import run
from metalearn.cli.arguments import command_parser
from metalearn.errors import ConfigError, nearest, printable, typed_program

COMMANDS = {
    "train": "train a meta-learner as its config says: KEY=VALUE and GROUP=OPTION",
    "sweep": "search over configs: train --multirun, by default with hydra/sweeper=async",
    "evaluate": "evaluate a checkpoint on test tasks, its own or others",
    "adapt": "adapt what a run has learned to pictures of yours, and predict others",
    "fit": "learn a classifier of your own pictures from a folder a class, by a pretrained network",
    "predict": "ask a classifier of pictures",
    "demo": "try a classifier in the browser: a local page on which one drops pictures",
    "add": "add pictures or classes to a classifier",
    "remove": "remove classes from a classifier",
    "export": "publish what a run has learned, without code and paths",
    "compare": "draw the validations of several runs in one plot",
    "index": "list the runs below a folder on a page, with what was typed and what came out",
    "watch": "the same page in the browser, renewed while runs go on",
    "prior": "check what can be learned from the tasks of a prior",
    "doctor": "check every way to send between the workers of this world",
    "cache": "show and clean compiled kernels and decoded pictures",
    "data": "build a data set from the packages of public registries",
    "bench": "measure meta-gradients beside other libraries (in a checkout)",
    "reproduce": "train and evaluate rows of RESULTS.md again (in a checkout)",
    "gpu-check": "check a machine with a GPU (in a checkout)",
    "help": "explain a command, a config group, an option or a key",
}

FUNCTIONS = {
    "add": "fit.add", "remove": "fit.remove", "compare": "runs.compare", "index": "runs.index", "watch": "demo.watch",
    "prior": "data.prior",
}  # fmt: skip
"""Commands that share a file of metalearn/cli. Each other one but `sweep` and `help` is the `main` of its file."""

IN_CHECKOUT = {
    "bench": "benchmarks.bench",
    "gpu-check": "benchmarks.gpu_check.check",
    "reproduce": "benchmarks.reproduce",
}
"""Commands that need a checkout of the repository, since what they measure or compare with is not in the wheel."""

SWEEP_HELP = """usage: metalearn sweep [GROUP=OPTION …] [KEY=SPACE …] [hydra.sweeper.KEY=VALUE …]

Searches over configs. Each trial is a run; the same command goes on where it stopped.

  metalearn sweep experiment=maml_glyphs 'algorithm.inner_lr=tag(log,interval(0.1,4))' hydra.sweeper.n_trials=20
  metalearn sweep experiment=maml_glyphs algorithm.inner_steps=1,2,3 'optimizer.lr=choice(1e-3,1e-2)' \\
      hydra.sweeper.sampler=grid hydra.sweeper.n_jobs=2
  metalearn sweep sweep=maml_tpe                one that is ready, of conf/sweep.yaml

A SPACE is A,B or choice(A,B), range(LOW,HIGH) of whole numbers, or interval(LOW,HIGH); tag(log,…) goes by powers.
Keys below hydra.sweeper are n_trials, n_jobs (trials at once), sampler (tpe, islands, random, grid, cmaes, gp), pruner,
objective, study_name and others: docs/reference/sweepers.md. metalearn help train lists all other keys."""

ROOT = Path(__file__).resolve().parents[2]
_BAD_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Without one, runs that of this process, in `run`."""
    if argv is None:
        return run("metalearn.cli.main", sys.argv[1:])
    arguments = list(argv)
    first = arguments[0] if arguments else ""
    if not arguments or first in ("-h", "--help"):
        return _print(overview())
    if len(arguments) > 1 and first == "-sc" and arguments[1].startswith("query="):
        return complete(arguments)
    is_command = bool(first) and "=" not in first and not first.startswith(("-", "+", "~"))
    command = arguments.pop(0) if is_command else "train"
    if command not in COMMANDS:
        from metalearn.config.options import choice_hint

        hint = choice_hint(command) or nearest(command, COMMANDS)
        return _refuse(f"{command}: there is no such command{hint}; allowed: {', '.join(COMMANDS)}, or KEY=VALUE …")
    if command == "help":
        return explain(arguments)
    if command == "sweep" and {"-h", "--help"} & {*arguments}:
        return _print(SWEEP_HELP)
    if command == "sweep":
        command, arguments = "train", sweeping(arguments)
    module, _, function = FUNCTIONS.get(command, f"{command}.main").partition(".")
    module = IN_CHECKOUT.get(command, f"metalearn.cli.{module}")
    if command in IN_CHECKOUT:
        if not ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file():
            need = "needs a checkout of the repository, with its folders benchmarks and conf"
            return _refuse(f"metalearn {command}: {need}; clone it, and type pip install -e . there")
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
    code: int = getattr(importlib.import_module(module), function)(arguments)
    return code


def sweeping(arguments: Sequence[str]) -> list[str]:
    """The arguments of `train` for those of `sweep`."""
    names_sweeper = any(argument.lstrip("+").startswith("hydra/sweeper=") for argument in arguments)
    return ["--multirun", *([] if names_sweeper else ["hydra/sweeper=async"]), *arguments]


def complete(arguments: Sequence[str]) -> int:
    """What a shell asks for where one types TAB: the sub-commands, and what Hydra knows of keys and choices. The line
    as far as it is typed is in the variable COMP_LINE."""
    line = os.environ.get("COMP_LINE", "")
    program, *words = [*line.split(), *([""] if line.endswith(" ") else [])] or [""]
    if len(words) == 1:
        print("\n".join(name for name in COMMANDS if name.startswith(words[0])))
    elif words and words[0] in COMMANDS:
        command, *words = words
        if command not in ("train", "sweep", "evaluate"):
            return 0
        os.environ["COMP_LINE"] = " ".join([program, *(sweeping(words) if command == "sweep" else words)])
    code: int = importlib.import_module("metalearn.cli.train").main(arguments)
    return code


def overview() -> str:
    """What `metalearn --help` prints."""
    lines = [f"usage: {typed_program('COMMAND')} …, or {typed_program('KEY=VALUE')} … to train\n"]
    lines += [f"  {name:10} {summary}" for name, summary in COMMANDS.items()]
    lines += [
        f"\n{typed_program('COMMAND --help'):40} explains a command",
        f"{typed_program('help algorithm'):40} a config group: its options and their keys",
        f"{typed_program('help trainer.steps'):40} a key, or all keys that begin so",
        f"{typed_program('help train'):40} all groups, options and keys",
        typed_program("--version"),
    ]
    return "\n".join(lines)


def explain(words: Sequence[str]) -> int:
    """`metalearn help …`: a command's help, or what `conf/` says of a group, an option or a key."""
    parser = command_parser("help", "Explains a command, or what conf/ says of a group, an option or a key.")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="such as evaluate, algorithm=maml or trainer.steps")
    parser.add_argument("--config-dir", metavar="FOLDER", help="yamls of yours")
    options = parser.parse_args(words)
    topics: list[str] = options.topics
    if topics in ([], ["help"]):
        return _print(overview())
    if len(topics) == 1 and topics[0] in COMMANDS and topics[0] != "train":
        return main([topics[0], "--help"])
    from metalearn.config.options import help_text, search, topic_text

    try:
        search(options.config_dir)
        return _print("\n".join(help_text() if it == "train" else topic_text(it, COMMANDS) for it in topics))
    except ConfigError as error:
        return _refuse(str(error))


def _print(text: str) -> int:
    from metalearn.app.process import print_all

    return print_all(text)


def _refuse(message: str) -> int:
    print(printable(f"error: {message}"), file=sys.stderr)
    return _BAD_USAGE
