"""Classes that a learner was trained on do not test it unnoticed."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import metalearn
from metalearn.api.export import export
from metalearn.app.job import script, to_job
from metalearn.app.parts import assemble, check_unseen, seen_in
from metalearn.app.run import seen_by
from metalearn.cli.evaluate import main as evaluate
from metalearn.cli.train import main as train
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from metalearn.runs import metrics
from metalearn.runs.checkpoint import read
from metalearn.runs.folder import evaluation_report
from metalearn.runs.metrics import Seen, from_json, from_meta, jsonable, overlap
from metalearn.tasks.cifar100 import cifar_fs, fc100
from metalearn.tasks.common.episodes import SPLITS, EpisodeSpec, Seeds, identities_of
from metalearn.tasks.common.samples import Pretraining
from metalearn.tasks.common.stored import DataPlace
from metalearn.tasks.image_folder import image_folder
from metalearn.tasks.omniglot import characters, omniglot, omniglot_characters
from metalearn.types import TaskSource
from tests.runs import ROOT
from tests.saved import saved_run

SMALL = ("algorithm=protonet", "model.filters=4")
SEEDS = Seeds(0, 0)

SHORT = (
    "trainer.steps=1", "trainer.meta_batch_size=1", "trainer.val_tasks=2", "trainer.test_tasks=2",
    "logger.plots=false", "logger.report=false", "logger.tensorboard=false",
)  # fmt: skip

# By hand from omniglot_characters.csv: of the test characters of each list, how many `paper` trains on, how many it
# validates on, and how many there are.
PAPERS = {"lake": (450, 36, 659), "vinyals": (294, 22, 423), "paper": (0, 0, 423)}


def of_omniglot(root: Path, split: str) -> TaskSource:
    return omniglot(
        place=DataPlace(str(root), download=False), split=split, episode=EpisodeSpec(5, 1, 1), image_size=28,
        channels=1, rotations=True, seeds=SEEDS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory, omniglot_root: Path) -> Path:
    """The checkpoint of a run on Omniglot's characters of `paper`."""
    folder = tmp_path_factory.mktemp("seen") / "run"
    saved_run(folder, *SMALL, "dataset=omniglot", f"dataset.root={omniglot_root}", seen=True)
    return folder / "checkpoints/best"


def job_of(*overrides: str) -> Any:
    return to_job(*compose_config(overrides), script(ROOT / "train.py"), [])


