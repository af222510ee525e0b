"""`metalearn.load`: a learner adapts to pictures of any kind, and says what the algorithm itself says."""

import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from PIL import Image

import metalearn
from metalearn.api.learner import Classification, Learner, Regression
from metalearn.api.pictures import prepared
from metalearn.app.parts import Parts
from metalearn.errors import ConfigError, RunError
from metalearn.runs.checkpoint import read, write
from metalearn.runs.folder import inspect
from metalearn.tasks.common.pictures import PictureForm, formed
from metalearn.tasks.omniglot import characters, decode_character, find_collections
from metalearn.types import Batch
from tests.runs import ROOT, Program, slow
from tests.saved import saved_run

Pictures = NDArray[np.uint8]

TINY = ("model.filters=8", "model.transductive=false")

ALGORITHMS = {
    "maml": 5, "maml_pp": 5, "meta_sgd": 5, "anil": 5, "boil": 5, "fomaml": 5, "imaml": 5, "reptile": 5, "scratch": 5,
    "in_context": 5, "cavia": 5, "meta_curvature": 5, "protomaml": None, "feat": None, "deepbdc": None,
    "finetune": 5, "protonet": None, "r2d2": None, "matching": None, "simpleshot": None, "baseline_pp": None,
    "metaoptnet": None, "tim": None, "bd_cspn": None, "laplacian_shot": None, "oml": None,
}  # fmt: skip
"""Every algorithm that learns tasks, and the number of classes that it takes after a training on 5; None: any."""


class Run:
    """A saved run, and a learner of it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        self.parts: Parts = saved_run(self.folder, *overrides)

    def load(self, **options: Any) -> Learner:
        return metalearn.load(self.folder, **options)


@pytest.fixture(scope="module")
def protonet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("protonet"), "algorithm=protonet", *TINY)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    overrides = ("algorithm=protonet", "dataset=image_folder", "dataset.image_size=20", "dataset.root=nowhere")
    return Run(tmp_path_factory.mktemp("photographs"), *overrides, *TINY)


def drawn(run: Run) -> tuple[list[Image.Image], list[int], list[Image.Image], torch.Tensor]:
    """The first test task as pictures of ink on paper: support, labels, queries; and what the algorithm predicts."""
    (support, query) = run.parts.source.episodes("test", torch.tensor([0]))
    logits = run.parts.algorithm.adapt(run.parts.start, support)(query.x)
    paper = [[on_paper(x) for x in part[0]] for part in (support.x, query.x)]
    return paper[0], support.y[0].tolist(), paper[1], logits[0].softmax(dim=1)


def on_paper(x: torch.Tensor) -> Image.Image:
    """A dataset's drawing [1, h, w] as it would be in a file."""
    return Image.fromarray(255 - (x[0] * 255).round().numpy().astype(np.uint8))


def task_of(learner: Learner, inputs: Any, targets: Any) -> Classification:
    task = learner.adapt(inputs, targets)
    assert isinstance(task, Classification)
    return task


def table(task: Classification, queries: Any) -> torch.Tensor:
    """The probabilities of the labels 0, 1, …, [queries, labels]."""
    return torch.tensor(
        [[one.probabilities[label] for label in sorted(one.probabilities)] for one in task.predict(queries)]
    )


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, metalearn; print({'torch', 'hydra', 'numpy'} & set(sys.modules), callable(metalearn.load))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == "set() True\n", run.stderr


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_learner_predicts_what_its_algorithm_predicts(name: str, tmp_path: Path) -> None:
    on_samples = name in ("finetune", "simpleshot", "baseline_pp", "tim", "bd_cspn", "laplacian_shot")
    extra = ["algorithm.channels=4"] if name == "deepbdc" else []  # of 8 features, in maps of two pixels
    run = Run(tmp_path, f"algorithm={name}", *(["model.ways=400"] if on_samples else []), *extra, *TINY)
    support, labels, queries, expected = drawn(run)
    learner = run.load()
    name = "maml" if name == "fomaml" else name  # with other values
    assert (learner.name, learner.ways, learner.trained_ways) == (name, ALGORITHMS[name], 5)
    assert learner.transductive == (name in ("tim", "bd_cspn", "laplacian_shot"))
    predictions = table(task_of(learner, support, labels), queries)
    torch.testing.assert_close(predictions, expected, atol=1e-5, rtol=0)
    if ALGORITHMS[name]:
        with pytest.raises(ValueError, match=rf"labels: they name 4 classes.*algorithm={name}.*of 5 classes.*protonet"):
            learner.adapt(support[:4], labels[:4])
    else:
        assert len(task_of(learner, support[:3], labels[:3]).predict(queries)[0].probabilities) == 3


