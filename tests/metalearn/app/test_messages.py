"""What users type wrong: the commands end early with one message that names it and says what to type."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

import metalearn
from benchmarks import reproduce
from metalearn.api.export import export as publish
from metalearn.cli import adapt, cache, doctor, evaluate, export, runs, train
from metalearn.config.check import RANK_VARIABLES
from tests.runs import PROGRAM
from tests.saved import saved_run

Main = Callable[[list[str]], int]

LONG = "x" * 300
"""A name that no file can have."""

TINY = ("algorithm=protonet", "model.filters=4", "model.transductive=false")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run, its model, a run that has not begun, pictures, and things of a wrong kind."""
    folder = tmp_path_factory.mktemp("messages")
    saved_run(folder / "run", *TINY)
    publish(folder / "run", folder / "model")
    shutil.copytree(folder / "run", folder / "damaged", symlinks=True)
    (folder / "damaged/checkpoints/step_000000/params.safetensors").write_bytes(b"x")
    (folder / "file").write_text("neither a folder nor a picture")
    (folder / "empty").mkdir()
    for name in ("cat", "dog"):
        (folder / "pictures" / name).mkdir(parents=True)
        Image.new("L", (9, 9)).save(folder / "pictures" / name / "1.png")
    shutil.copytree(folder / "pictures", folder / "broken")
    (folder / "broken/cat/1.png").write_bytes(b"no picture")
    shutil.copytree(folder / "pictures", folder / "one")
    shutil.rmtree(folder / "one/dog")
    (folder / "drawn").mkdir()
    line = {"step": 1, "split": "val", "accuracy": 0.5, "ci95": 0.1, "loss": 1.0, "elapsed_seconds": 1.0}
    (folder / "drawn/metrics.jsonl").write_text(json.dumps(line) + "\n")
    for name, table in (("no_yaml", "{a: ["), ("no_number", "title: x\nrows: {a: {method: m, run: x, paper: high}}")):
        (folder / name).mkdir()
        (folder / name / "table.yaml").write_text(table)
    return folder


def training(arguments: list[str]) -> int:
    return train.main(["run=wrong", *arguments], PROGRAM)


