"""Any classifier of torchvision by its name, as pure functions."""

import difflib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from metalearn.errors import Invalid, counts, one_of, switches
from metalearn.models.common.adapter import floats_of, model_of
from metalearn.models.common.pretrained import HEADS, cut, cut_head, frozen_model, pretrained
from metalearn.nn.surroundings import of_reals
from metalearn.types import Model

LAST = "last"  # stands for weights of which the last layers alone learn
_ADVICE = "type dataset.image_size=224, which all of torchvision's classifiers take"


def torchvision_classifier(
    *, name: str, ways: int, channels: int, image_size: int, weights: str | None = None, frozen: bool | str = False,
    input_size: int | None = None, transductive: bool = True, dropout: bool = False,
) -> Model:  # fmt: skip
    """A network of `torchvision.models`. With fresh weights, or with pretrained ones that go on learning,
    `metalearn.models.common.adapter` computes it; with frozen ones, `metalearn.models.common.pretrained`. Raises
    ValueError for a name that torchvision does not know, images that the network cannot take, or weights that cannot be
    read or are not those of the network.

    With `weights`, `name` is one of `HEADS`, pictures are scaled and normalised as the weights ask, and the head is
    fresh. With `frozen=last` the head and the last layers learn, which have a quarter of the weights or more; batch
    norm then keeps the statistics that came with the weights, and `transductive` has no effect.

    The auxiliary outputs of googlenet and inception_v3 are off. The second derivative of a swin_v2 is finite only if
    it does not pad its maps, that is if `image_size` is a multiple of 256.
    """
    from torchvision import models  # takes a second

    counts(ways=ways, channels=channels, image_size=image_size)
    one_of("channels", channels, (3, 1))
    switches(transductive=transductive, dropout=dropout)
    if not isinstance(frozen, bool) and frozen != LAST:
        raise Invalid("frozen", frozen, f"must be true, false or {LAST}", f"type KEY={LAST}")
    names = models.list_models(module=models)
    if name not in names:
        nearest = difflib.get_close_matches(str(name), names, n=3, cutoff=0)
        reason = f"torchvision has no such classifier; nearest are {', '.join(nearest)}"
        raise Invalid("name", name, reason, f"type KEY={nearest[0]}")
    shape = (3, image_size, image_size)
    learning = partial(
        model_of, name=name, inputs=of_reals(shape), transductive=transductive, advice=_ADVICE, dropout=dropout
    )
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    network: Callable[[], nn.Module] = partial(models.get_model, name, weights=None, num_classes=ways, **options)
    if weights is None:
        if frozen or input_size is not None:
            argument, typed = ("frozen", str(frozen).lower()) if frozen else ("input_size", str(input_size))
            advice = "type GROUP.weights=/path/to/file as well"
            raise Invalid(argument, typed, "is for pretrained weights", advice, quoted=False)
        return learning(network)
    one_of("name", name, HEADS)
    if input_size is not None:
        counts(input_size=input_size)
    if frozen and dropout:
        raise Invalid("dropout", "true", "has no effect on frozen weights", "type KEY=false", quoted=False)
    state, prepare, note = pretrained(name, weights, input_size)

    def make() -> nn.Module:
        """The network with these weights, a fresh head, and pictures prepared before its first layer."""
        made = network()
        made.load_state_dict(state, strict=False)
        made.register_forward_pre_hook(lambda _, images: (prepare(images[0]),))
        return made

    if not frozen:
        model = learning(make)
        return model._replace(note="; ".join(part for part in (note, model.note) if part))
    body, last = network(), None
    body.load_state_dict(state, strict=False)
    width = cut_head(body, name)
    floats = floats_of(make(), name=name, shape=shape, advice=_ADVICE)
    if frozen == LAST:
        size = prepare(torch.zeros(1, *shape)).shape[-1]
        try:
            body, last = cut(body.eval(), (3, size, size))
        except ValueError as error:
            raise Invalid("frozen", LAST, f"{name} cannot be cut ({error})", "type KEY=true") from error
    model = frozen_model(body, prepare=prepare, ways=ways, width=width, activations=floats, last=last)
    return model._replace(note=note)
