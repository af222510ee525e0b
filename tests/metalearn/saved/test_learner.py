"""What a run has learned leaves its run folder: export and adapt, and hostile model folders."""

import csv
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from PIL import Image
from safetensors.torch import load_file, save_file

import metalearn
from metalearn.api.export import export
from metalearn.api.learner import Prediction
from metalearn.api.results import accuracy
from metalearn.cli import adapt, evaluate
from metalearn.cli import export as export_script
from metalearn.config.saved import changed_config
from metalearn.errors import ConfigError
from metalearn.runs.checkpoint import read_learner
from metalearn.saved.form import MANIFEST, META, TENSORS
from metalearn.tasks.glyphs import character
from tests.own_network import Small
from tests.runs import ROOT, Outcome, Program, slow
from tests.saved import MARKER, SECRET, copy_to_damage, forge, saved_run

Content = dict[str, Any]

TINY = ("algorithm=protonet", "model.filters=8", "model.transductive=false")

TEST = {"accuracy": 0.5, "ci95": 0.1, "tasks": 20, "transductive": False}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, as if it were completed."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    saved_run(folder, *TINY)
    result = {"status": "completed", "val": {"step": 0}, "test": TEST | {"loss": 1.0, "by_step": {"0": 0.5}}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_run_that_went_on_after_its_test_has_no_accuracy(run_dir: Path, tmp_path: Path) -> None:
    """Its result is that of an earlier best checkpoint until it is complete again."""
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    path = tmp_path / "run/result.json"
    result = json.loads(path.read_text())
    for number, change in enumerate(({"val": {"step": 8}}, {"val": None})):
        path.write_text(json.dumps(result | change))
        assert export(str(tmp_path / "run"), tmp_path / f"model{number}")["test"] is None


@pytest.fixture(scope="module")
def published(run_dir: Path) -> Path:
    """Its model."""
    folder = run_dir.parent / "model"
    assert export_script.main([str(run_dir), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def model(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to damage, in the working folder."""
    with copy_to_damage(published, tmp_path, monkeypatch) as copy:
        yield copy


def content_of(model: Path) -> Content:
    content: Content = json.loads((model / META).read_text())
    return content


# Publishing


def test_a_published_model_says_what_its_reader_needs(published: Path) -> None:
    assert sorted(path.name for path in published.iterdir()) == ["README.md", MANIFEST, META, TENSORS]
    card = (published / "README.md").read_text()
    assert (
        "accuracy 0.5 ± 0.1 over 20 tasks, 5-way" in card and f'metalearn.from_pretrained("{published.name}")' in card
    )
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "image-classification"
    content = content_of(published)
    config = content["config"]
    assert config["algorithm"] == {"_target_": "metalearn.algorithms.protonet.protonet"}
    assert (config["model"]["filters"], config["model"]["transductive"], content["any_ways"]) == (8, False, True)
    assert (config["dataset"]["ways"], config["dataset"]["shots"], config["dataset"]["seed"]) == (5, 1, None)
    assert content["test"] == TEST and "Apache-2.0" in content["licence"]
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["metalearn"] == version("metalearn-train")
    preprocessing = content["preprocessing"]
    assert (preprocessing["image_size"], preprocessing["channels"], preprocessing["inverted"]) == (28, 1, True)


def test_a_published_model_holds_nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_DATA", str(tmp_path / SECRET))
    lists = f"dataset.split={tmp_path / SECRET}/lists"
    saved_run(tmp_path / "run", *TINY, "dataset=image_folder", "model.filters=4", lists)
    export(tmp_path / "run", tmp_path / "model", licence="CC0")
    text = (tmp_path / "model" / META).read_text()
    assert SECRET not in text and str(tmp_path) not in text
    content = json.loads(text)
    assert content["licence"] == "CC0" and content["test"] is None and content["preprocessing"]["framing"] == "middle"


def test_what_cannot_be_published_is_named(run_dir: Path, published: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((run_dir, run_dir), "is there already, and not an empty folder"),
        ((published, tmp_path / "new"), "is published already; copy the folder"),
        ((tmp_path, tmp_path / "new"), "holds no run"),
        ((run_dir, published / META / "x"), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(*arguments)
    assert not (tmp_path / "new").exists()


def test_a_run_can_start_from_a_published_model(run_dir: Path, published: Path, tmp_path: Path) -> None:
    parts = saved_run(tmp_path / "next", *TINY, "seed=1", f"init_from={published}")
    for name, value in load_file(run_dir / "checkpoints/best/params.safetensors").items():
        assert torch.equal(parts.start[name], value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=maml_sinusoid"],
        ["algorithm=r2d2", "model=resnet12", "model.widths=[4,4,4,4]"],
        ["algorithm=finetune", "model.ways=400"],
        ["algorithm=fomaml", "dataset=mini_imagenet", "dataset.image_size=32", "model.filters=4", "precision=float64"],
        ["algorithm=protonet", "dataset.image_size=32", "model=torchvision", "model.name=shufflenet_v2_x0_5"],
        ["algorithm=anil", "inner=momentum", "model=module", "model.network._target_=tests.own_network.Small"],
    ],
)
def test_runs_of_every_kind_are_the_same_after_publishing(overrides: list[str], tmp_path: Path) -> None:
    network = "tests.own_network.Small" if "model=module" in overrides else None
    saved_run(tmp_path / "run", *overrides)
    export(tmp_path / "run", tmp_path / "model", network=network)
    before, after = (metalearn.load(tmp_path / name, network=network) for name in ("run", "model"))
    for name in ("name", "ways", "trained_ways", "shots", "transductive", "form"):
        assert getattr(before, name) == getattr(after, name)
    if network:
        with pytest.raises(ConfigError, match=r"it names the network tests\.own_network\.Small"):
            metalearn.load(tmp_path / "model")
    if before.form is None:
        x = np.linspace(-3, 3, 10)
        assert np.array_equal(*(learner.adapt(x, np.sin(x)).predict(x) for learner in (before, after)))
        return
    pictures = list(np.random.default_rng(0).integers(0, 256, (5, 30, 30), np.uint8))
    first, second = (
        learner.adapt(pictures, ["a", "b", "c", "d", "e"]).predict(pictures) for learner in (before, after)
    )
    assert first == second


def test_a_learner_of_a_table_needs_it_no_more(tmp_path: Path) -> None:
    cells = [f"{task},{row / 7:.3f},{row * task % 5},{'train' if task < 6 else 'val' if task < 8 else 'test'}"
             for task in range(10) for row in range(15)]  # fmt: skip
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["task,x,y,split", *cells]))
    of_rows = [f"dataset.file={file}", "dataset.task=task", "dataset.target=y", "dataset.split=split"]
    network = ["model=mlp", "model.inputs=1", "model.outputs=1", "algorithm=maml"]
    saved_run(tmp_path / "run", "dataset=table", *of_rows, *network, "trainer.val_tasks=2", "trainer.test_tasks=2")
    learner, x = metalearn.load(tmp_path / "run"), np.linspace(0, 1, 6)
    learner.save(tmp_path / "saved")
    export(tmp_path / "run", tmp_path / "published")
    file.unlink()
    for name in ("saved", "published"):
        again = metalearn.load(tmp_path / name)
        assert np.array_equal(again.adapt(x, x).predict(x), learner.adapt(x, x).predict(x))
        assert str(tmp_path) not in (tmp_path / name / "meta.json").read_text()


@pytest.mark.parametrize("frozen", ["true", pytest.param("false", marks=slow)])
def test_pretrained_weights_of_a_file_go_with_the_model(frozen: str, tmp_path: Path) -> None:
    from torchvision import models

    torch.manual_seed(0)
    file = tmp_path / f"{SECRET}.pth"
    torch.save(models.mobilenet_v3_small().half().state_dict(), file)
    saved_run(
        tmp_path / "run", "algorithm=protonet", "dataset.image_size=32", "model=torchvision", f"model.weights={file}",
        "model.name=mobilenet_v3_small", f"model.frozen={frozen}", "model.input_size=32",
    )  # fmt: skip
    export(tmp_path / "run", tmp_path / "model")
    pictures = list(np.random.default_rng(0).integers(0, 256, (5, 30, 30), np.uint8))

    def predicted(name: str) -> list[Prediction]:
        return metalearn.load(tmp_path / name).adapt(pictures, list("abcde")).predict(pictures)

    before = predicted("run")
    file.unlink()
    assert predicted("model") == before
    for name in (META, "README.md"):
        assert SECRET not in (tmp_path / "model" / name).read_text()
    metalearn.load(tmp_path / "model").save(tmp_path / "again")
    assert predicted("again") == before
    weights = tmp_path / "model/weights.safetensors"
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
    with pytest.raises(ConfigError, match=r"weights\.safetensors: differs from what was saved"):
        metalearn.load(tmp_path / "model")


def test_a_network_from_a_path_is_published_without_it(tmp_path: Path) -> None:
    file, network = tmp_path / "w.pth", "tests.own_network.FromFile"
    torch.manual_seed(0)
    torch.save(Small(5).state_dict(), file)
    for name in ("run", "scaled"):
        saved_run(
            tmp_path / name, "algorithm=maml", "model=module", f"model.network._target_={network}",
            f"+model.network.path={file}", f"+model.network.scaled={name == 'scaled'}",
        )  # fmt: skip
    out, key = tmp_path / "model", "model.network.path"
    with pytest.raises(ConfigError, match=f"is a path of this machine, .* type metalearn export … --without {key}"):
        export(tmp_path / "run", out, network=network)
    with pytest.raises(ConfigError, match=f"these have: {key}"):
        export(tmp_path / "run", out, network=network, without=["model.path"])
    with pytest.raises(ConfigError, match="without it the network gives other outputs"):
        export(tmp_path / "scaled", out, network=network, without=[key])
    assert not out.exists()
    export(tmp_path / "run", out, network=network, without=[key])
    pictures = list(np.random.default_rng(0).integers(0, 256, (5, 30, 30), np.uint8))
    first, second = (
        metalearn.load(tmp_path / name, network=network).adapt(pictures, list("abcde")).predict(pictures)
        for name in ("run", "model")
    )
    assert first == second and str(tmp_path) not in (out / META).read_text()


# Hostile and damaged model folders

COMMAND = {"_target_": "os.system", "command": f"touch {MARKER}"}


def with_part(part: str, **values: Any) -> Callable[[Content], object]:
    return lambda meta: meta["config"][part].update(values)


def wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"norm1.bias": torch.zeros(9)}


FORGED: dict[str, tuple[Callable[[Content], object] | None, Any, str]] = {
    "code": (lambda meta: meta["config"].update(algorithm=COMMAND), None, "algorithm._target_=os.system"),
    "a factory of another group": (
        with_part("algorithm", _target_="metalearn.tasks.glyphs.glyphs"), None, "is no factory of algorithm"),
    "code of a package": (
        lambda meta: meta["config"].update(loss={"_target_": "some_package.some_loss", "power": 3}), None,
        "Code of some_package would run here; if you trust it, give plugins="),
    "a network": (
        with_part("model", _target_="metalearn.models.module.module", network=COMMAND), None, "os.system"),
    "an environment variable": (with_part("dataset", split="${oc.env:SECRET}"), None, "no config of plain values"),
    "a path": (with_part("model", weights="/etc/passwd"), None, "weights=/etc/passwd"),
    "a key that does not exist": (with_part("model", filterz=8), None, "model.filterz: "),
    "a wrong value": (with_part("model", filters="8"), None, "model.filters='8'"),
    "a wrong size": (with_part("model", filters=9), None, "conv1.weight (here (9,"),
    "a wrong shape": (None, wide, "norm1.bias (here (8,), there (9,))"),
    "a missing parameter": (None, lambda params: {"conv1.weight": params["conv1.weight"]}, "there absent"),
}  # fmt: skip
"""A change of meta.json, one of the parameters, and what the message names. The digests fit."""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_model_is_refused_by_its_schema(name: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, tensors, named = FORGED[name]
    forge(model, change, tensors)
    with pytest.raises(ConfigError) as caught:
        metalearn.load(model)
    assert named in str(caught.value) and SECRET not in str(caught.value)
    assert evaluate.main([f"checkpoint={model}", "output=out"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said and SECRET not in said


def test_no_data_is_downloaded_to_where_a_model_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALEARN_DATA", "here")
    forge(model, with_part("dataset", _target_="metalearn.tasks.omniglot.omniglot", root="/elsewhere"))
    assert changed_config(read_learner(model).meta["config"], [], {}).dataset.root == "here"


# Class folders in, a table out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three characters of the test split as PNG files of another size: two of each to learn from, three to ask."""
    root = tmp_path_factory.mktemp("folders")
    for number, name in ((510, "alpha"), (520, "bet$a"), (530, "γ/c")):
        for place, drawing in enumerate(character(number, 56)[:5]):
            kind = "support" if place < 2 else "query"
            for folder in (root / kind / name, root / "flat"):
                folder.mkdir(parents=True, exist_ok=True)
                if kind == "query" or folder != root / "flat":
                    paper = Image.fromarray(255 - drawing).resize((64, 80))
                    paper.save(folder / f"{name.replace('/', '_')}{place}.png")
    return root


def adapted(model: Path, folders: Path, out: Path, query: str = "query", *more: str) -> int:
    arguments = {"--model": model, "--support": folders / "support", "--query": folders / query, "--out": out}
    return adapt.main([*(str(text) for pair in arguments.items() for text in pair), *more])


def test_class_folders_give_a_table_an_accuracy_and_two_pictures(
    published: Path, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert adapted(published, folders, tmp_path / "out") == 0
    with (tmp_path / "out/predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "label", "probability", "alpha", "bet$a", "γ/c"] and len(rows) == 9
    right = 0
    for row in rows:
        shares = {name: float(row[name]) for name in ("alpha", "bet$a", "γ/c")}
        assert row["label"] == max(shares, key=lambda name: shares[name]) and sum(shares.values()) == pytest.approx(
            1, abs=1e-5
        )
        assert row["probability"] == row[row["label"]] and (folders / "query" / row["file"]).is_file()
        right += row["file"].startswith(f"{row['label']}/")
    figures = json.loads((tmp_path / "out/accuracy.json").read_text())
    assert figures["correct"] == right and figures["pictures"] == 9 and figures["accuracy"] == right / 9
    assert figures["in_support"] == 0
    said = capfd.readouterr().out
    assert f"accuracy {right / 9:.2%} (95% interval " in said and "support pictures among" not in said
    with (tmp_path / "out/confusion.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.reader(file))
    assert table[0] == ["true label", "alpha", "bet$a", "γ/c"]
    assert [sum(map(int, row[1:])) for row in table[1:]] == [3, 3, 3]
    assert sum(int(table[n][n]) for n in (1, 2, 3)) == right
    for name in ("page.png", "confusion.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.width > 400 and len(picture.convert("RGB").getcolors(2**20)) > 20


def test_queries_without_class_folders_get_the_same_predictions(
    published: Path, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for query in ("query", "flat"):
        assert adapted(published, folders, tmp_path / query, query) == 0
        said.append(capfd.readouterr().out)
    tables = []
    for query in ("query", "flat"):
        with (tmp_path / query / "predictions.csv").open(newline="", encoding="utf-8") as file:
            tables.append({Path(row["file"]).name: row["label"] for row in csv.DictReader(file)})
    assert tables[0] == tables[1] and "no accuracy: its pictures lie in no class folders" in said[1]
    assert sorted(path.name for path in (tmp_path / "flat").iterdir()) == ["page.png", "predictions.csv"]


def test_queries_that_are_support_pictures_are_counted(
    published: Path, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders, tmp_path / "copy")
    shutil.copy(folders / "support/alpha/alpha0.png", tmp_path / "copy/query/alpha/renamed.png")
    for query, known in (("query", 1), ("support", 6)):
        assert adapted(published, tmp_path / "copy", tmp_path / f"out_{query}", query) == 0
        assert f"support pictures among the queries: {known};" in capfd.readouterr().out
        assert json.loads((tmp_path / f"out_{query}/accuracy.json").read_text())["in_support"] == known


def test_folders_that_cannot_be_used_are_named(
    published: Path, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders, copy)
    (copy / "query/alpha/broken.png").write_bytes(b"no picture")
    cases = []

    def refused(message: str, *more: str) -> None:
        code = adapted(published, copy, tmp_path / "out", "query", *more)
        said = capfd.readouterr().err
        cases.append((code, said, message))
        assert code == 2 and message in said and said.startswith("error: "), cases[-1]
        assert not (tmp_path / "out").exists()

    (copy / "support/loose.png").touch()
    refused("1 pictures lie in no class folder: loose.png")
    (copy / "support/loose.png").unlink()
    refused("broken.png: cannot be read: not recognised as a picture")
    (copy / "support/bet$a").rename(copy / "support/label")
    refused("the class label has the name of a column")
    shutil.rmtree(copy / "support")
    refused(f"--support {copy}/support: there is no such folder; type --support /path/to/pictures")
    assert adapted(published, folders, folders) == 2
    assert "is there already, and not an empty folder" in capfd.readouterr().err


def test_queries_of_classes_without_support_have_no_accuracy(
    published: Path, folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/support/alpha")
    assert adapted(published, tmp_path / "copy", tmp_path / "out") == 0
    assert "no accuracy: no support for alpha" in capfd.readouterr().out


def test_a_learner_that_does_not_take_the_folders_says_so(
    folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved_run(tmp_path / "run", "model.filters=8")
    assert adapted(tmp_path / "run", folders, tmp_path / "out") == 2
    assert "labels: they name 3 classes, and this learner (algorithm=maml) has" in capfd.readouterr().err
    saved_run(tmp_path / "waves", "experiment=maml_sinusoid")
    assert adapted(tmp_path / "waves", folders, tmp_path / "out") == 2
    assert "learns of no pictures; type a model of pictures" in capfd.readouterr().err


def test_the_interval_is_wilsons() -> None:
    """Its ends are the roots of (share − p)² = z² p (1 − p) / count."""
    for correct, count in ((0, 5), (9, 10), (50, 50), (97, 100)):
        truth = [0] * count
        said = [Prediction(0 if number < correct else 1, {}) for number in range(count)]
        reached, z = accuracy(said, truth), 1.959964
        share = correct / count
        low, high = np.roots([1 + z**2 / count, -(2 * share + z**2 / count), share**2])[::-1].real
        assert tuple(reached["interval95"]) == pytest.approx((max(0, low), high), abs=1e-9)
        assert (reached["correct"], reached["pictures"]) == (correct, count)


@pytest.mark.thorough
def test_the_programs_take_a_real_run_all_the_way(folders: Path, tmp_path: Path) -> None:
    def run(*command: object) -> Outcome:
        return Program([sys.executable, *map(str, command)], tmp_path).wait()

    short = ("trainer.steps=4", "trainer.val_every=4", "trainer.val_tasks=4", "trainer.test_tasks=20")
    support, query = folders / "support", folders / "query"
    adapting = ("-m", "metalearn", "adapt", "--model", "model", "--support", support, "--query", query, "--out", "out")
    for command in (
        (ROOT / "train.py", *TINY, *short, "hydra.run.dir=run"),
        (ROOT / "scripts/export.py", "run", "--out", "model"),
        (ROOT / "scripts/evaluate.py", "checkpoint=model", "output=evaluated"),
        adapting,
    ):
        outcome = run(*command)
        assert outcome.code == 0, outcome.text
    of_run, again = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "evaluated"))
    assert again["test"] == of_run["test"]
    assert again["params"] == hashlib.sha256((tmp_path / "model" / TENSORS).read_bytes()).hexdigest()
    assert content_of(tmp_path / "model")["test"]["accuracy"] == of_run["test"]["accuracy"]
    outcome = run(*adapting)
    assert outcome.code == 2 and outcome.text.startswith("error: --out=out: is there already"), outcome.text
