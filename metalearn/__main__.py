"""The command `metalearn`, also as `python -m metalearn`: trains, or runs the sub-command that comes first."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from metalearn.errors import ForeignPackageError

COMMANDS = {
    "train": "metalearn.cli.train",
    "evaluate": "metalearn.cli.evaluate",
    "adapt": "metalearn.cli.adapt",
    "export": "metalearn.cli.export",
    "shard": "metalearn.cli.shard",
    "join": "metalearn.cli.join",
    "leave": "metalearn.cli.leave",
    "compare": "metalearn.cli.compare",
    "doctor": "metalearn.cli.doctor",
    "cache": "metalearn.cli.cache",
    "bench": "metalearn.cli.bench",
    "reproduce": "metalearn.cli.reproduce",
    "gpu-check": "metalearn.cli.gpu_check",
}
"""Sub-commands, and the modules whose `main(argv)` runs them. Without one, `train` runs."""

_BAD_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of this process; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_command = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith(("-", "+", "~"))
    command = arguments.pop(0) if is_command else "train"
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return _refuse(f"{command}: there is no such command{hint}; allowed: {', '.join(COMMANDS)}, or KEY=VALUE …")
    try:
        module = importlib.import_module(COMMANDS[command])
    except ForeignPackageError as error:
        return _refuse(str(error))
    code: int = module.main(arguments)
    return code


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return _BAD_USAGE


if __name__ == "__main__":
    sys.exit(main())
