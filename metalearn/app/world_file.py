"""world.json: how other processes find the workers of a run under way, to join them or to ask one to leave.

It holds the run's secret token and its command line. So only the user of the run may read it, and nobody else's file is
believed. Nor is a file that came with a copied or unpacked folder: it has the inode of the folder that it was written
for, which is the same on every host. To read it takes no torch, so that a bad one is refused at once.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.app.job import Job
from metalearn.errors import RunError
from metalearn.storage.cache import foreign
from metalearn.storage.files import write_atomically

FILE = "world.json"


class World(NamedTuple):
    """Where the workers of a run are, as the fields of a `WorldAddress`; the arguments that they were started with, and
    the folder that they run in."""

    place: Mapping[str, Any]
    arguments: Sequence[str]
    folder: Path


_TEXTS = ("address", "interface", "token", "host", "folder")

_NUMBERS = {"port": 2**16 - 1, "workers": 2**20, "pid": 2**31 - 1, "born": 2**63 - 1, "inode": 2**64 - 1}
"""The largest value of each field that is a number."""


def _checked(content: Any) -> dict[str, Any]:
    """The fields of world.json.

    Raises:
        KeyError: one is missing.
        ValueError: one has a wrong type or value, or there are others.
    """
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}")
    known = {*_TEXTS, *_NUMBERS, "arguments"}
    if content.keys() - known:
        raise ValueError(f"{min(content.keys() - known)!r:.60} is no field")
    for name in _TEXTS:
        if not _is_text(content[name]):
            raise ValueError(f"{name}={content[name]!r:.60} is no text")
    for name, most in _NUMBERS.items():
        value = content[name]
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name}={value!r:.60} is no number from 0 to {most}")
    arguments = content["arguments"]
    if not isinstance(arguments, list) or not all(map(_is_text, arguments)):
        raise ValueError("arguments are no list of texts")
    return content


def _is_text(value: object) -> bool:
    """Whether this may be an argument of a program, or the value of an environment variable."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


@contextmanager
def published(job: Job) -> Iterator[None]:
    """On rank zero: world.json is there while this lasts, if workers may come and go."""
    if not comes_and_goes(job):
        yield
        return
    from distributed.cluster.joining import own_place  # imports torch, which a rank has imported already

    path = job.run_dir / FILE
    content = own_place()._asdict() | {"arguments": job.arguments, "folder": os.getcwd()}  # noqa: PTH109
    content["inode"] = job.run_dir.stat().st_ino
    write_atomically(path, json.dumps(content, indent=2) + "\n", mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def comes_and_goes(job: Job) -> bool:
    """Whether workers may join the run and leave it."""
    return job.workers > 1 and job.config.strategy.get("max_lost", 0) != 0


def read(run_dir: Path) -> World:
    """The world of a run under way.

    Raises:
        RunError: the run takes no workers, or the file is not this user's.
    """
    path = run_dir / FILE
    try:
        with path.open("rb") as file:
            reason = foreign(os.fstat(file.fileno()))
            if reason:
                raise RunError(f"{path}: {reason}, so its command line is not run")
            content = _checked(json.load(file))
        if content.pop("inode") != run_dir.stat().st_ino:
            raise RunError(f"{path}: was written for another folder, so its command line is not run")
        arguments, folder = content.pop("arguments"), Path(content.pop("folder"))
        return World(content, arguments, folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(
            f"{run_dir}: no run is under way here that workers can join or leave; type python train.py strategy=rpc "
            "workers=2, or more workers"
        ) from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except (KeyError, RecursionError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RunError(
            f"{path}: is no description of a run under way ({reason}); remove the file, and start the run anew"
        ) from error