def adapting(arguments: list[str]) -> int:
    given = {"--model": "run", "--support": "pictures", "--query": "pictures", "--out": "out"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    return adapt.main([word for pair in given.items() for word in pair])


def evaluating(arguments: list[str]) -> int:
    return evaluate.main(["checkpoint=run/checkpoints/best", "tasks=4", *arguments])


CASES: list[tuple[Main, str, str]] = [
    (training, "resume=model", "which has no state to go on from; type init_from=model"),
    (training, "resume=run", "resume=run: is the folder of a run; type resume=run/checkpoints/best"),
    (training, "resume=empty", "resume=empty: holds no complete checkpoint; type resume=…/checkpoints/best"),
    (training, "resume=", "resume=: must be the folder of a checkpoint; type resume=…/checkpoints/best"),
    (training, "init_from=run", "init_from=run: is the folder of a run; type init_from=run/checkpoints/best"),
    (training, "init_from=file", "init_from=file: must be the folder of a checkpoint; type init_from="),
    (training, f"init_from={LONG}", "must be the folder of a checkpoint; type init_from="),
    (training, "init_from=model experiment=maml_sinusoid", "none of its 12 fits; type the algorithm and the model"),
    (training, "init_from=model init_strict=true", "or init_strict=false to take what fits"),
    (training, "hydra.run.dir=file", "hydra.run.dir=file: is no folder; type run=NAME"),
    (training, "seed=???", "seed=???: needs a value; type seed=VALUE"),
    (training, "seed=${oc.env:NO_SUCH_VARIABLE}", "seed: KeyError raised while resolving interpolation: \"Environment"),
    (training, "algorithm=protonet model=mlp model.hidden=[]", "algorithm, model: nothing to learn, since this algo"),
    (training, "hydra.job.chdir=true", "hydra.job.chdir=true: paths of this program begin at the folder in which"),
    (training, "resume=run/checkpoints/best resume_changes=[precision]", "goes on in its own precision; type init"),
    (training, "hydra.nope=1", "Key 'nope' not in 'HydraConf'; metalearn train --cfg hydra lists"),
    (training, "--config-name=mine", "=mine: this program composes its own conf; type --config-dir=FOLDER"),
    (training, "hydra.searchpath=[file:///mine]", "hydra.searchpath=[file:///mine]: is set already; type --config-dir"),
    (training, "--config-path=mine", "=mine: this program composes its own conf; type --config-dir=FOLDER"),
    (training, "optimizer.lr=1e38", "optimizer.lr=1e+38: must be at most 1e+30; type optimizer.lr=0.001"),
    (training, "launch.nnodes=2 workers=3", "it counts those of all hosts; type workers=4"),
    (training, "launch.nnodes=2 launch.master_port=29500 workers=2", "=127.0.0.1: no other host reaches this address"),
    (training, "launch.model=5", "launch.model=5: must be a folder"),
    (training, "launch.model=..", "launch.model=..: must end in the name of a folder; type launch.model=best"),
    (training, "model=module model.network._target_=nowhere.Net", "No module named 'nowhere'"),
    (training, "model=torchvision model.weights=file", "model.weights=file: cannot be read ("),
    (evaluating, "checkpoint=run", "checkpoint=run: is the folder of a run; type checkpoint=run/checkpoints/best"),
    (evaluating, f"checkpoint={LONG}", "must be the folder of a checkpoint; type checkpoint="),
    (evaluating, "output=run", "and its result.json would be lost; type output=run/mine"),
    (evaluating, "output=file/x", "output=file/x: cannot be written: Not a directory; type another output"),
    (evaluating, f"output={LONG}", "cannot be written: File name too long; type another output"),
    (evaluating, "model=resnet12", "and 57 more; leave out what changes the network"),
    (evaluating, "dataset=sinusoid", "inputs of shape (1,) (the network takes images [channels, height, width]"),
    (evaluating, "dataset=sinusoid", "; type another dataset, or a model for such inputs"),
    (evaluating, "--config-dir", "argument --config-dir: expected one argument"),
    (adapting, "--model nowhere", "--model=nowhere: there is no such folder; type the folder of a run"),
    (adapting, "--model damaged", "params.safetensors: differs from what was saved"),
    (adapting, f"--model {LONG}", "there is no such folder; type the folder of a run"),
    (adapting, "--support one", "--support one: has one class, cat; put a folder of another class beside it"),
    (adapting, "--query broken", "not recognised as a picture; replace the file, or leave it out"),
    (adapting, "--out file/x", "--out=file/x: cannot be written: Not a directory; type another --out"),
    (adapting, f"--out {LONG}", "cannot be written: File name too long; type another --out"),
    (adapting, "--threads two", "argument --threads: 'two': must be a whole number of at least 1; type 1"),
    (export.main, "nowhere --out out", "RUN=nowhere: there is no such folder; type the folder of a run"),
    (export.main, "run --out file/x", "--out=file/x: cannot be written: Not a directory; type another --out"),
    (export.main, "run --out .", "--out=.: must end in the name of a folder; type --out=best"),
    (export.main, f"run --out {LONG}", "cannot be written: File name too long; type another --out"),
    (runs.compare, "empty", "empty: holds no metrics.jsonl; type the folder of a run that has begun"),
    (runs.compare, "drawn --output file/x.png", "--output=file/x.png: cannot be written: Not a directory"),
    (cache.main, "--clean --older-than week", "'week': must be a number that is not negative; type 30"),
    (reproduce.main, "--tables no_yaml --list", "no_yaml/table.yaml: "),
    (reproduce.main, "--tables no_number --render", "no_number/table.yaml: "),
    (reproduce.main, "--output file --render", "file: cannot be written: File exists; type another --output"),
    (reproduce.main, "--seeds two", "argument --seeds: 'two': must be a whole number of at least 0; type 1"),
]  # fmt: skip
"""A command, its arguments, and a part of its message."""


def code_of(main: Main, arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as ending:  # argparse's own
        return ending.code


@pytest.mark.parametrize(("main", "arguments", "message"), CASES)
def test_a_wrong_argument_is_named(
    main: Main, arguments: str, message: str, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    GlobalHydra.instance().clear()
    monkeypatch.chdir(home)
    before = sorted(home.rglob("*"))
    assert code_of(main, arguments.split(" ")) == 2
    said = capfd.readouterr().err
    assert message in said and "Traceback" not in said and len(said.splitlines()) <= 24
    assert sorted(home.rglob("*")) == before, "something was written"


def image(values: Any) -> Callable[[], object]:
    return lambda: metalearn.load("run").adapt([values, np.zeros((9, 9))], ["a", "b"])


def trained(**changes: Any) -> Callable[[], object]:
    given = {"algorithm": "protonet", "model": "conv4", "tasks": "glyphs", "steps": 1} | changes
    return lambda: metalearn.train(**given)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: metalearn.load(None), "path=None: must be the path of a folder"),  # type: ignore[arg-type]
    (lambda: metalearn.load(LONG), "there is no such folder; type the folder of a run"),
    (image(np.zeros((9, 9), complex)), "an array of complex128 must hold numbers from 0"),
    (image("broken/cat/1.png"), "not recognised as a picture; replace the file, or leave it out"),
    (lambda: metalearn.load("run").adapt(np.zeros((2, 9, 9)), None), "labels=None: must be a list; type [labels]"),
    (trained(algorithm=5), "algorithm=5: must be a name of conf/, or a function of `model`"),
    (trained(algorithm=lambda model: 5), "algorithm: gives a int, and must give a metalearn.types.Algorithm"),
    (trained(model=None), "model=None: must be a name of conf/, or an nn.Module"),
    (trained(model=lambda: 5), "gives a int, and must give an nn.Module"),
    (trained(tasks=5), "tasks=5: must be a name of conf/, or an object with the methods of metalearn.types.TaskSource"),
    (trained(optimizer=5), "optimizer=5: must be a name of conf/, or metalearn.named(NAME, KEY=VALUE)"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_a_wrong_value_in_python_is_a_value_error(
    call: Callable[[], object], message: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def learned() -> Any:
    model = metalearn.named("conv4", filters=4)
    return metalearn.train("protonet", model, "glyphs", steps=1, meta_batch_size=2, val_tasks=2, progress=False)


USES: list[tuple[Callable[[Any], object], str]] = [
    (lambda learned: learned.evaluate(split="exam"), "split='exam': must be one of train, val, test"),
    (lambda learned: learned.evaluate(count="all"), "count='all': must be a whole number of at least 2"),
    (lambda learned: learned.evaluate(5), "tasks=5: must be a name of conf/"),
    (lambda learned: learned.adapt("pictures", [0]), "images: must be a list, and is a single str"),
    (lambda learned: learned.adapt(5, [0]), "images=5: must be a list"),
    (lambda learned: learned.adapt(np.zeros((2, 1, 28, 28)), [0, 1], steps=-1), "steps=-1: must be a whole number"),
    (
        lambda learned: learned.adapt(np.zeros((2, 1, 28, 28)), [0, 1]).predict(np.zeros((2, 5))),
        "images: must be a list, and is a single ndarray",
    ),
]


@pytest.mark.parametrize(("use", "message"), USES)
def test_a_wrong_use_of_what_was_learned_is_a_value_error(
    use: Callable[[Any], object], message: str, learned: Any
) -> None:
    with pytest.raises(ValueError) as caught:
        use(learned)
    assert message in str(caught.value)


RANKS: dict[str, tuple[dict[str, str], str]] = {
    "RANK alone": ({"RANK": "0"}, "RANK='0': WORLD_SIZE is not set; type torchrun"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2': RANK is not set"),
    "an address alone": ({"MASTER_ADDR": "h"}, "MASTER_ADDR='h': MASTER_PORT is not set"),
    "a port alone": ({"MASTER_PORT": "29500"}, "MASTER_PORT='29500': MASTER_ADDR is not set"),
    "no address": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        "WORLD_SIZE='2': MASTER_ADDR and MASTER_PORT are not set",
    ),
    "no address, by hand": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "WORLD_SIZE='2': MASTER_ADDR and MASTER_PORT are not set",
    ),
    "a rank beyond": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2': must be below WORLD_SIZE=2"),
    "no number": ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a whole number from 0"),
    "an empty value": ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='': must be a whole number"),
    "a local rank": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "a"}, "LOCAL_RANK='a': must be a whole number"),
    "a port": ({"MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT='x': must be a whole number"),
    "srun": ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID=1: srun has started 4 tasks"),
}


@pytest.mark.parametrize("name", RANKS)
def test_half_of_what_makes_a_rank_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, message = RANKS[name]
    monkeypatch.chdir(tmp_path)
    for variable in (*RANK_VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    commands = [lambda: train.main(["trainer.steps=1"], PROGRAM)]
    if not name.startswith(
        ("srun", "no address")
    ):  # tasks of srun may be sweeps of their own, and a rank is refused a sweep
        commands += [lambda: train.main(["--multirun", "seed=0,1"], PROGRAM), lambda: doctor.main([])]
    for command in commands:
        assert command() == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {message}") and said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())
