"""Adapted tasks, saved and loaded: what is loaded gives the same bits, and nothing in a folder runs."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metalearn
from metalearn.api.learner import LEARNER, Classification, Regression
from metalearn.errors import ConfigError
from metalearn.saved.form import META, TENSORS
from tests.metalearn.api.test_load import ALGORITHMS
from tests.metalearn.api.test_program import drawings, task_of
from tests.metalearn.api.test_train import INNER, STEPS, Lines
from tests.runs import Program, slow
from tests.saved import MARKER, forge, saved_run

pytestmark = pytest.mark.thorough

XS = [-4.0, -2.5, -1.0, 0.5, 2.0, 3.5]


def numbers(home: Path) -> Regression:
    saved_run(home / "run", "experiment=maml_sinusoid")
    task = metalearn.load(home / "run").adapt(XS, [2 * np.sin(x) for x in XS], steps=3)
    assert isinstance(task, Regression)
    return task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Classification:
    return task_of(tmp_path_factory.mktemp("task"), "maml")


@pytest.fixture
def folder(task: Classification, tmp_path: Path) -> Path:
    task.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in ("maml", "protonet") else slow) for name in ALGORITHMS]
)
def test_what_is_loaded_answers_with_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    task, asked = task_of(tmp_path, algorithm), drawings(7, 1)
    expected = task.predict(asked)
    task.save(tmp_path / "saved")
    loaded = metalearn.load_task(tmp_path / "saved")
    assert isinstance(loaded, Classification) and loaded.labels == task.labels == tuple("abcde")
    assert loaded.predict(asked) == expected
    loaded.save(tmp_path / "twice")
    for name in (META, TENSORS, f"{LEARNER}/{TENSORS}"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_a_task_of_numbers_keeps_its_steps_and_its_form(tmp_path: Path) -> None:
    task = numbers(tmp_path)
    expected = task.predict([0.0, 1.0])
    task.save(tmp_path / "saved")
    again = metalearn.load_task(tmp_path / "saved")
    assert isinstance(again, Regression)
    found = again.predict([0.0, 1.0])
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (2,)
    other = metalearn.load(tmp_path / "run").adapt(XS, [2 * np.sin(x) for x in XS], steps=0)
    assert isinstance(other, Regression) and not np.array_equal(other.predict([0.0, 1.0]), expected)


def test_another_process_gives_the_same_bits(task: Classification, folder: Path, tmp_path: Path) -> None:
    for number, picture in enumerate(drawings(3, 1)):
        picture.save(tmp_path / f"{number}.png")
    code = (
        "import json, metalearn; from pathlib import Path\n"
        "found = metalearn.load_task('saved').predict(sorted(Path().glob('*.png')))\n"
        "print(json.dumps([list(one.probabilities.values()) for one in found]))"
    )
    outcome = Program([sys.executable, "-c", code], tmp_path).wait(120)
    expected = [list(one.probabilities.values()) for one in task.predict(drawings(3, 1))]
    (answer,) = (line for line in outcome.text.splitlines() if line.startswith("[["))
    assert json.loads(answer) == expected


def test_labels_are_texts_and_numbers(task: Classification, tmp_path: Path) -> None:
    learner = task._learner
    labels: list[Any] = ["a", 1, 2.5, True, "é"]
    labels[3] = False  # True is 1
    made = learner.adapt(drawings(5), labels)
    made.save(tmp_path / "saved")
    loaded = metalearn.load_task(tmp_path / "saved")
    assert isinstance(loaded, Classification) and repr(loaded.labels) == repr(tuple(labels))
    other = learner.adapt(drawings(5), ["a", "b", "c", "d", ("e", 1)])
    with pytest.raises(ConfigError, match=r"labels: \('e', 1\) is neither a text nor a number"):
        other.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def test_a_network_of_code_is_given_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = metalearn.train(
        metalearn.named("maml", **INNER), network, Lines(), progress=False, **(STEPS | {"steps": 2})
    )
    task = learner.adapt([0.0, 1.0], [1.0, 2.0])
    task.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"its model is an object .*give it again: network="):
        metalearn.load_task(tmp_path / "saved")
    loaded = metalearn.load_task(tmp_path / "saved", network=network)
    np.testing.assert_array_equal(loaded.predict([0.5]), task.predict([0.5]))


def test_a_task_without_its_support_set_is_refused(folder: Path) -> None:
    forge(folder, tensors=lambda tensors: {"y": tensors["y"]})
    with pytest.raises(ConfigError, match=r"is no task that can be used: .*params.safetensors: has no tensor x"):
        metalearn.load_task(folder)


class Hostile:
    """A pickle that makes a file where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARKER,)


def test_damage_is_named_and_nothing_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (TENSORS, META, f"{LEARNER}/{TENSORS}", f"{LEARNER}/{META}"):
        path = folder / name
        genuine = path.read_bytes()
        for content in (b"", genuine[:-5], pickle.dumps(Hostile()), None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(ConfigError, match=str(path)):
                metalearn.load_task(folder)
            path.write_bytes(genuine)
    assert not list(tmp_path.rglob(MARKER))
    metalearn.load_task(folder)


def test_it_is_saved_in_a_new_folder_only(task: Classification, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        task.save(folder)
    for path, named in ((tmp_path / "nowhere", "nowhere"), (folder / LEARNER, "is a learner; type metalearn adapt")):
        with pytest.raises(ConfigError, match=named):
            metalearn.load_task(path)
    with pytest.raises(ConfigError, match="is an adapted task; load it in Python"):
        metalearn.load(folder)
