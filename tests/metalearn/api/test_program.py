"""An adapted task leaves the machine, as one program that answers as it does."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import metalearn
from metalearn.api.learner import Classification
from metalearn.cli import adapt
from metalearn.errors import ConfigError
from metalearn.saved.exporter import FILES, ONNX, TORCH
from tests import drawn_pictures
from tests.metalearn.api.test_load import ALGORITHMS, TINY
from tests.programs import needs_onnx, said_by_card
from tests.runs import slow
from tests.saved import saved_run

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

WITHOUT_PROGRAM = ("tim", "bd_cspn", "laplacian_shot", "metaoptnet")
"""What the first two learn depends on the pictures that are asked; the third iterates until it has converged."""


def drawings(count: int, seed: int = 0) -> list[Image.Image]:
    values = np.random.default_rng(seed).integers(0, 256, (count, 31, 28), np.uint8)
    return [Image.fromarray(value) for value in values]


def task_of(home: Path, algorithm: str, *overrides: str) -> Classification:
    maps = ["algorithm.channels=4"] if algorithm == "deepbdc" else []  # of the 8 features, two pixels each
    saved_run(home / "run", f"algorithm={algorithm}", *TINY, *maps, *overrides)
    learner = metalearn.load(home / "run")
    task = learner.adapt(drawings(10), [*"abcde"] * 2)
    assert isinstance(task, Classification)
    return task


def answers(folder: Path, file_format: str, x: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    if file_format == TORCH:
        (found,) = torch.export.load(folder / FILES[TORCH]).module()(x)
        return np.asarray(found)
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / FILES[ONNX], providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["probabilities"], {"pictures": x.numpy()})[0])


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=() if name == "maml" else slow) for name in ALGORITHMS if name not in WITHOUT_PROGRAM],
)
@pytest.mark.parametrize("file_format", [pytest.param(ONNX, marks=needs_onnx), TORCH])
def test_the_program_of_an_adapted_task_answers_as_ours(file_format: str, algorithm: str, tmp_path: Path) -> None:
    task = task_of(tmp_path, algorithm)
    (said,) = task.export(tmp_path / "out", format=file_format)
    assert said.startswith("largest difference from this program: ")
    asked = drawings(7, 1)
    expected = [[one.probabilities[label] for label in "abcde"] for one in task.predict(asked)]
    x = task._learner.shown(asked)[0].float()
    for count in (1, 7):  # other numbers of pictures than it was made with
        np.testing.assert_allclose(answers(tmp_path / "out", file_format, x[:count]), expected[:count], atol=1e-4)


@pytest.mark.parametrize("network", ["resnet12", "torchvision"])
@slow
def test_other_networks_become_programs(network: str, tmp_path: Path) -> None:
    options = list[str]()
    if network == "torchvision":  # takes pictures of three colours
        root = drawn_pictures.put(tmp_path / "pictures", 2)
        options = ["dataset=image_folder", f"dataset.root={root}", "dataset.image_size=32", "dataset.ways=2"]
        options += ["dataset.shots=1", "dataset.queries=1"]
    saved_run(tmp_path / "run", "algorithm=protonet", f"model={network}", "model.transductive=false", *options)
    task = metalearn.load(tmp_path / "run").adapt(drawings(6), [*"ab"] * 3)
    assert isinstance(task, Classification)
    task.export(tmp_path / "out", format=TORCH)  # which compares them


@needs_onnx
def test_the_card_runs_it_without_this_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, on files of drawings: grey, ink is 1."""
    task = task_of(tmp_path, "protonet")
    for number, (picture, label) in enumerate(zip(drawings(10), [*"abcde"] * 2, strict=True)):
        (tmp_path / "support" / label).mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "support" / label / f"{number}.png")
    run, out = str(tmp_path / "run"), tmp_path / "program"
    assert adapt.main(["--model", run, "--support", str(tmp_path / "support"), "--export", str(out)]) == 0
    assert "largest difference from this program" in capsys.readouterr().out
    query = [tmp_path / f"q{number}.png" for number in range(3)]
    for path, picture in zip(query, drawings(3, 1), strict=True):
        picture.save(path)
    for (_, label, probability), ours in zip(said_by_card(out, query), task.predict(query), strict=True):
        assert label == ours.label and float(probability) == pytest.approx(ours.probabilities[label], abs=1e-4)
    card = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert card["tags"] == ["few-shot", "protonet", "onnx"]


def test_what_cannot_become_a_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="algorithm=tim: learns from the pictures that are asked"):
        task_of(tmp_path / "tim", "tim").export(tmp_path / "out", format=TORCH)
    task = task_of(tmp_path, "protonet")
    with pytest.raises(ValueError, match="format='pickle'"):
        task.export(tmp_path / "out", format="pickle")
    here = task._learner.adapt(drawings(2), [f"{tmp_path}/a", f"{tmp_path}/b"])
    assert isinstance(here, Classification)
    with pytest.raises(ConfigError, match=f"classes={tmp_path}/a: is a path of this machine"):
        here.export(tmp_path / "out", format=TORCH)
    assert not (tmp_path / "out").exists()
    for arguments, message in (
        (["--query", "q"], "--query, --out: type both"), ([], "--export FOLDER"),
        (["--query", "q", "--out", "o", "--format", "onnx"], "--format=onnx: is for a program; type --export FOLDER"),
    ):  # fmt: skip
        assert adapt.main(["--model", str(tmp_path / "run"), "--support", "s", *arguments]) == 2
        assert message in capsys.readouterr().err
