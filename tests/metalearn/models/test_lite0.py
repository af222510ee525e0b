"""EfficientNet-Lite0 as a frozen network: its features are those of the classifiers, by another path of code."""

import numpy as np
import torch

from metalearn.classifier.backbones import backbone_of
from metalearn.models.lite0 import lite0


def test_features_are_those_of_the_backbone() -> None:
    model = lite0(ways=5, channels=3, image_size=224)
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), "uint8"))
    assert model.features is not None
    params = {name: value.unsqueeze(0) for name, value in model.init(torch.Generator().manual_seed(0)).items()}
    x = pictures.permute(0, 3, 1, 2).float().unsqueeze(0) / 255
    found = model.features(params, x)
    assert sum(value.numel() for value in params.values()) == 1280 + 5 * 1280 + 5  # factors, and a head
    torch.testing.assert_close(found[0], backbone_of().features(pictures), atol=1e-4, rtol=1e-3)
    other = model.features(params | {"features.scale": params["features.scale"] * 2}, x)
    torch.testing.assert_close(other, 2 * found)


def test_grey_pictures_are_repeated_and_enlarged() -> None:
    model = lite0(ways=5, channels=1, image_size=28, input_size=64)
    params = {name: value.unsqueeze(0) for name, value in model.init(torch.Generator().manual_seed(0)).items()}
    x = torch.rand(1, 3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert model.features is not None
    grey, colours = (model.features(params, pictures) for pictures in (x, x.expand(-1, -1, 3, -1, -1)))
    assert torch.equal(grey, colours) and grey.shape == (1, 3, 1280)
