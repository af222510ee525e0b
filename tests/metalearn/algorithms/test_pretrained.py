"""Pretrained networks of torchvision: frozen ones against torchvision's own forward, and what learns from them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torchvision import models

from metalearn.algorithms.anil import anil
from metalearn.algorithms.maml import maml
from metalearn.algorithms.protonet import protonet
from metalearn.algorithms.r2d2 import r2d2
from metalearn.algorithms.scratch import scratch
from metalearn.models.common.pretrained import HEADS, SCALE, load_whole, pretrained
from metalearn.models.torchvision_classifier import torchvision_classifier
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Episode, Model

SIZE = 32


def network(name: str) -> Any:
    """A network as if it had been trained: its batch norms have statistics of their own."""
    torch.manual_seed(1)
    made = models.get_model(name, weights=None)
    for layer in made.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None  # the mean over all batches: here, one
    with torch.no_grad():
        made.train()(3 * torch.randn(32, 3, 1, 1) + torch.randn(32, 3, SIZE, SIZE))
    made.eval()
    return made


def file_of(made: Any, folder: Path, suffix: str = ".pth") -> str:
    path = folder / f"weights{suffix}"
    save_file(made.state_dict(), path) if suffix == ".safetensors" else torch.save(made.state_dict(), path)
    return str(path)


def frozen(name: str, weights: str, **keys: Any) -> Model:
    options = {"ways": 3, "channels": 3, "image_size": SIZE, "input_size": SIZE, "frozen": True} | keys
    return torchvision_classifier(name=name, weights=weights, **options)


def theirs(made: Any, name: str, pictures: Tensor) -> Tensor:
    """torchvision's own forward: the inputs of its last layer, for normalised pictures."""
    seen: list[Tensor] = []
    made.get_submodule(HEADS[name]).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    preset = models.get_model_weights(name).DEFAULT.transforms()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preset.mean, preset.std))
    with torch.no_grad():
        made((pictures - mean) / std)
    return seen[0]


@pytest.mark.parametrize(("name", "suffix"), [("resnet18", ".pth"), ("mobilenet_v3_small", ".safetensors")])
def test_frozen_features_are_those_of_torchvision(name: str, suffix: str, tmp_path: Path) -> None:
    made = network(name)
    model = frozen(name, file_of(made, tmp_path, suffix))
    params = model.init(torch.Generator().manual_seed(0))
    assert set(params) == {SCALE, "head.weight", "head.bias"} and not model.transductive
    x = torch.rand(2, 5, 3, SIZE, SIZE)
    assert model.features is not None
    ours = model.features(per_task(params, 2), x, torch.rand(2, 4, 3, SIZE, SIZE))
    torch.testing.assert_close(ours, theirs(made, name, x.flatten(0, 1)).unflatten(0, (2, 5)), rtol=1e-5, atol=1e-5)


