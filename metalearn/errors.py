"""The errors that end a run with a message and without a traceback."""

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """Wrong config or usage, reported before anything is started: exit code 2."""


class NotAdmittedError(ConfigError):
    """A config names a factory that may be one of `package`, which the user has not admitted."""

    def __init__(self, reason: str, package: str) -> None:
        super().__init__(f"{reason}. If {package} is a package of your own, type 'plugins=[{package}]'")
        self.reason = reason
        self.package = package


class MixedWorkersError(ConfigError):
    """A worker that differs from rank zero, so that the bits would be others: exit code 2, also after the start."""


class DataError(ValueError):
    """Data that is missing, damaged or of a wrong kind: exit code 2 before the start, else 1."""


class RunError(RuntimeError):
    """A run that cannot continue: exit code 1."""


class DivergedError(RunError):
    """A run whose loss or gradient is not finite; `step` was not applied."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class ForeignPackageError(ImportError):
    """Another package has the name of one of ours: exit code 2."""


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint that asks for the nearest of the names; empty if none is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
