"""Parts that are objects of the user's program: how a config notes them, and what stands for them elsewhere."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from metalearn.config.build import option_of
from metalearn.config.options import Named
from metalearn.config.saved import OWN
from metalearn.errors import ConfigError
from metalearn.models.common.adapter import model_of
from metalearn.models.common.pretrained import LICENCE, NAMED, header_of, meant_as, read_state
from metalearn.models.module import from_note, to_note
from metalearn.nn.surroundings import Inputs, of_reals
from metalearn.nn.surroundings import shape_of as inputs_shape
from metalearn.runs.checkpoint import is_path
from metalearn.tasks.common.episodes import SPLITS
from metalearn.training.chunks import episodes_of, inputs_of_source
from metalearn.types import Algorithm, Episode, Loss, Model, TaskSource, Unit

Learns = str | Named | Algorithm | Callable[..., Algorithm]
Network = str | Named | Model | nn.Module | Callable[[], nn.Module]
Tasks = str | Named | TaskSource


def name_of(part: object) -> str:
    """The name of an object: its function's, or that of its class."""
    return str(getattr(part, "__name__", type(part).__name__))


def carried_weights(config: Mapping[str, Any]) -> bytes | None:
    """The file of pretrained weights that goes with what has been learned, if they came from a file."""
    model = config["model"]
    path = model.get("weights")
    ours = OWN not in model and option_of("model", model["_target_"]) is not None
    if not ours or not is_path(path):
        return None
    state = {name: value.contiguous() for name, value in read_state(path)[0].items()}
    return save(state, {NAMED: meant_as(path), LICENCE: header_of(path).get(LICENCE, "")})


def shape_of(source: TaskSource, loss: Loss | None) -> tuple[int, ...]:
    """The shape of one input of tasks whose targets the loss measures."""
    return tuple(episodes_of(source, "train", torch.tensor([0]), loss).query.x.shape[2:])


def note_of_inputs(source: TaskSource) -> dict[str, Any]:
    """The inputs of a source in a config, if they are not one tensor of real numbers."""
    inputs = inputs_of_source(source)
    return {} if inputs == of_reals(inputs_shape(inputs)) else {"inputs": to_note(inputs)}


def inputs_in(note: Mapping[str, Any]) -> Inputs:
    """The inputs in the note of a source or network. Raises ValueError if they are none."""
    return from_note(note["inputs"] if "inputs" in note else [["", note["shape"], "real"]])


def note_of_tasks(source: TaskSource, loss: Loss | None) -> dict[str, Any]:
    """A source in a config: its classes and shape, and the keys of a dataset that models read."""
    shape, classes = shape_of(source, loss), {split: source.classes(split) for split in SPLITS}
    facts = {} if classes["train"] is None else {"ways": classes["train"]}
    sizes = {"channels": shape[0], "image_size": shape[1]} if len(shape) == 3 else {}
    return facts | sizes | {OWN: name_of(source), "shape": list(shape), "classes": classes} | note_of_inputs(source)


def without_file(config: dict[str, Any], source: TaskSource, loss: Loss | None) -> dict[str, Any]:
    """The config of a learner; in place of a table in a file of this machine it has the note of its tasks."""
    return config | {"dataset": note_of_tasks(source, loss)} if "file" in config["dataset"] else config


def note_of_network(network: Any, source: TaskSource, options: Mapping[str, Any], loss: Loss | None) -> dict[str, Any]:
    """A network in a config. Its options are `transductive`, `dropout`, `running_statistics` and `vectorize`."""
    kept = dict(options)
    if isinstance(network, Model):
        kept["transductive"] = network.transductive
    return {OWN: name_of(network), "shape": list(shape_of(source, loss))} | kept | note_of_inputs(source)


def model_from(network: Any, note: Mapping[str, Any]) -> Model:
    """The model of an object, which `note_of_network` describes. Raises ValueError if it is no network, or cannot take
    the inputs."""
    if isinstance(network, Model):
        return network
    name = name_of(network)

    def make() -> nn.Module:
        made = _copied(network, name) if isinstance(network, nn.Module) else network()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model: {name} gives a {type(made).__name__}, and must give an nn.Module")
        return made

    return model_of(
        make, name=name, inputs=inputs_in(note), transductive=note["transductive"], dropout=note["dropout"],
        running_statistics=note.get("running_statistics", False), vectorize=note.get("vectorize", "auto"),
        advice="give a network that takes the inputs of the tasks",
    )  # fmt: skip


def _copied(network: nn.Module, name: str) -> nn.Module:
    for path, layer in network.named_modules():
        for key, value in vars(layer).items():
            if isinstance(value, Tensor) and not value.is_leaf:  # torch cannot copy it
                raise ConfigError(
                    f"model: {name} keeps a computed tensor, {key} of its layer {path}; take "
                    "torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm, or give a "
                    "function that makes the network"
                )
    return copy.deepcopy(network)


def algorithm_from(algorithm: Any, model: Model) -> Algorithm:
    """The algorithm of an object, for a model. Raises ConfigError if it is none."""
    made = algorithm if isinstance(algorithm, Algorithm) else algorithm(model=model)
    if not isinstance(made, Algorithm):
        raise ConfigError(f"algorithm: gives a {type(made).__name__}, and must give a metalearn.types.Algorithm")
    return made


def object_again(group: str, note: Mapping[str, Any], again: Any, argument: str) -> Any:
    """The object for a part that was saved as one, which only the caller can give. Raises ConfigError if there is
    none, or a name."""
    if again is None:
        raise ConfigError(
            f"its {group} is an object of the program that has saved it ({str(note[OWN])[:40]}), and no code is saved; "
            f"give it again: {argument}=…"
        )
    if not callable(again) and not isinstance(again, Model | Algorithm):
        raise ConfigError(f"{argument}={again}: was an object, and is found by no name; give it again, in Python")
    return again


class TasksElsewhere:
    """Stands for a source that was an object of the program that has saved a learner: it knows the numbers of classes,
    and has no tasks."""

    def __init__(self, note: Mapping[str, Any]) -> None:
        self._name, self._classes = note[OWN], dict(note["classes"])

    def classes(self, split: str) -> int | None:
        return self._classes.get(split)

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        raise ConfigError(
            f"tasks: they were an object of the program that has saved the learner ({self._name}); give tasks=…"
        )
