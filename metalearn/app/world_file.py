"""world.json: how other processes find the workers of a run under way, to join them or to ask one to leave.

It holds the run's secret token, so only the user of the run may read it; and its command line. To read it takes no
torch, so that a run folder without one is refused at once.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.app.job import Job
from metalearn.errors import RunError
from metalearn.storage.files import write_atomically

FILE = "world.json"

PLACE = {"address", "port", "interface", "token", "workers", "host", "pid", "born"}
"""The fields of a `WorldAddress`."""


class World(NamedTuple):
    """Where the workers of a run are, as the fields of a `WorldAddress`; the arguments that they were started with, and
    the folder that they run in."""

    place: Mapping[str, Any]
    arguments: Sequence[str]
    folder: Path


@contextmanager
def published(job: Job) -> Iterator[None]:
    """On rank zero: world.json is there while this lasts, if workers may come and go."""
    if not comes_and_goes(job):
        yield
        return
    from distributed.cluster.joining import own_place  # imports torch, which a rank has imported already

    path = job.run_dir / FILE
    content = own_place()._asdict() | {"arguments": job.arguments, "folder": os.getcwd()}  # noqa: PTH109
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
        RunError: the run takes no workers.
    """
    try:
        content = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(
            f"{run_dir}: no run is under way here that workers can join or leave; type python train.py strategy=rpc "
            "workers=2, or more workers"
        ) from error
    except OSError as error:  # such as that of another user
        raise RunError(f"{run_dir / FILE}: cannot be read: {error.strerror}") from error
    return World({name: content[name] for name in PLACE}, content["arguments"], Path(content["folder"]))
