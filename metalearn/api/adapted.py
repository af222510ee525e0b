"""An adapted task in a folder: its learner in `learner`, as `Learner.save` writes it, and its support set.

The learner adapts to the support set again where it is loaded. So any algorithm will do, and no file holds code; the
folder may be of any origin.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from metalearn.api.learner import MOST_WAYS, AdaptedTask, Classification, Given, Learner, Regression
from metalearn.api.load import load_as
from metalearn.api.own import Network
from metalearn.checks import first_line, true_or_false, whole_number
from metalearn.config.saved import DESCRIPTION as OF_LEARNER
from metalearn.config.saved import OWN
from metalearn.errors import ConfigError
from metalearn.nn.surroundings import with_gradients
from metalearn.saved.form import digest_of
from metalearn.storage.files import read_object, whole_folder
from metalearn.types import Algorithm, Batch, Loss

LEARNER, DESCRIPTION, TENSORS = "learner", "task.json", "task.safetensors"

FORMAT = "metalearn-task-1"

MOST_STEPS = 10**6
"""A folder of any origin must not keep a machine busy for ever."""

_PLAIN = (str, int, float, bool)
"""Types of labels that JSON keeps."""


def save(task: AdaptedTask, key: str, folder: Path) -> None:
    """Writes the folder that `key` names, whole or not at all.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or a label is neither a text nor a number.
    """
    support, steps, labels, flat = task._given
    strange = [label for label in labels or () if type(label) not in _PLAIN or label != label]
    if strange:
        raise ConfigError(f"labels: {strange[0]!r} is neither a text nor a number, and no other can be saved")
    with whole_folder(key, folder) as temporary:
        task._learner.save(temporary / LEARNER)
        save_file({name: value.cpu().contiguous() for name, value in support._asdict().items()}, temporary / TENSORS)
        content = {
            "format": FORMAT, "labels": labels, "steps": steps, "flat": flat,
            "support": digest_of(temporary / TENSORS), "learner": digest_of(temporary / LEARNER / OF_LEARNER),
        }  # fmt: skip
        (temporary / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path={path!r}: must be the path of a folder that task.save has written")
    folder = Path(path)
    for name in (DESCRIPTION, TENSORS, LEARNER):
        # A folder from elsewhere must not lead to other files of this machine.
        if (folder / name).is_symlink():
            raise ConfigError(f"path={path}: {name} is a link; copy what it leads to")
    if not (folder / DESCRIPTION).is_file():
        raise ConfigError(f"path={path}: holds no {DESCRIPTION}; give a folder that task.save has written")
    with _refusing(folder):
        content = _description(folder)
    learner = load_as(
        "path", folder / LEARNER, network=network, algorithm=algorithm, loss=loss, plugins=plugins, device=device
    )
    with _refusing(folder):
        return learner.adapted_to(_given(folder, content, learner))


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Makes whatever a folder of any origin raises a ConfigError of one line."""
    try:
        yield
    except Exception as error:  # safetensors raises many types
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"path={folder}: is no task that can be used: {reason}; save it anew") from error


def _description(folder: Path) -> dict[str, Any]:
    """The content of task.json, as far as it can be checked without the learner."""
    content = read_object(folder / DESCRIPTION)
    if content["format"] != FORMAT:
        raise ValueError(f"{DESCRIPTION}: format={str(content['format'])[:40]!r} is not {FORMAT!r}")
    for name, file in (("support", folder / TENSORS), ("learner", folder / LEARNER / OF_LEARNER)):
        if content[name] != digest_of(file):
            raise ValueError(f"{file.name} differs from what was saved (sha256 in {DESCRIPTION})")
    labels, steps = content["labels"], content["steps"]
    true_or_false("flat", content["flat"])
    if steps is not None:
        whole_number("steps", steps, at_least=0, at_most=MOST_STEPS)
    if labels is not None:
        if not isinstance(labels, list) or not all(type(label) in _PLAIN for label in labels):
            raise ValueError("labels must be a list of texts and numbers")
        whole_number("labels", len(labels), at_least=2, at_most=MOST_WAYS)
        if len(set(labels)) != len(labels):
            raise ValueError("labels must be there once each")
    return content


def _given(folder: Path, content: Mapping[str, Any], learner: Learner) -> Given:
    # Copies, as in `published.read`: kernels may round by the alignment of a mapped file.
    x, y = (value.clone() for value in map(load_file(folder / TENSORS).__getitem__, Batch._fields))
    if x.dim() < 3 or not x.shape[1] or x.dtype != learner.dtype or not bool(x.isfinite().all()):
        raise ValueError(f"x must be finite {learner.dtype} of shape [1, n, …]")
    if x.shape[0] != 1 or y.shape[:2] != x.shape[:2]:
        raise ValueError("x and y must be of one task, and have as many examples")
    form, labels = learner.form, content["labels"]
    if form is not None and x.shape[2:] != (form.channels, form.size, form.size):
        raise ValueError(f"x must be of pictures [{form.channels}, {form.size}, {form.size}]")
    if labels is not None:
        if y.dim() != 2 or y.dtype != torch.int64 or not bool(((y >= 0) & (y < len(labels))).all()):
            raise ValueError("y must be the places of the labels, int64 [1, n]")
    elif y.dim() != 3 or y.dtype != learner.dtype or not bool(y.isfinite().all()):
        raise ValueError(f"y must be finite {learner.dtype} of shape [1, n, outputs]")
    elif learner.trained_ways is not None and bool(((y < 0) | (y > 1)).any()):
        raise ValueError("y must be from 0 to 1 for each class")
    support = Batch(learner.on_device(x), y.to(learner.device))
    return Given(support, content["steps"], None if labels is None else tuple(labels), content["flat"])


# Pickles. Who unpickles runs what a pickle says in any case; the files in it are checked as those of a folder.


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
        folder = Path(parent) / "task"
        save(task, "path", folder)
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return unpickled, (files, admitted)


def unpickled(files: Mapping[str, bytes], admitted: Mapping[str, Any]) -> Classification | Regression:
    """The task of a pickle."""
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / LEARNER).mkdir()
        for name, content in files.items():
            (Path(parent) / name).write_bytes(content)
        return load_task(parent, **admitted)
