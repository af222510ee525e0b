"""An adapted task in a folder: its learner in `learner`, as `Learner.save` writes it, and its support set.

The learner adapts to the support set again where it is loaded. So any algorithm will do, and no file holds code.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from metalearn.api.learner import AdaptedTask, Classification, Given, Regression
from metalearn.api.load import load
from metalearn.api.own import Network
from metalearn.config.saved import OWN
from metalearn.errors import ConfigError
from metalearn.nn.surroundings import with_gradients
from metalearn.saved import form
from metalearn.saved.form import Kind
from metalearn.types import Algorithm, Batch, Loss

LEARNER = "learner"
"""The folder of the learner within that of a task."""

TASK = Kind("task", 1, {"labels": list | None, "steps": int | None, "flat": bool}, Batch._fields)

_PLAIN = (str, int, float, bool)
"""Types of labels that JSON keeps."""


def fill(task: AdaptedTask, folder: Path) -> None:
    """Writes the task into an empty folder.

    Raises:
        ConfigError: a label is neither a text nor a number.
    """
    support, steps, labels, flat = task._given
    strange = [label for label in labels or () if type(label) not in _PLAIN or label != label]
    if strange:
        raise ConfigError(f"labels: {strange[0]!r} is neither a text nor a number, and no other can be saved")
    task._learner.save(folder / LEARNER)
    form.fill(folder, TASK, support._asdict(), {"labels": labels, "steps": steps, "flat": flat})


@with_gradients()
def load_task(
    path: str | os.PathLike[str],
    *,
    network: Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
    plugins: Sequence[str] = (),
    device: str = "cpu",
) -> Classification | Regression:
    """A task that its `save` has saved, of any origin: nothing in the folder is run. The learner adapts to it again.

    Args:
        path: the folder.
        network, algorithm, loss, plugins, device: as for `metalearn.load`.

    Raises:
        ValueError: there is no such folder, it is damaged or refused, or something that the learner needs is missing.
    """
    folder = Path(path)
    try:
        saved = form.load(folder, TASK)
    except ValueError as error:
        raise ConfigError(f"path={folder}: is no task that can be used: {error}; save it anew") from error
    learner = load(folder / LEARNER, network=network, algorithm=algorithm, loss=loss, plugins=plugins, device=device)
    labels = saved.meta["labels"]
    support = Batch(learner.on_device(saved.tensors["x"]), saved.tensors["y"].to(learner.device))
    return learner.adapted_to(
        Given(support, saved.meta["steps"], None if labels is None else tuple(labels), saved.meta["flat"])
    )


# Pickles: the files of a folder.


def pickled(task: AdaptedTask) -> tuple[Any, ...]:
    """What pickle keeps of a task: the files that `save` writes, and what of code its learner was admitted.

    Raises:
        ConfigError: a part of it is an object, which only its program has.
    """
    config = task._learner.taught.config
    for group in ("algorithm", "model", "loss"):
        if OWN in config[group]:
            raise ConfigError(
                f"{group}: is an object of this program ({str(config[group][OWN])[:40]}), and pickle keeps no code; "
                "save the task, and give the object to metalearn.load_task"
            )
    named_network = config.model.get("network")
    admitted = {
        "plugins": list(config.get("plugins") or ()),
        "network": None if named_network is None else named_network.get("_target_"),
        "device": task._learner.device.type,
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        fill(task, folder)
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return unpickled, (files, admitted)


def unpickled(files: Mapping[str, bytes], admitted: Mapping[str, Any]) -> Classification | Regression:
    """The task of a pickle."""
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / LEARNER).mkdir()
        for name, content in files.items():
            (Path(parent) / name).write_bytes(content)
        return load_task(parent, **admitted)
