"""Evaluation: one fixed list of test tasks, a line for each task, and a script that evaluates any checkpoint."""

import csv
import hashlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from metalearn.app.evaluation import Member, pinned
from metalearn.app.parts import Parts
from metalearn.cli import evaluate
from metalearn.config.compose import compose_config, parsed
from metalearn.config.saved import changed_config
from metalearn.config.values import to_container
from metalearn.runs.checkpoint import Snapshot
from metalearn.runs.metrics import task_list_id
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.common.stored import DataPlace
from metalearn.tasks.omniglot import omniglot
from metalearn.training.chunks import digests
from metalearn.types import Batch, Episode, Strategy
from tests.runs import ROOT, Outcome, Program, result_of, slow
from tests.saved import saved_run

pytestmark = pytest.mark.thorough

TINY = (
    "trainer.steps=6", "trainer.meta_batch_size=4", "trainer.val_every=6", "trainer.val_tasks=4",
    "trainer.test_tasks=10", "model.filters=16", "logger.tensorboard=false", "logger.plots=false",
    "logger.report=false",
)  # fmt: skip
RUNS = {
    "maml": ("algorithm=maml",),
    "protonet": ("algorithm=protonet", "dataset.train_ways=8"),
    "finetune": (
        "algorithm=finetune", "trainer.meta_batch_size=30", "trainer.task_chunk=8", "workers=2",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of each algorithm."""
    folder = tmp_path_factory.mktemp("trained")
    for name, overrides in RUNS.items():
        command = [sys.executable, str(ROOT / "train.py"), *TINY, *overrides, f"hydra.run.dir=runs/{name}"]
        outcome = Program(command, folder).wait()
        assert outcome.code == 0, outcome.text
    return folder / "runs"


def evaluated(folder: Path, *arguments: str, torchrun: int | None = None) -> Outcome:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"] if torchrun else []
    return Program([sys.executable, *start, str(ROOT / "scripts/evaluate.py"), *arguments], folder).wait()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_every_test_task(name: str, trained: Path) -> None:
    test = result_of(trained / name)["test"]
    with (trained / name / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["task"] for row in rows] == [str(number) for number in range(10)]
    assert test["tasks"] == 10 and len({row["digest"] for row in rows}) == 10
    for step, mean in test["by_step"].items():
        assert sum(float(row[f"accuracy_{step}"]) for row in rows) / 10 == pytest.approx(mean)
    assert test["task_list"] == task_list_id({"digest": torch.tensor([[int(row["digest"])] for row in rows])})
    assert test["task_list"].startswith("v1-")


def test_every_run_on_a_dataset_is_evaluated_on_the_same_tasks(trained: Path) -> None:
    assert len({result_of(trained / name)["test"]["task_list"] for name in RUNS}) == 1


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("maml", ["workers=2"]),
        ("finetune", ["alone"]),
        pytest.param("finetune", ["strategy=ddp"], marks=slow),
        pytest.param("maml", ["alone"], marks=slow),
        pytest.param("maml", ["strategy=ddp"], marks=slow),
        pytest.param("finetune", ["workers=2"], marks=slow),
    ],
)
def test_an_evaluation_is_the_same_with_any_number_of_workers(
    name: str, how: list[str], trained: Path, tmp_path: Path
) -> None:
    arguments = [f"checkpoint={trained / name / 'checkpoints/best'}", "output=out", *(how if how != ["alone"] else [])]
    outcome = evaluated(tmp_path, *arguments, torchrun=2 if how == ["strategy=ddp"] else None)
    assert outcome.code == 0, outcome.text
    assert (tmp_path / "out/test.csv").read_bytes() == (trained / name / "test.csv").read_bytes()
    run, again = result_of(trained / name), result_of(tmp_path / "out")
    assert again["test"] == run["test"] and again["workers"] == (1 if how == ["alone"] else 2)
    assert f"test accuracy {run['test']['accuracy']:.2%}" in outcome.text


def test_other_tasks_than_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    checkpoint = f"checkpoint={trained / 'protonet/checkpoints/last'}"
    outcome = evaluated(tmp_path, checkpoint, "ways=20", "shots=5", "tasks=4", "model.transductive=false", "on=val")
    assert outcome.code == 0, outcome.text
    (folder,) = (trained / "protonet/evaluations").iterdir()
    figures = result_of(folder)["val"]
    assert figures["tasks"] == 4 and figures["transductive"] is False
    assert (folder / "val.csv").exists() and "model.transductive=false" in folder.name


def test_keys_that_follow_others_still_do(trained: Path, tmp_path: Path) -> None:
    """A checkpoint's config holds numbers; a number that stood for another key must still follow that key."""
    for name, override in (("maml", "trainer.eval_seed=7"), ("finetune", "ways=7")):
        checkpoint = f"checkpoint={trained / name / 'checkpoints/best'}"
        outcome = evaluated(tmp_path, checkpoint, override, "tasks=4", f"output={name}")
        assert outcome.code == 0, outcome.text
        after, before = (result_of(folder)["test"] for folder in (tmp_path / name, trained / name))
        assert after["task_list"] != before["task_list"]
        assert len((tmp_path / name / "test.csv").read_text().splitlines()) == 5


def test_a_key_with_a_value_of_its_own_keeps_it() -> None:
    """`dataset.eval_seed` follows `trainer.eval_seed`, unless the run had another one."""
    own, following = (to_container(compose_config(overrides).config) for overrides in (["dataset.eval_seed=5"], []))
    assert changed_config(own, ["trainer.eval_seed=7"], {}).dataset.eval_seed == 5
    assert changed_config(own, ["dataset=glyphs", "trainer.eval_seed=7"], {}).dataset.eval_seed == 7
    assert changed_config(following, ["trainer.eval_seed=7"], {}).dataset.eval_seed == 7


def test_learners_on_features_take_those_of_any_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = saved_run(tmp_path / "run", *TINY, "algorithm=protonet", "dataset.shots=2", "dataset.train_ways=7")
    checkpoint = f"checkpoint={tmp_path / 'run/checkpoints/best'}"
    assert evaluate.main([checkpoint, "algorithm=simpleshot", f"output={tmp_path / 'out'}"]) == 0
    support, query = parts.source.episodes("test", torch.arange(10))
    params = {name: value.expand(10, *value.shape) for name, value in parts.start.items()}
    assert parts.model.features is not None and "head.weight" not in params
    known, features = (F.normalize(parts.model.features(params, batch.x), dim=2) for batch in (support, query))
    means = torch.stack(
        [torch.stack([k[y == way].mean(0) for way in range(5)]) for k, y in zip(known, support.y, strict=True)]
    )
    nearest = (features.unsqueeze(2) - means.unsqueeze(1)).norm(dim=3).argmin(dim=2)
    with (tmp_path / "out/test.csv").open(newline="") as file:
        found = [float(row["accuracy_0"]) for row in csv.DictReader(file)]
    assert found == pytest.approx((nearest == query.y).double().mean(dim=1).tolist())
    assert len(set(found)) > 1, "the tasks are all alike, and the test shows nothing"
    assert evaluate.main([checkpoint, "algorithm=laplacian_shot", f"output={tmp_path / 'other'}"]) == 2
    assert "state.centre (here (16,), there absent)" in capsys.readouterr().err


def test_an_ensemble_is_the_mean_of_the_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (*TINY, "algorithm=maml", "dataset.shots=2", "algorithm.eval_steps=1", "algorithm.inner_lr=0.3")
    runs = [saved_run(tmp_path / f"run{seed}", *overrides, f"seed={seed}") for seed in (0, 1)]
    first, second = (tmp_path / f"run{seed}/checkpoints/best" for seed in (0, 1))
    assert evaluate.main([f"checkpoint={first}", f"ensemble=[{second}]", f"output={tmp_path / 'out'}"]) == 0
    assert "mean of 2 checkpoints" in capsys.readouterr().out
    support, query = runs[0].source.episodes("test", torch.arange(10))
    correct, losses = [], []
    for task in range(10):
        alone = Batch(support.x[task : task + 1], support.y[task : task + 1])
        logits = [run.algorithm.adapt(run.start, alone)(query.x[task : task + 1])[0] for run in runs]
        probabilities = (logits[0].softmax(dim=1) + logits[1].softmax(dim=1)) / 2
        correct.append((probabilities.argmax(dim=1) == query.y[task]).double().mean().item())
        losses.append(F.nll_loss(probabilities.log(), query.y[task]).item())
    with (tmp_path / "out/test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy_0"]) for row in rows] == pytest.approx(correct)
    assert [float(row["loss_0"]) for row in rows] == pytest.approx(losses, rel=1e-5)
    assert "accuracy_1" not in rows[0] and len(set(losses)) > 1
    result = result_of(tmp_path / "out")
    assert result["checkpoint"] == str(first.resolve())
    assert [member["checkpoint"] for member in result["ensemble"]] == [str(second.resolve())]
    assert result["params"] != result["ensemble"][0]["params"]


