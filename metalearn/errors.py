"""The errors that end a run with a message and without a traceback."""


class ConfigError(ValueError):
    """Bad config or usage, found before anything was started: exit code 2."""


class DataError(ValueError):
    """Data that is missing, damaged or not what it should be: exit code 2 before the start, else 1."""


class RunError(RuntimeError):
    """A run that cannot go on: exit code 1."""
