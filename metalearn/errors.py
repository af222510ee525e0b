"""The errors that end a run with a message and without a traceback, and what writes messages to the terminal."""

import difflib
import logging
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO


def printable(text: str) -> str:
    """The text with its control characters written out: those of a file could change the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


class _PrintableError(Exception):
    """An error whose message may have parts of a file."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(_PrintableError, ValueError):
    """Wrong config or usage, reported before anything is started: exit code 2."""


class NotAdmittedError(ConfigError):
    """A config names a factory that may be one of `package`, which the user has not admitted."""

    def __init__(self, reason: str, package: str) -> None:
        super().__init__(f"{reason}. If {package} is a package of your own, type 'plugins=[{package}]'")
        self.reason = reason
        self.package = package


class MixedWorkersError(ConfigError):
    """A worker that differs from rank zero, so that the bits would be others: exit code 2, also after the start."""


class DataError(_PrintableError, ValueError):
    """Data that is missing, damaged or of a wrong kind: exit code 2 before the start, else 1."""


class RunError(_PrintableError, RuntimeError):
    """A run that cannot continue: exit code 1."""


class DiskError(RunError):
    """The disk is full or has failed, or the run folder is gone; the same command goes on when it is mended."""


class DivergedError(RunError):
    """A run whose loss or gradient is not finite; `step` was not applied."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class ForeignPackageError(ImportError):
    """Another package has the name of one of ours: exit code 2."""


def typed_program(command: str = "train") -> str:
    """What users type for a command, as they started this process: `metalearn train`, `python -m metalearn train` or
    `python train.py`."""
    by_script = Path(sys.argv[0]).name == "train.py" and command == "train"
    return as_typed("train.py" if by_script else f"-m metalearn {command}")


def as_typed(command: str) -> str:
    """`train.py …` or `-m metalearn …`, as torchrun takes them, in the way in which users type it without torchrun."""
    script = Path(sys.argv[0])
    installed = script.name != "train.py" and script.parts[-2:] != ("metalearn", "__main__.py")
    return command.removeprefix("-m ") if installed and command.startswith("-m ") else f"python {command}"


def install(extra: str) -> str:
    """What to type for the packages of an extra. The program is on no index: pip takes it from a checkout."""
    root = Path(__file__).resolve().parents[1]
    in_checkout = (root / "pyproject.toml").is_file()
    place = root if in_checkout else "/path/to/metalearn"
    return f"pip install {'-e ' * in_checkout}{shlex.quote(f'{place}[{extra}]')}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint that asks for the nearest of the names, in their own letters; empty if none is near."""
    by_letters = {one.lower(): one for one in names}
    close = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=0.75)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


# Log messages on the terminal


log = logging.getLogger("metalearn")


def log_to_stderr() -> None:
    """Sends the log messages of a command that trains nothing to stderr, from warnings on."""
    if not any(isinstance(handler, ToStderr) for handler in log.handlers):
        handler = ToStderr()
        handler.setLevel(logging.WARNING)  # a run in the same process sets that of the logger to DEBUG
        log.addHandler(handler)
    log.propagate = False


class PrintableFormatter(logging.Formatter):
    """Messages may have names and texts from files, whose control characters could change the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: a notebook, or a redirection, may have replaced it since an earlier call."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(PrintableFormatter())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        """Ignores a terminal, pipe or file that takes no more: a report of that could not be read there either."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