def test_a_training_under_way_does_not_change_what_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "run", *TINY, "algorithm=maml")
    best = tmp_path / "run/checkpoints/best"
    read, join = best.resolve(), Parts.connect

    def find_a_better_one(parts: Parts) -> Strategy:
        shutil.copytree(read, later := read.with_name("step_000009"))
        (later / "params.safetensors").write_bytes(b"other parameters")
        best.unlink()
        best.symlink_to(later.name)
        return join(parts)

    monkeypatch.setattr(Parts, "connect", find_a_better_one)
    assert evaluate.main([f"checkpoint={best}", f"output={tmp_path / 'out'}"]) == 0
    result = result_of(tmp_path / "out")
    assert best.resolve() != read and result["checkpoint"] == str(read)
    assert result["params"] == hashlib.sha256((read / "params.safetensors").read_bytes()).hexdigest()


def test_the_ranks_of_an_evaluation_read_the_same_checkpoints(tmp_path: Path) -> None:
    given = ["checkpoint=run/best", "tasks=7", "ensemble=[run/last,'a b']", "output=out"]
    folders = [tmp_path / name for name in ("step_1", "it's", "c")]
    members = [Member("k", Path("run/best"), folder, Snapshot({}, {}, {})) for folder in folders]
    tasks, *rest = pinned(given, members, Path("out"))
    assert tasks == "tasks=7" and sorted(argument.partition("=")[0] for argument in rest) == [
        "checkpoint", "ensemble", "output",
    ]  # fmt: skip
    assert f"checkpoint={folders[0]}" in rest and "output=out" in rest
    (others,) = (argument.partition("=")[2] for argument in rest if argument.startswith("ensemble="))
    (override,) = parsed([f"ensemble={others}"])
    assert override.value() == list(map(str, folders[1:]))


