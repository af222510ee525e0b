"""Any network written as an `nn.Module`, by the name of its class."""

import inspect
from typing import Any

from hydra.utils import get_object
from torch import nn

from metalearn.checks import Invalid, true_or_false, whole_number
from metalearn.models.common.adapter import model_of
from metalearn.types import Model


def module(
    *, network: dict[str, Any], channels: int, image_size: int, transductive: bool = True, dropout: bool = True
) -> Model:
    """Your own network. `metalearn.models.common.adapter` explains how it is computed.

    Args:
        network: `_target_` names the class or function that gives the `nn.Module`, as `package.module.Name`; the other
            keys are its arguments. The module takes images [n, channels, h, w] and gives [n, ways].
        channels: channels of an image that the module takes; an image of one channel is repeated.
        image_size: height and width of an image, in pixels.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.
        dropout: dropout, and what else the training mode of the module changes, is on in training.

    Raises:
        ValueError: there is nothing by that name, it does not take the arguments, it does not give a module, or the
            module cannot take the images.
    """
    for argument, value in (("channels", channels), ("image_size", image_size)):
        whole_number(argument, value, at_least=1)
    true_or_false("transductive", transductive)
    true_or_false("dropout", dropout)
    target = network.get("_target_") if isinstance(network, dict) else None
    if not isinstance(target, str):
        raise Invalid("network", network, "must name a class", "for example KEY._target_=my_package.Network")
    options = {name: value for name, value in network.items() if name != "_target_"}
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
    shape = (channels, image_size, image_size)
    advice = "type model.channels=N for a network that takes N"
    return model_of(make, name=name, shape=shape, transductive=transductive, advice=advice, dropout=dropout)


def _invalid(target: str, allowed: str, advice: str = "") -> Invalid:
    return Invalid("network._target_", target, allowed, advice, quoted=False)