def result_in(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("split", PAPERS)
def test_an_evaluation_counts_trained_characters(
    split: str, papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_on, validated_on, classes = PAPERS[split]
    command = [f"checkpoint={papers}", "tasks=2", f"dataset.split={split}", f"output={tmp_path / 'out'}"]
    code = evaluate(command)
    said = capsys.readouterr()
    assert "cannot be checked" not in said.err
    if trained_on:
        assert code == 2 and not (tmp_path / "out").exists()
        assert f"{trained_on} of its {classes} test classes were trained on before" in said.err
        assert f"{validated_on} more were validated on" in said.err and "type the dataset" in said.err
    else:
        assert code == 0 and "seen_classes" not in result_in(tmp_path / "out")["test"]
    assert evaluate([*command, "seen_classes=report"]) == 0
    counted = {"trained_on": trained_on, "validated_on": validated_on, "classes": classes, "complete": True}
    assert result_in(tmp_path / "out")["test"]["seen_classes"] == counted
    assert f"trained on before: {trained_on} of {classes}" in capsys.readouterr().out


def test_validation_tasks_are_refused_for_training_classes_only(papers: Path, tmp_path: Path) -> None:
    command = [f"checkpoint={papers}", "on=val", "tasks=2", f"output={tmp_path / 'out'}"]
    assert evaluate(command) == 0
    assert evaluate([*command, "dataset.split=lake"]) == 2


def test_a_checkpoint_without_known_classes_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(tmp_path / "run", *SMALL)
    assert evaluate([f"checkpoint={tmp_path / 'run/checkpoints/best'}", "tasks=2"]) == 0
    assert capsys.readouterr().err.count("cannot be checked") == 1
    start = assemble(job_of(*SMALL, f"init_from={tmp_path / 'run/checkpoints/best'}"))
    assert not seen_by(start, None).complete and "cannot be checked" in start.start_notes[-1]


def test_a_checkpoint_without_classes_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "run", *SMALL, *SHORT)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    begun = f"resume={tmp_path / 'run/checkpoints/best'}"
    assert train([*SMALL, *SHORT, begun, f"hydra.run.dir={tmp_path / 'other'}"]) == 0
    assert capsys.readouterr().err.count("cannot be checked") == 1


def test_classes_without_names_are_not_said_to_be_known(tmp_path: Path) -> None:
    """Neither those of a dataset that does not name them, nor those of pretrained weights."""
    nameless: Any = SimpleNamespace(classes=lambda split: 5, unit=lambda split: "tasks")
    assert not seen_in(nameless, 1).complete and seen_in(nameless, 0).complete
    assert check_unseen(Seen(), nameless, "test", "refuse") == {}
    counted = check_unseen(Seen(), nameless, "test", "report")["seen_classes"]
    assert counted == {"trained_on": None, "validated_on": None, "classes": None, "complete": False}
    pretrained = Pretraining(nameless, nameless)
    assert not seen_in(pretrained, 1).complete
    assert check_unseen(Seen(), pretrained, "test", "report")["seen_classes"] == counted
    numbers: Any = SimpleNamespace(classes=lambda split: None, unit=lambda split: "tasks")
    assert seen_in(numbers, 1).complete and check_unseen(Seen(), numbers, "test", "report") == {}


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ((3, 0, 7, True), "3 of 7"),
        ((3, 2, 7, True), "3 of 7, and 2 more validated on"),
        ((0, 0, 7, False), "0 of 7, of those that are known"),
        ((None, None, None, False), "not known"),
    ],
)
def test_a_report_says_what_is_known(counts: tuple[object, ...], line: str) -> None:
    seen = dict(zip(("trained_on", "validated_on", "classes", "complete"), counts, strict=True))
    figures = {"accuracy": 0.5, "ci95": 0.1, "tasks": 2, "transductive": False, "by_step": {"0": 0.5}}
    read_again = from_json(jsonable(figures | {"seen_classes": seen}))
    assert evaluation_report(read_again).endswith(f"\nclasses trained on before: {line}")


