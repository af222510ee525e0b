"""Any classifier of torchvision by its name, as pure functions."""

import difflib

from torch import nn

from metalearn.checks import one_of, true_or_false, whole_number
from metalearn.models.common.adapter import model_of
from metalearn.types import Model


def torchvision_classifier(*, name: str, ways: int, channels: int, image_size: int, transductive: bool = True) -> Model:
    """A network of `torchvision.models` with fresh weights. `metalearn.models.common.adapter` computes it.

    The auxiliary outputs of googlenet and inception_v3 are off. The second derivative of a swin_v2 is finite only if
    it does not pad its maps, that is if `image_size` is a multiple of 256.

    Args:
        name: its name in torchvision, for example `resnet18`.
        ways: outputs of the last layer.
        channels: channels of an image: 3, or 1, which is repeated three times.
        image_size: height and width of an image, in pixels.
        transductive: normalise a batch by its own statistics; if false, queries are normalised by
            the statistics of the support set.

    Raises:
        ValueError: a name that torchvision does not know, or images that the network cannot take.
    """
    for argument, value in (("ways", ways), ("channels", channels), ("image_size", image_size)):
        whole_number(argument, value, at_least=1)
    one_of("channels", channels, (3, 1))
    true_or_false("transductive", transductive)
    _check_name(name)
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}

    def make() -> nn.Module:
        from torchvision import models  # takes a second

        network: nn.Module = models.get_model(name, weights=None, num_classes=ways, **options)
        return network

    advice = "type dataset.image_size=224, which all of torchvision's classifiers take"
    return model_of(make, name=name, channels=3, image_size=image_size, transductive=transductive, advice=advice)


def _check_name(name: object) -> None:
    from torchvision import models  # takes a second

    known = models.list_models(module=models)
    if name not in known:
        nearest = difflib.get_close_matches(str(name), known, n=3, cutoff=0)
        raise ValueError(
            f"name={name!r}: torchvision has no such classifier; nearest are {', '.join(nearest)}; "
            f"type name={nearest[0]}"
        )
