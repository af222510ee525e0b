"""`Learner.save` and `metalearn.load`: the same learner in another process, and what is refused."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metalearn
from metalearn.algorithms.maml import maml
from metalearn.api.learner import Learner
from metalearn.cli import evaluate
from metalearn.models.mlp import mlp
from metalearn.saved.form import META, TENSORS
from tests.metalearn.api.test_train import INNER, STEPS, Lines
from tests.runs import ROOT, Program
from tests.saved import forge


def network() -> nn.Module:
    """With a fixed first layer and dropout."""
    made = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    made[0].requires_grad_(False)
    return made


class Scaled(nn.Module):
    """A network of pictures, whose outputs depend on a buffer."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.body, self.norm, self.head = nn.Conv2d(1, 4, 5, 3), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.norm(self.body(x))).flatten(1))  # type: ignore[no-any-return]


OWN_ALGORITHM = partial(maml, **INNER)
GLYPHS = metalearn.named("glyphs", ways=3, image_size=12)
MAML = metalearn.named("maml", **INNER)

LEARNERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "names": (("meta_sgd", "mlp", metalearn.named("sinusoid", shots=5)), {}),
    "own network, tasks and algorithm": (
        (OWN_ALGORITHM, network, Lines()),
        {"network": network, "algorithm": OWN_ALGORITHM},
    ),
    "own model": (
        (MAML, mlp(inputs=1, outputs=1, hidden=(5,), activation="tanh"), Lines()),
        {"network": mlp(inputs=1, outputs=1, hidden=(5,), activation="tanh")},
    ),
    "own loss": ((MAML, network, Lines()), {"network": network, "loss": nn.functional.huber_loss}),
    "pictures": ((MAML, metalearn.named("conv4", filters=4), GLYPHS), {}),
    "own network of pictures": ((MAML, Scaled(), GLYPHS), {"network": Scaled}),
}
"""The arguments of `metalearn.train`, and those of `metalearn.load`."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Learner, Path]]:
    """A learner of the table, and the folder where it is saved."""
    made: dict[str, tuple[Learner, Path]] = {}

    def learned(name: str) -> tuple[Learner, Path]:
        if name not in made:
            torch.manual_seed(0)
            own = {"loss": LEARNERS[name][1].get("loss", "auto")}
            learner = metalearn.train(*LEARNERS[name][0], progress=False, **(STEPS | own | {"steps": 2}))
            folder = tmp_path_factory.mktemp("saved") / "learner"
            learner.save(folder)
            made[name] = learner, folder
        return made[name]

    return learned


def answers(learner: Learner) -> list[float]:
    """Predictions for a task."""
    if learner.trained_ways is None:
        x = np.linspace(-1, 1, 5)
        return learner.adapt(x, 2 * x).predict(x).tolist()  # type: ignore[union-attr]
    pictures = [np.full((20, 20), shade, np.uint8) for shade in (0, 90, 200)]
    predictions = learner.adapt(pictures, ["a", "b", "c"]).predict(pictures)
    return [p for _, table in predictions for p in table.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", LEARNERS)
def test_what_is_loaded_is_what_was_saved(name: str, saved: Callable[[str], tuple[Learner, Path]]) -> None:
    learner, folder = saved(name)
    loaded = metalearn.load(folder, **LEARNERS[name][1])
    assert all(torch.equal(loaded.params[key], learner.params[key]) for key in learner.params | loaded.params)
    assert answers(loaded) == answers(learner)
    assert loaded.validation == learner.validation
    for field in ("name", "ways", "trained_ways", "shots", "transductive", "form"):
        assert getattr(loaded, field) == getattr(learner, field)
    own = (Lines(),) if name.startswith("own") and learner.trained_ways is None else ()
    assert loaded.evaluate(*own, count=4) == learner.evaluate(count=4)
    loaded.save(folder.with_name("again"))
    for file in (TENSORS, META):
        assert (folder.with_name("again") / file).read_bytes() == (folder / file).read_bytes()


def test_another_process_gives_the_same_bits(saved: Callable[[str], tuple[Learner, Path]], tmp_path: Path) -> None:
    learner, folder = saved("own network of pictures")
    code = (
        "import metalearn; from tests.metalearn.api.test_save import Scaled, answers; "
        f"print('answers:', answers(metalearn.load({str(folder)!r}, network=Scaled)))"
    )
    outcome = Program([sys.executable, "-c", code], tmp_path, {"PYTHONPATH": str(ROOT)}).wait()
    assert outcome.code == 0, outcome.text
    (line,) = (line for line in outcome.text.splitlines() if line.startswith("answers: "))  # libraries may say more
    assert json.loads(line.removeprefix("answers: ")) == answers(learner)


def relu() -> nn.Module:
    made = network()
    made[1] = nn.ReLU()  # type: ignore[index]
    return made


OWN = "own network, tasks and algorithm"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (OWN, {}, r"its model is an object .* \(network\), and no code is saved; give it again: network=…"),
        (OWN, {"network": network}, r"its algorithm is an object .* \(partial\), .* give it again: algorithm=…"),
        (OWN, {"network": nn.Linear(1, 1)}, "give it again: algorithm=…"),
        (OWN, LEARNERS[OWN][1] | {"network": nn.Linear(1, 1)}, "holds parameters of another model: 3.bias"),
        (OWN, LEARNERS[OWN][1] | {"network": relu}, "network: with these parameters it gives other outputs"),
        (OWN, LEARNERS[OWN][1] | {"network": "no.such.Net"}, "network=no.such.Net: was an object"),
        ("own network of pictures", {"network": Scaled(3.0)}, "gives other outputs .* with the same buffers"),
        ("names", {"network": network}, "its network is one of this program's; leave network out"),
        ("names", {"algorithm": OWN_ALGORITHM}, "its algorithm is known by its name; leave algorithm out"),
    ],
)
def test_what_was_an_object_must_be_given_again(
    name: str, given: dict[str, Any], message: str, saved: Callable[[str], tuple[Learner, Path]]
) -> None:
    with pytest.raises(ValueError, match=message):
        metalearn.load(saved(name)[1], **given)


def test_tasks_that_were_an_object_are_given_to_evaluate(saved: Callable[[str], tuple[Learner, Path]]) -> None:
    loaded = metalearn.load(saved(OWN)[1], **LEARNERS[OWN][1])
    with pytest.raises(ValueError, match=r"tasks: they were an object .* \(Lines\); give tasks=…"):
        loaded.evaluate()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda meta: meta["config"]["model"].update(shape="large"), "shape=large"),
        (lambda meta: meta["config"]["model"].update({"own-object": 3}), "own-object=3"),
        (lambda meta: meta["config"]["dataset"].update(classes=[]), "classes=[]"),
        (lambda meta: meta.update(probe=[0.5]), "gives other outputs"),
        (lambda meta: meta.update(preprocessing=[]), "preprocessing=[]"),
        (lambda meta: meta.update(preprocessing={"image_size": 9}), "preprocessing: has no field channels"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused(
    change: Any, named: str, saved: Callable[[str], tuple[Learner, Path]], tmp_path: Path
) -> None:
    folder = tmp_path / "learner"
    shutil.copytree(saved(OWN)[1], folder)
    forge(folder, change)
    with pytest.raises(ValueError, match=re.escape(named)):
        metalearn.load(folder, **LEARNERS[OWN][1])


def test_it_is_saved_in_a_new_folder_only(saved: Callable[[str], tuple[Learner, Path]], tmp_path: Path) -> None:
    learner, _ = saved("names")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match=f"path={tmp_path}: is there already, and not an empty folder"):
        learner.save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        learner.save(tmp_path / "file/below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_the_command_line_says_that_objects_are_for_python(
    saved: Callable[[str], tuple[Learner, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([f"checkpoint={saved(OWN)[1]}", "tasks=4"]) == 2
    assert "was an object of a program (partial)" in capsys.readouterr().err
