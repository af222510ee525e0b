"""`metalearn.train`: the loop without a command line, on parts by name and on parts of one's own."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Generator, Tensor, nn

import metalearn
from metalearn.algorithms.maml import maml
from metalearn.api.learner import Classification, Learner
from metalearn.errors import ConfigError, DivergedError
from metalearn.nn.surroundings import computing_with, rounds_products
from metalearn.types import Algorithm, Batch, Episode, Model, Unit
from tests.runs import ROOT, Program

STEPS = {"steps": 6, "meta_batch_size": 6, "task_chunk": 3, "val_every": 2, "val_tasks": 4, "test_tasks": 5}
INNER = {"inner_lr": 0.01, "inner_steps": 1, "eval_steps": 3}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(1, 4)), nn.Linear(4, 1))


class Stateful(nn.Module):
    """It has a layer by the name of what learners carry from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.state(x)  # type: ignore[no-any-return]


def classes_of(learner: Learner, inputs: object, labels: list[object]) -> Classification:
    task = learner.adapt(inputs, labels)
    assert isinstance(task, Classification)
    return task


class Lines:
    """Tasks y = a·x: a source as users write one. Its `episodes` are pure."""

    def classes(self, split: str) -> None:
        return None

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        tasks = [self._task(split, int(index)) for index in indices]
        x, y = (torch.stack(values) for values in zip(*tasks, strict=True))
        return Episode(Batch(x[:, :5], y[:, :5]), Batch(x[:, 5:], y[:, 5:]))

    def _task(self, split: str, index: int) -> tuple[Tensor, Tensor]:
        generator = Generator().manual_seed(3 * index + ("train", "val", "test").index(split))
        slope, x = torch.randn((), generator=generator), torch.rand(15, 1, generator=generator)
        return x, slope * x


@pytest.fixture(scope="module")
def sinusoid() -> Learner:
    return metalearn.train(metalearn.named("maml", **INNER), "mlp", metalearn.named("sinusoid", shots=5), **STEPS)


