"""Any network written as an `nn.Module`, by the name of its class."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from hydra.utils import get_object
from torch import nn

from metalearn.errors import Invalid, counts, one_of, switches
from metalearn.models.common.adapter import Vectorize, model_of
from metalearn.nn.surroundings import Inputs, Kind, Part, of_reals
from metalearn.types import Model


def module(
    *, network: dict[str, Any], channels: int, image_size: int | None, inputs: str | Sequence[Any] = "images",
    transductive: bool = True, dropout: bool = True, running_statistics: bool = False, vectorize: Vectorize = "auto",
) -> Model:  # fmt: skip
    """Your own network. `metalearn.models.common.adapter` explains how it is computed. Raises ValueError if there is
    nothing by that name, it does not take the arguments, it does not give a module, or the module cannot take the
    inputs.

    `network` has `_target_`, the class or function that gives the `nn.Module`, as `package.module.Name`, and its
    arguments. The module takes the inputs, and gives [n, ways] or [n, outputs]. `inputs` are `images`, or what the
    tasks have, as lists of a name, a shape and `real`, `whole` or `bool`. `vectorize`: see `model_of`.
    """
    if isinstance(inputs, str):
        if inputs != "images":
            raise Invalid("inputs", inputs, "must be images, or tasks (as the tasks have them)", "type KEY=tasks")
        if image_size is None:
            raise Invalid("image_size", None, "the tasks have no images", "type GROUP.inputs=tasks")
        counts(channels=channels, image_size=image_size)
        sample = of_reals((channels, image_size, image_size))
    else:
        sample = from_note(inputs)
    switches(transductive=transductive, running_statistics=running_statistics, dropout=dropout)
    one_of("vectorize", vectorize, (False, "auto", True))
    target = network.get("_target_") if isinstance(network, dict) else None
    if not isinstance(target, str):
        raise Invalid("network", network, "must name a class", "for example KEY._target_=my_package.Network")
    options = {name: value for name, value in network.items() if name != "_target_"}
    if options.get("num_classes", ...) is None:  # as of tasks of real numbers, in conf/model/module.yaml
        del options["num_classes"]
    try:
        factory = get_object(target)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        advice = "type the class as package.module.Name, and put its folder in PYTHONPATH"
        raise _invalid(target, f"is not found ({reason})", advice) from error

    def make() -> nn.Module:
        try:
            made = factory(**options)
        except TypeError as error:
            takes = ", ".join(inspect.signature(factory).parameters) or "none"
            advice = "type +model.network.NAME=VALUE, or ~model.network.NAME for one too many"
            raise _invalid(target, f"refuses its arguments ({error}); it takes {takes}", advice) from error
        if not isinstance(made, nn.Module):
            raise _invalid(target, f"gives a {type(made).__name__}, and must give an nn.Module")
        return made

    name = target.rpartition(".")[2]
    advice = "type model.channels=N for a network that takes N" if inputs == "images" else "give another network"
    return model_of(
        make, name=name, inputs=sample, transductive=transductive, advice=advice, dropout=dropout,
        running_statistics=running_statistics, vectorize=vectorize,
    )  # fmt: skip


def _invalid(target: str, allowed: str, advice: str = "") -> Invalid:
    return Invalid("network._target_", target, allowed, advice, quoted=False)


# How a config notes what a network takes for a sample


def to_note(inputs: Inputs) -> list[Any]:
    """As lists of names, shapes and kinds."""
    return [[part.name, list(part.shape), part.kind] for part in inputs]


def from_note(note: Any) -> Inputs:
    """The inverse of `to_note`; also of a note that was typed. Raises ValueError if it is something else."""
    try:
        inputs = tuple(Part(name, tuple(shape), kind) for name, shape, kind in note)
        names = {part.name for part in inputs}
    except (TypeError, ValueError):
        inputs, names = (), set()
    right = all(
        isinstance(part.name, str)
        and part.kind in get_args(Kind)
        and all(type(s) is int and s >= 1 for s in part.shape)
        for part in inputs
    )
    if not (right and names) or len(names) < len(inputs) or (len(names) > 1 and "" in names):
        example = "type KEY=[[ids,[16],whole],[mask,[16],bool]], for example"
        kinds = ", ".join(get_args(Kind))
        raise Invalid("inputs", note, f"must be lists of another name each, a shape, and one of {kinds}", example)
    return inputs


def noted_inputs(config: Mapping[str, Any]) -> Inputs | None:
    """The inputs that a config notes of its network or its tasks; None if they are one tensor of real numbers. Raises
    ValueError as `from_note`."""
    notes = [config[group].get("inputs") for group in ("model", "dataset")]  # of other models, a number or a word
    return next((from_note(note) for note in notes if isinstance(note, Sequence) and not isinstance(note, str)), None)
