"""The errors that end a run with a message and without a traceback, and what writes messages to the terminal; checks of
arguments, whose messages name what is allowed.
"""

import difflib
import logging
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TextIO


class Invalid(ValueError):  # noqa: N818 (it reads as what it is where it is raised)
    """An argument with a value that is not allowed; its text is `KEY=VALUE: ALLOWED; ADVICE`. The `key` may be a part
    of an argument, such as `network._target_`. `allowed` is what the value must be, or why it cannot be this one. In
    the `advice`, what to type, `KEY` stands for the key, and `GROUP.` before another key for the group of both. A text
    stands in quotes if it is `quoted`."""

    def __init__(self, key: str, value: object, allowed: str, advice: str = "", quoted: bool = True) -> None:
        super().__init__(key, value, allowed, advice, quoted)  # so that it can be sent to another process
        self.key, self.value, self.allowed, self.advice, self.quoted = key, value, allowed, advice, quoted

    def __str__(self) -> str:
        return self.text()

    def text(self, group: str = "") -> str:
        """The message, with the config group of the key before every name of a key."""
        prefix = f"{group}." if group else ""
        key, shown = f"{prefix}{self.key}", repr(self.value) if self.quoted else str(self.value)
        advice = self.advice.replace("KEY", key).replace("GROUP.", prefix)
        return f"{key}={shown}: {self.allowed}" + (f"; {advice}" if advice else "")


def whole_number(name: str, value: object, *, at_least: int, at_most: int = 2**63 - 1) -> None:
    """Raises Invalid unless `value` is an int (bool does not count) in the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        above = "" if at_most == 2**63 - 1 else f" and at most {at_most}"
        over = isinstance(value, int) and value > at_most
        advice = f"type KEY={at_most} or less" if over else f"type KEY={max(at_least, 1)} or more"
        if isinstance(value, float) and value.is_integer() and at_least <= value <= at_most:
            advice = f"type KEY={int(value)}, since a number with a point or an e is a real number here"
        raise Invalid(name, value, f"must be a whole number of at least {at_least}{above}", advice)


def whole_numbers(name: str, values: Any, *, example: list[int], count: int | None = None) -> None:
    """Raises Invalid unless `values` is a list of ints of at least 1, and has the wanted length."""
    good = isinstance(values, list | tuple) and all(type(value) is int and value >= 1 for value in values)
    if not good or count not in (None, len(values)):
        many = "" if count is None else f"{count} "
        advice = f"type KEY=[{','.join(map(str, example))}]"
        raise Invalid(name, values, f"must be a list of {many}whole numbers of at least 1", advice)


def real_number(name: str, value: object, *, above: float | None = None, at_least: float | None = None) -> None:
    """Raises Invalid unless `value` is a finite number within the bound."""
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""
    good = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        finite = abs(value) <= sys.float_info.max  # an int may be too large for math.isfinite
        good = finite and (above is None or value > above) and (at_least is None or value >= at_least)
    if not good:
        raise Invalid(name, value, f"must be a finite number{bound}", "type KEY=0.001, for example")


def positive(**values: object) -> None:
    """Raises Invalid unless all of these are finite numbers above 0."""
    for name, value in values.items():
        real_number(name, value, above=0)


def not_negative(**values: object) -> None:
    """Raises Invalid unless all of these are whole numbers of at least 0."""
    for name, value in values.items():
        whole_number(name, value, at_least=0)


def counts(**values: object) -> None:
    """Raises Invalid unless all of these are whole numbers of at least 1."""
    for name, value in values.items():
        whole_number(name, value, at_least=1)


def fraction(name: str, value: object) -> None:
    """Raises Invalid unless `value` is a number in [0, 1)."""
    real_number(name, value, at_least=0)
    if isinstance(value, int | float) and value >= 1:
        raise Invalid(name, value, "must be below 1", "type KEY=0.9")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises Invalid unless `value` is among `allowed`."""
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise Invalid(name, value, f"must be one of {names}", f"type KEY={next(iter(allowed))}")


def only(name: str, value: object, right: object, owner: str) -> None:
    """Raises Invalid unless `value` is `right`, the only one that `owner` allows."""
    if value != right:
        raise Invalid(name, value, f"must be {right} for {owner}", f"type KEY={right}")


def true_or_false(name: str, value: object) -> None:
    """Raises Invalid unless `value` is a bool."""
    if not isinstance(value, bool):
        raise Invalid(name, value, "must be true or false", "type KEY=true")


def switches(**values: object) -> None:
    """Raises Invalid unless all of these are bools."""
    for name, value in values.items():
        true_or_false(name, value)


def enough_classes(name: str, ways: int, split: str, classes: int) -> None:
    """Raises Invalid when an episode asks for more classes than its split has."""
    if ways > classes:
        raise Invalid(name, ways, f"the split '{split}' has {classes} classes", f"type KEY={classes} or fewer")


def first_line(error: BaseException) -> str:
    """The first line of a message; its type if there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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