def test_every_algorithm_is_in_the_table() -> None:
    others = {"supervised", "pfn", "reading", "reweight"}
    assert ALGORITHMS.keys() | others == {path.stem for path in (ROOT / "conf/algorithm").glob("*.yaml")}


KINDS: dict[str, Callable[[Image.Image, Path], Any]] = {
    "a path": lambda image, path: path,
    "a text": lambda image, path: str(path),
    "an array": lambda image, path: np.asarray(image),
    "an array of colours": lambda image, path: np.asarray(image.convert("RGB")),
    "real numbers": lambda image, path: np.asarray(image) / 255,
    "a tensor with channels first": lambda image, path: torch.tensor(np.array(image.convert("RGB"))).permute(2, 0, 1),
    "a tensor of real numbers": lambda image, path: torch.from_numpy(np.array(image)).unsqueeze(0).float() / 255,
    "a transparent picture": lambda image, path: transparent(image),
}  # fmt: skip


def transparent(image: Image.Image) -> Image.Image:
    """Black ink on nothing."""
    ink = Image.new("RGBA", image.size, "black")
    ink.putalpha(Image.fromarray(255 - np.asarray(image)))
    return ink


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_every_kind_are_the_same(kind: str, protonet: Run, tmp_path: Path) -> None:
    image = drawn(protonet)[0][0]
    image.save(tmp_path / "picture.png")
    form = PictureForm(28, 1, whole=True, inverted=True)
    given, expected = prepared([KINDS[kind](image, tmp_path / "picture.png"), image], form)
    assert (given - expected).abs().max() <= 1 / 255  # transparency is rounded


def test_labels_are_any_hashable_values_in_their_order(protonet: Run) -> None:
    support, _, queries, expected = drawn(protonet)
    names = [("z", 1), "a", 3, None, 2.5]
    task = task_of(protonet.load(), support, names)
    assert task.labels == tuple(names)
    for prediction, row in zip(task.predict(queries), expected.tolist(), strict=True):
        assert list(prediction.probabilities) == names
        assert list(prediction.probabilities.values()) == pytest.approx(row, abs=1e-5)
        assert prediction.label == names[int(np.argmax(row))]
    for labels in (np.arange(5), torch.arange(5), list(torch.arange(5))):
        assert task_of(protonet.load(), support, labels).labels == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, math.nan, 3, 4], r"labels\[2\]=nan: is missing; leave that example out"),
        ([0, 1, 2, True, 4], r"labels\[3\]=True: equals a label of type int; give labels of one type"),
    ],
)
def test_labels_that_are_missing_or_equal_by_chance_are_refused(labels: list[Any], message: str, protonet: Run) -> None:
    support, *_ = drawn(protonet)
    with pytest.raises(ValueError, match=message):
        task_of(protonet.load(), support, labels)


def test_queries_are_independent_unless_transductive(protonet: Run) -> None:
    support, labels, queries, _ = drawn(protonet)
    for transductive in (False, True):
        task = task_of(protonet.load(transductive=transductive), support, labels)
        together, alone = table(task, queries), table(task, queries[:1])
        assert torch.allclose(together[:1], alone, atol=1e-5) is not transductive
    assert task.predict([]) == []