def test_pictures_are_scaled_as_the_weights_ask(tmp_path: Path) -> None:
    made = network("resnet18")
    model = frozen("resnet18", file_of(made, tmp_path), input_size=None, channels=1)
    grey = torch.rand(1, 2, 1, SIZE, SIZE)
    large = torch.nn.functional.interpolate(
        grey[0], size=(224, 224), mode="bilinear", align_corners=False, antialias=True
    )
    assert model.features is not None
    ours = model.features(per_task(model.init(torch.Generator()), 1), grey)[0]
    torch.testing.assert_close(ours, theirs(made, "resnet18", large.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


LEARNERS: dict[str, Callable[[Model], Algorithm]] = {
    "protonet": lambda model: protonet(model=model),
    "r2d2": lambda model: r2d2(model=model, strength=1.0, scale=1.0),
    "anil": lambda model: anil(model=model, inner_lr=0.1, inner_steps=1, eval_steps=2),
    "a linear head": lambda model: scratch(model=model, inner_lr=0.01, eval_steps=30),
    "maml": lambda model: maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1),
}


def episode(colour: float) -> Episode:
    """Two tasks of three classes: noise, and a part `colour` of the class's own colour."""
    torch.manual_seed(2)
    y = torch.arange(3).repeat_interleave(2).expand(2, 6)
    colours = torch.eye(3)[y][..., None, None]
    noise = [torch.rand(2, 6, 3, SIZE, SIZE) for _ in range(2)]
    return Episode(*(Batch(colour * colours + (1 - colour) * part, y) for part in noise))


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return frozen("resnet18", file_of(network("resnet18"), tmp_path_factory.mktemp("weights")))


@pytest.mark.parametrize("learner", LEARNERS)
def test_learners_learn_from_frozen_features(learner: str, resnet: Model) -> None:
    algorithm = LEARNERS[learner](resnet)
    params = algorithm.init(torch.Generator().manual_seed(0))
    result = algorithm.meta_grad(params, episode(0), 1)
    assert result.grads.keys() == params.keys() and all(torch.isfinite(g).all() for g in result.grads.values())
    if learner != "a linear head":  # which meta-learns nothing
        assert result.grads[SCALE].abs().max() > 0
    if learner != "maml":  # whose rate is not made for this
        assert algorithm.evaluate(params, episode(0.8))["accuracy"][:, -1].min() > 0.8


def test_the_last_layers_alone_learn_and_each_task_has_its_own(tmp_path: Path) -> None:
    made = network("resnet18")
    model = frozen("resnet18", file_of(made, tmp_path), frozen="last")
    params, pretrained = model.init(torch.Generator().manual_seed(0)), dict(made.named_parameters())
    layers = {name for name in params if not name.startswith("head.")}
    # The last block has 42% of the weights, and its second convolution alone less than a quarter.
    assert layers == {name for name in pretrained if name.startswith("layer4.1.")}
    assert all(torch.equal(params[name], pretrained[name]) for name in layers)
    of_tasks = per_task(params, 2)
    of_tasks |= {name: of_tasks[name] * torch.tensor([1.0, 0.7]).view(2, *[1] * params[name].dim()) for name in layers}
    x = torch.rand(2, 5, 3, SIZE, SIZE)
    assert model.features is not None
    ours = model.features(of_tasks, x)
    for task in range(2):
        with torch.no_grad():
            for name in layers:
                pretrained[name].copy_(of_tasks[name][task])
        torch.testing.assert_close(ours[task], theirs(made, "resnet18", x[task]), rtol=1e-4, atol=1e-4)
    algorithm = LEARNERS["maml"](model)
    grads = algorithm.meta_grad(params, episode(0), 1).grads
    assert grads.keys() == params.keys() and all(
        grad.isfinite().all() and grad.abs().max() > 0 for grad in grads.values()
    )


def test_learned_weights_start_from_the_file(tmp_path: Path) -> None:
    made = network("resnet18")
    model = torchvision_classifier(
        name="resnet18", ways=3, channels=3, image_size=SIZE, weights=file_of(made, tmp_path), input_size=SIZE
    )
    params = model.init(torch.Generator().manual_seed(0))
    assert params["fc.weight"].shape == (3, 512)
    pretrained = dict(made.named_parameters())
    assert all(torch.equal(value, pretrained[name]) for name, value in params.items() if not name.startswith("fc."))
    x = torch.rand(1, 4, 3, SIZE, SIZE)
    assert model.features is not None
    ours = model.features(per_task(params, 1), x)[0]
    made.train()  # by the statistics of the batch, as all networks that learn here
    torch.testing.assert_close(ours, theirs(made, "resnet18", x[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("densenet121", r"(denselayer\d+\.[a-z]+)([12])\.", r"\1.\2."),
        ("vit_b_16", r"\.mlp\.([03])\.", lambda found: f".mlp.linear_{1 + int(found[1]) // 3}."),
    ],
)
def test_the_names_in_torchvisions_older_files_are_understood(name: str, old: str, new: Any) -> None:
    with torch.device("meta"):
        network = models.get_model(name)
    state = network.state_dict()
    former = {re.sub(old, new, key): value for key, value in state.items()}
    assert former.keys() != state.keys()
    load_whole(network, former, "file", name)  # or it would name what does not fit


def renamed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


WRAPPED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "DataParallel": (lambda state: renamed(state, "module."), r", without the prefix module\., SHA"),
    "compiled and parallel": (
        lambda state: renamed(state, "_orig_mod.module."),
        r", without the prefix _orig_mod\., without the prefix module\., SHA"),
    "a checkpoint": (lambda state: {"epoch": 3, "optimizer": {}, "state_dict": state}, ", entry state_dict, SHA"),
    "a compiled one in a checkpoint": (
        lambda state: {"model": renamed(state, "_orig_mod.")}, r", entry model, without the prefix _orig_mod\., SHA"),
    "half precision": (
        lambda state: {name: v.half() if v.is_floating_point() else v for name, v in state.items()}, ", SHA"),
    "safetensors": (lambda state: renamed(state, "module."), r", without the prefix module\., SHA"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_weights_in_a_wrapper_are_understood_and_a_line_says_so(name: str, tmp_path: Path) -> None:
    wrap, line = WRAPPED[name]
    made = models.resnet18(weights=None)
    path = tmp_path / ("weights.safetensors" if name == "safetensors" else "weights.pth")
    content = wrap(made.state_dict())
    save_file(content, path) if name == "safetensors" else torch.save(content, path)
    state, _, note = pretrained("resnet18", str(path), None)
    assert re.search(line, note)
    wanted = {key: value for key, value in made.state_dict().items() if not key.startswith("fc.")}
    wanted = {key: value for key, value in wanted.items() if not key.endswith("num_batches_tracked")}
    assert state.keys() == wanted.keys()
    fresh = models.resnet18(weights=None)
    fresh.load_state_dict(state, strict=False)
    rounded = 1e-3 if name == "half precision" else 0
    for key, value in wanted.items():
        assert fresh.state_dict()[key].dtype == value.dtype
        torch.testing.assert_close(fresh.state_dict()[key], value, rtol=rounded, atol=rounded / 10)


class Code:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return (print, ("this has run",))


CONTENTS: dict[str, Callable[[], Any]] = {
    "odd.pth": lambda: {"net": {"a": torch.zeros(1)}},
    "empty.pth": lambda: {"state_dict": {}},
    "evil.pth": lambda: {"conv1.weight": Code()},
    "resnet18.pth": lambda: network("resnet18").state_dict(),
}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"weights": "/nowhere.pth"}, "weights=/nowhere.pth"),
        ({"weights": "odd.pth"}, r"odd\.pth: is no state dict"),
        ({"weights": "empty.pth"}, r"empty\.pth: is no state dict"),
        ({"weights": "evil.pth"}, r"evil\.pth: cannot be read"),
        ({"name": "resnet34", "weights": "resnet18.pth"}, r"resnet18\.pth: are not those of resnet34: .*layer1\.2\."),
        ({"name": "resnet50", "weights": "resnet18.pth"}, r"are not those of resnet50: .*layer1\.0\.conv1\.weight"),
        ({"name": "alexnet"}, "name='alexnet'"),
        ({"weights": "ResNet50_Weights.IMAGENET1K_V1"}, r"type one of ResNet18_Weights\.IMAGENET1K_V1, "),
        ({"name": "vit_b_16", "weights": "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1"},  # of larger pictures
         r"type one of ViT_B_16_Weights\.IMAGENET1K_V1, [^,]*SWAG_LINEAR_V1, or wei"),
        ({"weights": "ResNet18_Weights.IMAGENET1K_V1"}, "cannot be downloaded .*type weights=/path/to/file"),
        ({"weights": None}, "frozen=true: .* type weights="),
        ({"input_size": 0}, "input_size=0"),
        ({"frozen": "first"}, "frozen='first'"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(
    keys: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.chdir(tmp_path)
    keys = {"name": "resnet18", "weights": "/nowhere.pth"} | keys
    if keys["weights"] in CONTENTS:
        torch.save(CONTENTS[keys["weights"]](), keys["weights"])
    with pytest.raises(ValueError, match=named):
        frozen(**keys)
    assert "this has run" not in capsys.readouterr().out