def test_the_members_of_an_ensemble_should_be_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {
        "maml": [],
        "fast": ["algorithm.inner_lr=0.9"],
        "anil": ["algorithm=anil"],
        "pool": ["model.downsample=pool"],
    }
    for name, own in kinds.items():
        saved_run(tmp_path / name, *TINY, "dataset.image_size=16", *own)
    maml, *others = (f"{tmp_path}/{name}/checkpoints/best" for name in kinds)
    command = [f"checkpoint={maml}", f"ensemble=[{','.join([maml, *others])}]", f"output={tmp_path}/out"]
    assert evaluate.main([*command, "model.transductive=false"]) == 0
    said = capsys.readouterr().err
    for path, key in zip(
        others, ("algorithm.inner_lr=0.9", "algorithm._target_=", "model.downsample='pool'"), strict=True
    ):
        assert any(f"ensemble={path}: " in line and key in line for line in said.splitlines()), said
    assert "model.transductive" not in said, "it was typed, and is that of all"
    assert said.count("was trained with") == 3


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("ways=20", "model: it has 5 outputs, and this dataset's tasks need 20"),
        ("dataset.wayz=20", "did you mean dataset.ways?"),
        ("on=train", "on=train: must be one of test, val"),
        ("model.filters=32", "holds parameters of another model"),
        ("algorithm=supervised", "algorithm=supervised"),
        ("optimizer.lr=1", "optimizer.lr=1: has no effect on an evaluation"),
        ("checkpoint=nowhere", "checkpoint=nowhere: must be the folder of a checkpoint"),
        ("checkpoint=", "checkpoint: missing"),
        ("ensemble=[]", "ensemble=[]: must be a list of checkpoints"),
        ("ensemble=best", "ensemble=best: must be a list of checkpoints"),
        ("ensemble=[nowhere]", "ensemble=nowhere: must be the folder of a checkpoint"),
        ("ensemble=[", "ensemble=[: cannot be read"),
        ("ensemble=[other/checkpoints/best]", "ensemble=other/checkpoints/best: holds parameters of another model"),
    ],
)
def test_what_does_not_fit_is_refused(
    overrides: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_run(Path("run"), *TINY)
    saved_run(Path("other"), *TINY, "model.filters=8")
    assert evaluate.main(["checkpoint=run/checkpoints/best", "output=out", overrides]) == 2
    said = "".join(capfd.readouterr())
    assert named in said and "Traceback" not in said and not Path("out").exists(), said


def test_different_tasks_have_different_digests() -> None:
    x, y = torch.zeros(2, 3, 1, 4, 4), torch.zeros(2, 3, dtype=torch.int64)
    other = x.clone()
    other[1, 2, 0, 3, 3] = 1e-30
    first, second = (digests(Episode(Batch(x, y), Batch(value, y))).flatten().tolist() for value in (x, other))
    assert first[0] == first[1] == second[0] != second[1]


@slow
@pytest.mark.parametrize(("ways", "name"), [(5, "v1-b91b9cde6f32"), pytest.param(20, "v1-2b705f9c11cd", marks=slow)])
def test_the_list_of_omniglots_test_tasks_is_the_published_one(ways: int, name: str, omniglot_root: Path) -> None:
    """If this changes, old results and new ones have different tasks: raise metrics.LIST_VERSION."""
    source = omniglot(
        place=DataPlace(str(omniglot_root), download=False), split="paper", episode=EpisodeSpec(ways, 1, 1),
        image_size=28, channels=1, rotations=True, seeds=Seeds(0, 20170309),
    )  # fmt: skip
    assert task_list_id({"digest": digests(source.episodes("test", torch.arange(600)))}) == name