def test_many_queries_are_computed_in_parts(protonet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    support, labels, queries, expected = drawn(protonet)
    monkeypatch.setattr("metalearn.api.learner._NUMBERS_TOGETHER", 3 * 28**2)
    predictions = table(task_of(protonet.load(), support, labels), queries)
    torch.testing.assert_close(predictions, expected, atol=1e-5, rtol=0)


def test_omniglot_drawings_are_prepared_as_in_the_dataset(omniglot_root: Path, tmp_path: Path) -> None:
    character = characters()[700]
    files = find_collections(omniglot_root)[character.path.split("/")[0]]
    expected = decode_character(character, files, 28)
    originals = [Image.open(io.BytesIO(files.read(path))) for path in files.paths[character.path]]
    learner = Run(tmp_path, "experiment=protonet_omniglot_quick").load()
    assert learner.form is not None
    assert np.array_equal((prepared(originals, learner.form)[:, 0] * 255).round().numpy(), expected)


def test_photographs_are_prepared_as_the_dataset_prepares_them(photographs: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (37, 90, 3), np.uint8)).save(tmp_path / "wide.png")
    form = photographs.load().form
    assert form is not None
    shown = prepared([tmp_path / "wide.png"], form)[0].permute(1, 2, 0)
    with Image.open(tmp_path / "wide.png") as image:
        assert np.array_equal((shown * 255).round().numpy(), formed(image, PictureForm(20, 3)))


def test_a_picture_of_pillow_is_turned_as_its_file_is(photographs: Run, tmp_path: Path) -> None:
    rng, turned = np.random.default_rng(0), Image.Exif()
    turned[0x0112] = 6  # orientation: the first row is on the right
    Image.fromarray(rng.integers(0, 255, (24, 30, 3), np.uint8)).save(tmp_path / "a.png", exif=turned)
    form = photographs.load().form
    assert form is not None
    with Image.open(tmp_path / "a.png") as opened:
        by_file, by_pillow, upright = prepared([tmp_path / "a.png", opened, np.asarray(opened)], form)
    assert torch.equal(by_file, by_pillow) and not torch.equal(by_file, upright)