@pytest.mark.thorough
def test_it_learns_the_bits_of_train_py_and_tests_as_it_does(sinusoid: Learner, tmp_path: Path) -> None:
    overrides = [
        *("experiment=maml_sinusoid", "dataset.shots=5", "logger.plots=false", "logger.tensorboard=false"),
        *(f"trainer.{key}={value}" for key, value in STEPS.items()),
        *(f"algorithm.{key}={value}" for key, value in INNER.items()),
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    outcome = Program([sys.executable, str(ROOT / "train.py"), *overrides], tmp_path).wait()
    assert outcome.code == 0, outcome.text
    assert save(sinusoid.params) == (tmp_path / "run/checkpoints/best/params.safetensors").read_bytes()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert sinusoid.validation == result["val"]
    assert sinusoid.evaluate() | {"transductive": False} == result["test"]
    loaded, x = metalearn.load(tmp_path / "run"), np.linspace(-3, 3, 5)
    assert loaded.evaluate() == sinusoid.evaluate() and loaded.validation == sinusoid.validation
    assert (loaded.name, loaded.ways, loaded.form) == (sinusoid.name, sinusoid.ways, sinusoid.form)
    assert np.array_equal(*(learner.adapt(x, np.sin(x)).predict(x) for learner in (loaded, sinusoid)))


def test_a_network_and_tasks_of_ones_own_are_learned() -> None:
    learned = metalearn.train(
        metalearn.named("maml", inner_lr=0.1, inner_steps=1, eval_steps=5), network, Lines(), steps=60,
        meta_batch_size=4, val_tasks=20, test_tasks=20, optimizer=metalearn.named("adam", lr=0.01),
    )  # fmt: skip
    figures = learned.evaluate()
    assert figures["mse"] < 0.5 * figures["by_step"]["0"] and figures["tasks"] == 20
    support, query = Lines().episodes("test", torch.tensor([3]))
    task = learned.adapt(support.x[0].numpy(), support.y[0, :, 0].numpy())
    predicted = task.predict(query.x[0])
    assert predicted.shape == (10,)
    assert np.mean((predicted - query.y[0, :, 0].numpy()) ** 2) < np.mean(query.y[0].numpy() ** 2)


def test_a_function_and_a_module_with_its_weights_are_taken() -> None:
    module = network()

    def own(*, model: Model) -> Algorithm:
        return maml(model=model, **INNER)

    learned = metalearn.train(own, module, "sinusoid", **(STEPS | {"steps": 0}))
    assert learned.params.keys() == module.state_dict().keys()
    assert all(torch.equal(value, learned.params[name]) for name, value in module.state_dict().items())
    with pytest.raises(ValueError, match=r"x: this network does not take inputs of shape \[2\]"):
        learned.adapt(torch.zeros(3, 2), torch.zeros(3))
    assert learned.name == "own" and not learned.form
    assert list(learned.params) == sorted(learned.params)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_module_in_float64_is_cast_to_the_precision_of_the_run(precision: str) -> None:
    module = network().double()
    learned = metalearn.train(
        metalearn.named("maml", **INNER), module, "sinusoid", precision=precision, **(STEPS | {"steps": 0})
    )
    dtype = getattr(torch, precision)
    for name, value in module.state_dict().items():
        assert value.dtype is torch.float64 and learned.params[name].equal(value.to(dtype))
    x = torch.zeros(3, 1, dtype=torch.float64)
    assert learned.adapt(x, x[:, 0]).predict(x).dtype == precision


def test_a_learner_keeps_its_precision(sinusoid: Learner) -> None:
    x = np.linspace(-3, 3, 5, dtype=np.float32)[:, None]

    def outputs(learned: Learner) -> list[float]:
        return [*learned.adapt(x, np.sin(x)).predict(x).tolist(), learned.evaluate()["mse"]]

    before = outputs(sinusoid)
    task = sinusoid.adapt(x, np.sin(x))
    rounded = metalearn.train(metalearn.named("maml", **INNER), "mlp", "sinusoid", precision="bf16", **STEPS)
    assert not rounds_products()
    assert outputs(sinusoid) == before and task.predict(x).tolist() == before[:-1]
    in_bf16 = outputs(rounded)
    with computing_with("bf16"):
        assert outputs(sinusoid) == before and outputs(rounded) == in_bf16
    assert outputs(replace(rounded, taught=sinusoid.taught)) != in_bf16


def test_labels_are_those_that_were_given() -> None:
    glyphs = metalearn.named("glyphs", ways=3, image_size=12)
    learned = metalearn.train("protonet", metalearn.named("conv4", filters=4), glyphs, **(STEPS | {"steps": 1}))
    x = torch.rand(3, 1, 12, 12, generator=Generator().manual_seed(0))  # one drawing of 200 has two of equal features
    assert [label for label, _ in classes_of(learned, x, [70, "b", 12]).predict(x)] == [70, "b", 12]
    assert learned.evaluate(metalearn.named("glyphs", ways=2, image_size=12), count=4)["tasks"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mamll", "mlp", "sinusoid"), "algorithm=mamll: there is no such choice; did you mean maml?"),
        ((metalearn.named("maml", inner_lrr=1), "mlp", "sinusoid"), "algorithm.inner_lrr: .* did you mean inner_lr?"),
        (("maml", nn.Linear(3, 1), Lines()), r"Linear cannot take inputs \[n, 1\]"),
        (("maml", "conv4", Lines()), r"dataset.ways.* metalearn.named\(NAME, KEY=VALUE\)"),
        (("maml", Stateful, Lines()), r"Stateful: its parameter state\.weight has a name that is kept for the state"),
        (("maml", nn.Flatten, Lines()), "Flatten: has no parameters, so there is nothing to learn"),
        (("maml", spectral, Lines()), "spectral: its buffer .*_u is drawn at random"),
        (("maml", nn.Linear(1, 2), Lines()), "model: it has 2 outputs, and this dataset's tasks need 1"),
    ],
)
def test_wrong_parts_are_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metalearn.train(*arguments, **STEPS)  # type: ignore[arg-type]


def test_targets_follow_what_the_learner_has_learned(sinusoid: Learner) -> None:
    x = np.linspace(0, 1, 5)[:, None]
    whole, real = ([0, 1, 0, 1, 1], [0.0, 1.0, 0.0, 1.0, 1.0])
    assert (sinusoid.adapt(x, whole).predict(x) == sinusoid.adapt(x, real).predict(x)).all()
    with pytest.raises(ValueError, match="y: has 3 numbers for each x, and this learner has 1 outputs"):
        sinusoid.adapt(x, np.zeros((5, 3)))


def test_a_classifier_of_what_it_was_trained_on_learns_no_tasks(tmp_path: Path) -> None:
    known = metalearn.named("glyph_characters", ways=4, image_size=20, known=8)
    network = metalearn.named("conv4", filters=2, ways=4)
    learned = metalearn.train("supervised", network, known, **STEPS)
    for refused in (lambda: learned.adapt(torch.rand(4, 1, 20, 20), range(4)), lambda: learned.save(tmp_path / "new")):
        with pytest.raises(ConfigError, match="algorithm=supervised: it classifies what it was trained on"):
            refused()


@pytest.mark.parametrize("algorithm", ["r2d2", "metaoptnet"])
def test_a_head_without_a_solution_is_a_run_that_diverges(algorithm: str) -> None:
    steps = STEPS | {"optimizer": metalearn.named("adam", lr=1e30)}
    with pytest.raises(DivergedError, match=r"task .* its loss is not finite"):
        metalearn.train(
            algorithm, metalearn.named("conv4", filters=2), metalearn.named("glyphs", image_size=16), **steps
        )


def test_a_validation_that_is_not_finite_is_no_result() -> None:
    wild = metalearn.named("maml", inner_lr=1e9, eval_steps=5)
    with pytest.raises(DivergedError, match=r"val mse is (inf|nan), .*: type algorithm\.inner_lr=1e\+08"):
        metalearn.train(wild, "mlp", "sinusoid", **(STEPS | {"steps": 0}))