def test_a_run_does_not_validate_on_classes_that_it_begins_from(
    omniglot_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (*SMALL, "dataset=omniglot", f"dataset.root={omniglot_root}")
    saved_run(tmp_path / "lake", *data, "dataset.split=lake", seen=True)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    begun = f"init_from={tmp_path / 'lake/checkpoints/best'}"
    assert train([*data, "dataset.split=vinyals", begun, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "155 of its 172 val classes were trained on before" in capsys.readouterr().err


def test_fitting_parameters_of_another_network_are_named(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", *SMALL, "model.downsample=pool")
    begun = [*SMALL, f"init_from={tmp_path / 'run/checkpoints/best'}"]
    note = "init_from: was trained with model.downsample='pool', which is 'stride' here"
    assert assemble(job_of(*begun)).start_notes.count(note) == 1
    assert not any("downsample" in line for line in assemble(job_of(*begun, "model.downsample=pool")).start_notes)


def test_a_start_from_other_parameters_sees_their_classes_too(
    papers: Path,
    omniglot_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run refuses to test on them, and its checkpoints hand them on."""
    command = (
        *SMALL, *SHORT, "dataset=omniglot", f"dataset.root={omniglot_root}", "dataset.split=lake",
        f"init_from={papers}", f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train(list(command)) == 2 and "450 of its 659 test classes" in capsys.readouterr().err
    assert train([*command, "seen_classes=report"]) == 0
    assert result_in(tmp_path / "run")["test"]["seen_classes"]["trained_on"] == 450
    lake, paper = (
        {character.digest for character in characters() if character.parts[name] == "train"}
        for name in ("lake", "paper")
    )
    handed_on = from_meta(read(tmp_path / "run/checkpoints/best").meta)
    assert len(handed_on.train) == len(lake | paper) > len(lake)
    published = export(tmp_path / "run", tmp_path / "published")
    assert published["test"]["seen_classes"]["trained_on"] == 450


def test_pretrained_weights_have_unknown_classes(tmp_path: Path) -> None:
    """They stay where those do not fit, and in a frozen network everywhere."""
    small = ("algorithm=protonet", "model=torchvision", "dataset.image_size=32", "model.name=mobilenet_v3_small")
    network = torchvision.models.mobilenet_v3_small(weights=None)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    saved_run(tmp_path / "run", *small, seen=True)
    begun = (*small, f"init_from={tmp_path / 'run/checkpoints/best'}")
    for weights, complete in ((), True), ((f"model.weights={tmp_path / 'weights.pth'}",), False):
        assert seen_by(assemble(job_of(*begun, *weights)), None).complete is complete


def test_a_run_without_steps_has_only_validated() -> None:
    """Such as that of algorithm=scratch."""
    seen = {steps: seen_by(assemble(job_of(*SMALL, f"trainer.steps={steps}")), None) for steps in (0, 1)}
    assert not seen[0].train and len(seen[1].train) == 400 and seen[0].val == seen[1].val


def test_a_published_model_has_the_classes_of_its_checkpoint(papers: Path, tmp_path: Path) -> None:
    export(papers, tmp_path / "published")
    out = f"output={tmp_path / 'out'}"
    assert evaluate([f"checkpoint={tmp_path / 'published'}", "tasks=2", "dataset.split=vinyals", out]) == 2
    assert evaluate([f"checkpoint={tmp_path / 'published'}", "tasks=2", out]) == 0


def test_the_same_classes_are_known_again_in_another_division(omniglot_root: Path, tmp_path: Path) -> None:
    """CIFAR-FS and FC100 divide the same classes; a supervised run sees characters; a folder has other splits."""
    place = DataPlace(str(tmp_path), download=False)
    shape = {"episode": EpisodeSpec(5, 1, 1), "rotations": False, "seeds": SEEDS}
    names: dict[str, dict[str, set[str]]] = {}
    for line in (ROOT / "metalearn/tasks/cifar100_classes.csv").read_text().splitlines()[1:]:
        name, _, *parts = line.split(",")
        for division, part in zip(("cifar_fs", "fc100"), parts, strict=True):
            names.setdefault(division, {}).setdefault(part, set()).add(name)
    found = {}
    for make in (cifar_fs, fc100):
        source = make(place=place, image_size=32, channels=3, **shape)
        found[make] = [classes_without_pictures(source, split) for split in ("train", "val", "test")]
    train, val, _ = found[cifar_fs]
    common = overlap(Seen(train, val), "test", found[fc100][2])
    assert common["trained_on"] == len(names["cifar_fs"]["train"] & names["fc100"]["test"]) > 0
    assert common["validated_on"] == len(names["cifar_fs"]["val"] & names["fc100"]["test"])

    supervised = omniglot_characters(
        place=DataPlace(str(omniglot_root), download=False), split="paper", ways=1100, train_drawings=15,
        val_drawings=2, image_size=28, channels=1, known=1, seeds=SEEDS,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="294 of its 423 test classes"):
        check_unseen(seen_in(supervised, 1), of_omniglot(omniglot_root, "vinyals"), "test", "refuse")
    assert check_unseen(seen_in(supervised, 1), supervised, "test", "refuse") == {}

    make_pictures(tmp_path, 6)
    divided = {
        str(split): image_folder(
            root=str(root), split=split, episode=EpisodeSpec(2, 1, 1), image_size=8, channels=1, rotations=False,
            seeds=SEEDS,
        )
        for root, split in (
            (tmp_path, "folders"), (tmp_path / "train", [0.34, 0.33, 0.33]), (tmp_path, [0.4, 0.3, 0.3]),
        )
    }  # fmt: skip
    own, other, whole = divided.values()
    everything = [
        frozenset[str]().union(*(identities_of(source, split) or () for split in SPLITS)) for source in (own, whole)
    ]
    assert everything[0] == everything[1] and len(everything[0]) == 18
    assert check_unseen(seen_in(own, 1), own, "test", "refuse") == {}
    with pytest.raises(ConfigError, match="2 of its 2 test classes"):
        check_unseen(seen_in(own, 1), other, "test", "refuse")


def make_pictures(folder: Path, classes: int, name: str = "") -> None:
    """Folders of so many classes each for training, validation and test."""
    for split in ("train", "val", "test"):
        for number in range(classes):
            place = folder / split / f"{split}{name}{number}"
            place.mkdir(parents=True)
            for picture in range(2):
                Image.fromarray(np.full((8, 8), 40 * picture + 9 * len(name), np.uint8)).save(place / f"{picture}.png")


def test_a_run_does_not_go_on_with_other_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dataset.root` may change, since data may move; what lies there may not."""
    make_pictures(tmp_path / "mine", 3)
    make_pictures(tmp_path / "other", 3, name="x")
    command = (
        *SMALL, *SHORT, "dataset=image_folder", "dataset.split=folders", "dataset.ways=2", "dataset.queries=1",
        "dataset.image_size=16", "trainer.val_every=1", f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train([*command, f"dataset.root={tmp_path / 'mine'}"]) == 0, capsys.readouterr().err
    copied = [f"launch.model={tmp_path / 'copy'}"]
    assert train([*command, f"dataset.root={tmp_path / 'other'}", *copied]) == 2, "a result is that of its own data"
    assert "dataset=" in capsys.readouterr().err and not (tmp_path / "copy").exists()
    assert train([*command, f"dataset.root={tmp_path / 'nowhere'}"]) == 0, "data that are gone make the result no other"
    longer = [*command, "trainer.steps=2"]
    assert train([*longer, f"dataset.root={tmp_path / 'other'}"]) == 2
    assert "dataset=" in capsys.readouterr().err
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert train([*longer, f"dataset.root={tmp_path / 'moved'}"]) == 0, capsys.readouterr().err
    assert result_in(tmp_path / "run")["steps"] == 2


def classes_without_pictures(source: TaskSource, split: str) -> frozenset[str]:
    """The identities of CIFAR-100's classes, whose pictures are not here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metalearn.tasks.cifar100.cached_array", lambda *args, **options: None)
        identities = identities_of(source, split)
    assert identities is not None
    return identities


class ValidatesOnTrainingClasses:
    """Tasks on drawn characters, in which a caller has mixed the splits up."""

    def __init__(self) -> None:
        self._glyphs = assemble(job_of("dataset=glyphs", "dataset.image_size=16", *SMALL)).source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._glyphs, name)

    def identities(self, split: str) -> list[str]:
        return ["a", "b"] if split in ("train", "val") else ["c"]


def test_the_library_does_not_validate_on_training_classes() -> None:
    network = metalearn.named("conv4", filters=4)
    options = {"steps": 1, "meta_batch_size": 1, "val_tasks": 2, "test_tasks": 2, "progress": False}
    with pytest.raises(ValueError, match=r"2 of its 2 val classes were trained on before.*seen_classes=report"):
        metalearn.train("protonet", network, ValidatesOnTrainingClasses(), **options)
    learned = metalearn.train("protonet", network, ValidatesOnTrainingClasses(), seen_classes="report", **options)
    assert learned.evaluate()["tasks"] == 2


def test_what_the_library_has_trained_refuses_them_too(omniglot_root: Path) -> None:
    tasks = {
        split: metalearn.named("omniglot", root=str(omniglot_root), split=split, queries=1)
        for split in ("paper", "vinyals")
    }
    network = metalearn.named("conv4", filters=4)
    sizes = {"meta_batch_size": 1, "val_tasks": 2, "test_tasks": 2}
    learned = metalearn.train("protonet", network, tasks["paper"], steps=1, progress=False, **sizes)
    assert "seen_classes" not in learned.evaluate()
    with pytest.raises(ValueError, match="294 of its 423 test classes"):
        learned.evaluate(tasks["vinyals"])
    counted = learned.evaluate(tasks["vinyals"], seen_classes="report")["seen_classes"]
    assert counted["trained_on"] == 294 and counted["complete"]
    pretrained = replace(learned, taught=learned.taught._replace(seen=Seen(complete=False)))
    assert not pretrained.evaluate(seen_classes="report")["seen_classes"]["complete"]
    untrained = metalearn.train("scratch", network, tasks["paper"], steps=0, progress=False, **sizes)
    assert untrained.evaluate(tasks["vinyals"], seen_classes="report")["seen_classes"]["trained_on"] == 0


def test_values_that_are_not_finite_have_no_interval() -> None:
    mean, ci95 = metrics.Tested("mse", [1.0, math.inf], []).mean()
    assert mean == math.inf and math.isnan(ci95)