def test_a_learner_of_real_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path, "experiment=maml_sinusoid")
    (support, query) = run.parts.source.episodes("test", torch.tensor([0]))
    expected = run.parts.algorithm.adapt(run.parts.start, support)(query.x)[0, :, 0]
    learner = run.load()
    x, y = support.x[0, :, 0].numpy(), support.y[0, :, 0].numpy()
    for inputs, targets, queries in ((x, y, query.x[0, :, 0]), (x[:, None], y[:, None], query.x[0])):
        task = learner.adapt(inputs, targets)
        assert isinstance(task, Regression)
        values = task.predict(queries)
        assert values.shape == tuple(queries.shape)
        np.testing.assert_allclose(values.ravel(), expected, rtol=1e-4, atol=1e-5)
    for given, message in (
        ((x, y[:3]), "y: has 3 values for the 10 of x"),
        ((x, ["a"] * 10), "y: must be an array of numbers"),
        ((x * np.nan, y), "x: must be finite numbers"),
        ((np.ones((10, 2)), y), r"x: this network does not take inputs of shape \[2\]"),
        ((x, np.ones((10, 2))), "y: has 2 numbers for each x, and this learner has 1 outputs"),
        (([], []), "x: is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.adapt(*given)


def test_a_users_network_must_be_named_by_the_caller(tmp_path: Path) -> None:
    own = "tests.own_network.Small"
    run = Run(tmp_path, "algorithm=protonet", "model=module", f"model.network._target_={own}")
    with pytest.raises(ValueError, match=r"it names the network tests\.own_network\.Small, .* network='tests"):
        run.load()
    support, labels, queries, _ = drawn(run)
    assert len(task_of(run.load(network=own), support, labels).predict(queries)) == len(queries)
    with pytest.raises(ValueError, match=r"network\._target_=nowhere\.Net: is not found"):
        run.load(network="nowhere.Net")


BAD: dict[str, tuple[Callable[[list[Any], list[Any]], tuple[Any, Any]], str]] = {
    "labels of another length": (lambda x, y: (x, y[:4]), "labels: there are 4 for 5 images; give one label for each"),
    "one class": (lambda x, y: (x, [0] * 5), "labels: they name 1 classes, and a task has at least 2"),
    "nothing": (lambda x, y: ([], []), "labels: they name 0 classes"),
    "one picture": (lambda x, y: (x[0], [0]), r"images: must be a list, and is a single Image; type \[images\]"),
    "one colour array": (lambda x, y: (np.zeros((9, 8, 3), np.uint8), [0]), "images: must be a list, and is a single"),
    "one text": (lambda x, y: ("a.png", ["a"]), "images: must be a list, and is a single str"),
    "one label": (lambda x, y: (x, "abcde"), "labels: must be a list, and is a single str"),
    "a list as a label": (lambda x, y: (x, [[0]] * 5), r"labels\[0\]=\[0\]: a list cannot be a label"),
    "no file": (lambda x, y: ([*x[:4], "gone.png"], y), r"images\[4\]=gone\.png: cannot be read: No such file"),
    "no picture": (lambda x, y: ([*x[:4], __file__], y), r"images\[4\]=.*test_load.py: cannot be read: not recognised"),
    "a number": (lambda x, y: ([*x[:4], 5], y), r"images\[4\]: cannot be read: a int is no picture"),
    "an empty array": (lambda x, y: ([*x[:4], np.zeros((0, 9))], y), r"an array of shape \(0, 9\) holds no pixel"),
    "a normalised array": (lambda x, y: ([*x[:4], np.full((9, 9), -1.5)], y), r"from 0 \(black\) to 1 \(white\)"),
    "an array of four dimensions": (lambda x, y: ([*x[:4], np.ones((1, 3, 9, 9))], y), r"must be \[h, w\]"),
}  # fmt: skip
"""What is given in place of support pictures and labels, and a part of the message."""


@pytest.mark.parametrize("name", BAD)
def test_what_a_learner_does_not_take_is_named(name: str, protonet: Run) -> None:
    change, message = BAD[name]
    support, labels, _, _ = drawn(protonet)
    with pytest.raises(ValueError, match=message):
        protonet.load().adapt(*change(support, labels))


NO_GPU = () if torch.cuda.is_available() else ({"device": "cuda"},)


def test_a_folder_with_nothing_to_load_is_named(protonet: Run, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "gone", "gone: there is no such folder; type the folder of a run"),
        (tmp_path, "holds no run, no checkpoint and no published model; type the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=message):
            metalearn.load(path)
    (tmp_path / "checkpoints/last").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has not been validated yet.*type .*/checkpoints/last"):
        metalearn.load(tmp_path)
    for option in ({"transductive": 1}, {"device": "tpu"}, {"network": "a.B"}, *NO_GPU):
        with pytest.raises(ValueError, match=next(iter(option))):
            protonet.load(**option)
    with pytest.raises(ConfigError, match="algorithm=supervised classifies what it was trained on"):
        Run(tmp_path / "plain", "experiment=supervised_glyphs").load()


def test_a_checkpoint_loads_and_its_repr_has_no_parameters(protonet: Run) -> None:
    support, labels, queries, expected = drawn(protonet)
    assert "tensor" not in repr(protonet.load()) and repr(protonet.load()).startswith("Learner(name='protonet'")
    for name in ("best", "step_000000"):
        learner = metalearn.load(str(protonet.folder / "checkpoints" / name))
        torch.testing.assert_close(table(task_of(learner, support, labels), queries), expected, atol=1e-5, rtol=0)


def test_parameters_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "algorithm=protonet", *TINY)
    run.parts.start["conv2.weight"][0] = torch.nan
    folder = run.folder / "checkpoints"
    write(folder, read(folder / "best")._replace(params=run.parts.start))
    with pytest.raises(ConfigError, match=r"the parameter conv2\.weight is not finite"):
        run.load()


def test_a_tensor_too_many_is_seen_from_the_header(protonet: Run, tmp_path: Path) -> None:
    """Its data are not read: the digest is wrong, and is not what is named."""
    folder = shutil.copytree(protonet.folder / "checkpoints/step_000000", tmp_path / "step_000000")
    file = folder / "params.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    header["large"] = {"dtype": "F32", "shape": [2**26], "data_offsets": [len(rest), len(rest) + 2**28]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    os.truncate(file, 8 + len(text) + len(rest) + 2**28)
    refused = r"parameters of another model: large \(here absent, there \(67108864,\)\)"
    with pytest.raises(ValueError, match=refused):
        metalearn.load(folder)
    keys = (f"init_from={folder}", "init_strict=true")
    with pytest.raises(ValueError, match=refused):
        saved_run(tmp_path / "next", "algorithm=protonet", *TINY, *keys)
    config = OmegaConf.merge(protonet.parts.job.config, {"resume": str(folder), "resume_changes": []})
    with pytest.raises(ValueError, match=refused):
        inspect(tmp_path / "new", config, protonet.parts.start, protonet.parts.restored)
    with pytest.raises(RunError, match="differs from what was saved"):
        read(folder)


def test_an_odd_number_of_pictures_of_a_class(protonet: Run) -> None:
    """A prototype is the mean of its class, however many pictures the class has."""
    support, labels, queries, _ = drawn(protonet)
    (first, second) = (protonet.parts.source.episodes("test", torch.tensor([number])) for number in (0, 0))
    x, y = (
        torch.cat([first.support.x, second.query.x[:, :1]], 1),
        torch.cat([first.support.y, second.query.y[:, :1]], 1),
    )
    expected = protonet.parts.algorithm.adapt(protonet.parts.start, Batch(x, y))(first.query.x)[0].softmax(dim=1)
    task = task_of(protonet.load(), [*support, queries[0]], [*labels, int(y[0, -1])])
    torch.testing.assert_close(table(task, queries), expected, atol=1e-5, rtol=0)


@slow
@pytest.mark.timeout(3600)
def test_new_characters_are_learned_from_one_drawing_each(omniglot_root: Path, tmp_path: Path) -> None:
    """20 sets of 5 characters of the test split, in files of another size, by a model that trains in a few minutes."""
    command = [sys.executable, str(ROOT / "train.py"), "experiment=protonet_omniglot_quick", "hydra.run.dir=run"]
    outcome = Program(command, tmp_path).wait(3000)
    assert outcome.code == 0, outcome.text
    learner = metalearn.load(tmp_path / "run")
    collections = find_collections(omniglot_root)
    unseen = [character.path for character in characters() if character.parts["paper"] == "test"]
    rng = np.random.default_rng(0)
    right = []
    for _ in range(20):
        files: dict[str, list[Path]] = {}
        for path in rng.choice(unseen, 5, replace=False).tolist():
            drawings = collections[path.split("/")[0]]
            files[path] = [tmp_path / name.replace("/", "_") for name in drawings.paths[path]]
            for name, file in zip(drawings.paths[path], files[path], strict=True):
                Image.open(io.BytesIO(drawings.read(name))).convert("L").resize((64, 80)).save(file)
        task = task_of(learner, [drawn[0] for drawn in files.values()], list(files))
        for path, (_, *queries) in files.items():
            right += [prediction.label == path for prediction in task.predict(queries)]
    assert len(right) == 20 * 5 * 19 and np.mean(right) >= 0.95, np.mean(right)