def test_it_trains_and_adapts_within_inference_mode(sinusoid: Learner) -> None:
    x = np.linspace(-3, 3, 5)
    expected = sinusoid.adapt(x, np.sin(x)).predict(x)
    with torch.inference_mode():
        again = metalearn.train(metalearn.named("maml", **INNER), "mlp", metalearn.named("sinusoid", shots=5), **STEPS)
        assert np.array_equal(again.adapt(x, np.sin(x)).predict(x), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_own_networks_load_and_adapt_within_any_mode(mode: Any, tmp_path: Path) -> None:
    learned = metalearn.train("maml", lambda: nn.Linear(1, 1), Lines(), **STEPS)
    x = np.linspace(-3, 3, 5)
    task = learned.adapt(x, x)
    learned.save(tmp_path / "learner")
    task.save(tmp_path / "task")
    expected = task.predict(x)
    with mode():
        assert np.array_equal(learned.adapt(torch.tensor(x), torch.tensor(x)).predict(torch.tensor(x)), expected)
        loaded = metalearn.load(tmp_path / "learner", network=lambda: nn.Linear(1, 1))
        again = metalearn.load_task(tmp_path / "task", network=lambda: nn.Linear(1, 1))
        assert np.array_equal(again.predict(x), expected)
    assert np.array_equal(loaded.adapt(x, x).predict(x), expected)
    assert np.array_equal(copy.deepcopy(task).predict(x), expected)


class Int32Lines(Lines):
    """Classes as numpy has them on some machines."""

    def classes(self, split: str) -> int:
        return 2

    def episodes(self, split: str, indices: Tensor) -> Episode:
        return Episode(*(Batch(x, (y[..., 0] > 0).int()) for x, y in super().episodes(split, indices)))


def test_labels_may_have_any_whole_numbers() -> None:
    """With a module, whose outputs torch's own cross-entropy compares with them."""
    assert metalearn.train("maml", lambda: nn.Linear(1, 2), Int32Lines(), **STEPS).validation["accuracy"] >= 0


def test_classes_of_arrays_have_labels_of_any_kind() -> None:
    """The sign of a number, from tasks without pictures."""
    learned = metalearn.train("maml", lambda: nn.Linear(1, 2), Int32Lines(), **(STEPS | {"steps": 60}))
    assert (learned.form, learned.ways, learned.trained_ways) == (None, 2, 2)
    x = np.array([[-0.9], [0.8], [-0.6], [0.7]])
    task = classes_of(learned, x, ["below", "above", "below", "above"])
    assert task.labels == ("below", "above")
    predictions = task.predict(np.array([0.95, -0.95]))
    assert [label for label, _ in predictions] == ["above", "below"]
    assert all(sum(probabilities.values()) == pytest.approx(1) for _, probabilities in predictions)
    for inputs, labels, message in (
        (x, [0, 1, 2, 3], "labels: they name 4 classes, and this learner .* of the 2 classes"),
        (x, [0, 1], "labels: there are 2 for 4 inputs; give one label for each"),
        (x[:0], [], "labels: they name 0 classes"),
        (np.ones((4, 3)), [0, 1, 0, 1], r"x: this network does not take inputs of shape \[3\]"),
        (x * np.nan, [0, 1, 0, 1], "x: must be finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            learned.adapt(inputs, labels)


def test_numbers_and_lists_of_numpy_are_settings() -> None:
    """Such as those of a loop over numpy.logspace."""
    figures = []
    for number, real, sizes in (
        (np.int64, np.float64, [np.int64(8), np.int64(8)]),
        (np.int32, np.float64, np.array([8, 8])),
        (int, float, [8, 8]),
    ):
        algorithm = metalearn.named("maml", inner_lr=real(0.01), eval_steps=number(1))
        steps = STEPS | {"steps": number(2), "seed": number(3)}
        figures.append(metalearn.train(algorithm, metalearn.named("mlp", hidden=sizes), "sinusoid", **steps).validation)
    assert figures[0] == figures[1] == figures[2]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"trainer.meta_batch_sise: .* did you mean meta_batch_size?"):
        metalearn.train("maml", "mlp", "sinusoid", steps=1, meta_batch_sise=3)


@pytest.mark.parametrize("name", ["finetune", "baseline_pp", "simpleshot", "tim", "bd_cspn", "laplacian_shot"])
def test_what_is_trained_on_samples_is_evaluated_on_tasks(name: str) -> None:
    sizes = {"meta_batch_size": 30, "task_chunk": 15, "val_tasks": 4, "test_tasks": 4}
    network = metalearn.named("conv4", filters=8, ways=400)
    learned = metalearn.train(metalearn.named(name), network, "glyphs", steps=2, progress=False, **sizes)
    assert learned.evaluate()["tasks"] == 4
