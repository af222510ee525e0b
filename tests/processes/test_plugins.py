"""A run whose parts come from a package of its user: only the caller admits it, to load, publish and evaluate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import metalearn
from metalearn.api.export import export
from metalearn.api.learner import Classification, Prediction
from metalearn.cli import adapt, evaluate
from metalearn.cli import export as export_script
from metalearn.config.options import search
from metalearn.errors import ConfigError
from metalearn.saved.form import META
from metalearn.tasks.glyphs import character
from tests.runs import result_of
from tests.saved import saved_run

PACKAGE = '''
"""Parts that do what those of the program do, under names of their own."""

from metalearn.algorithms.protonet import protonet
from metalearn.models.conv4 import conv4
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.common.pictures import PictureForm
from metalearn.tasks.glyphs import glyphs


class Signs:
    form = PictureForm(28, 1, whole=True, inverted=True)

    def __init__(self, *, signs, root, seed, eval_seed):
        self.source = glyphs(
            episode=EpisodeSpec(signs, 1, 2), image_size=28, channels=1, rotations=False, seeds=Seeds(seed, eval_seed)
        )

    def __getattr__(self, name):
        return getattr(self.source, name)


def blocks(*, width, transductive):
    return conv4(ways=5, channels=1, image_size=28, filters=width, transductive=transductive)


def nearest_mean(*, model):
    return protonet(model=model)
'''

YAMLS = {
    "dataset/signs": (
        "_target_: own_signs.Signs\nsigns: 5\nroot: ${oc.env:METALEARN_DATA,data}\nseed: ${seed}\n"
        "eval_seed: ${trainer.eval_seed}\n"),
    "dataset/more_signs": (
        "_target_: own_signs.Signs\nsigns: 7\nroot: null\nseed: ${seed}\neval_seed: ${trainer.eval_seed}\n"),
    "model/blocks": "_target_: own_signs.blocks\nwidth: 4\ntransductive: false\n",
    "algorithm/nearest_mean": "_target_: own_signs.nearest_mean\n",
}  # fmt: skip

OWN = ("plugins=[own_signs]", "dataset=signs", "model=blocks", "algorithm=nearest_mean")
OURS = ("algorithm=protonet", "model.filters=4", "model.transductive=false", "dataset.rotations=false")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the package, its yamls, a run of its parts, the same run of ours, and two folders of pictures."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "own_signs.py").write_text(PACKAGE)
    for name, content in YAMLS.items():
        (folder / "my_conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"my_conf/{name}.yaml").write_text(content)
    for place in ("support", "query"):
        for number in range(510, 513):
            (folder / place / str(number)).mkdir(parents=True)
            paper = Image.fromarray(255 - character(number, 40)[len(place)])
            paper.save(folder / place / str(number) / "drawing.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        search(str(folder / "my_conf"))
        saved_run(folder / "run", *OWN)
        search(None)
        saved_run(folder / "ours", *OURS)
        yield folder


@pytest.fixture(scope="module")
def published(home: Path) -> Path:
    arguments = [str(home / "run"), "--out", str(home / "model"), "--plugins", "own_signs"]
    assert export_script.main(arguments) == 0
    return home / "model"


def predictions(path: Path, home: Path, **options: Any) -> list[Prediction]:
    support, query = (sorted((home / place).glob("*/*.png")) for place in ("support", "query"))
    task = metalearn.load(path, **options).adapt(support, ["a", "b", "c"])
    assert isinstance(task, Classification)
    return task.predict(query)


def test_what_is_loaded_predicts_as_the_same_parts_of_ours(home: Path, published: Path) -> None:
    expected = predictions(home / "ours", home)
    for path in (home / "run", published):
        assert predictions(path, home, plugins=["own_signs"]) == expected
    learner = metalearn.load(published, plugins=("own_signs",))
    assert (learner.name, learner.ways, learner.trained_ways) == ("nearest_mean", None, 5)


def test_no_folder_admits_its_package(home: Path, published: Path, capfd: pytest.CaptureFixture[str]) -> None:
    advice = (
        r"dataset\._target_=own_signs\.Signs: is no factory .*give plugins=\['own_signs'\] \(scripts: --plugins own_"
    )
    for path in (home / "run", published):
        with pytest.raises(ConfigError, match=advice):
            metalearn.load(path)
        assert evaluate.main([f"checkpoint={path / 'checkpoints/best' if path != published else path}"]) == 2
        assert "type 'plugins=[own_signs]'" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=advice):
        export(home / "run", home / "refused")
    assert not (home / "refused").exists()


def test_a_published_model_names_factories_and_no_machine(home: Path, published: Path) -> None:
    text = (published / META).read_text()
    assert str(home) not in text
    content = json.loads(text)
    config = content["config"]
    assert config["algorithm"] == {"_target_": "own_signs.nearest_mean"}
    assert config["model"] == {"_target_": "own_signs.blocks", "width": 4, "transductive": False}
    machine = {"root": None, "seed": None, "eval_seed": None}
    assert config["dataset"] == {"_target_": "own_signs.Signs", "signs": 5} | machine
    assert content["licence"] is None
    assert (content["preprocessing"]["framing"], content["preprocessing"]["inverted"]) == ("whole", True)


def test_the_scripts_take_it(home: Path, published: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = ["--support", str(home / "support"), "--query", str(home / "query")]
    adapting = ["--model", str(published), *folders, "--out", str(tmp_path / "out")]
    assert adapt.main(adapting) == 2 and "--plugins own_signs" in capfd.readouterr().err
    assert adapt.main([*adapting, "--plugins", "own_signs"]) == 0
    assert json.loads((tmp_path / "out/accuracy.json").read_text())["pictures"] == 3


def test_an_evaluation_finds_yamls_of_ones_own(home: Path, published: Path, tmp_path: Path) -> None:
    """`dataset=more_signs` has seven classes, which nearest_mean takes without a head."""
    arguments = [f"checkpoint={published}", "plugins=[own_signs]", "dataset=more_signs", "tasks=4"]
    found = [f"--config-dir={home / 'my_conf'}", *arguments, f"output={tmp_path / 'out'}"]
    try:
        assert evaluate.main(found) == 0
        figures = result_of(tmp_path / "out")["test"]
        assert figures["tasks"] == 4 and np.isfinite(figures["loss"])
        assert evaluate.main([*arguments, "--config-dir="]) == evaluate.main(arguments) == 2
    finally:
        search(None)
