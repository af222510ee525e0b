"""Reads a YAML file that another program, or somebody else, may have written."""

import stat
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_LARGEST = 2**22


def read_yaml(path: Path) -> Any:
    """The content of a YAML file as plain values.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: it is no regular file, has more than 4 MiB, or holds no YAML.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        raise ValueError(f"{path}: is no regular file of at most {_LARGEST:,} bytes")
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: holds no YAML ({type(error).__name__})") from error
