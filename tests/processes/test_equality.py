"""The table of equality: every strategy trains the same model, on real processes.

After 20 steps from the same seed the parameters agree bit for bit, since every strategy adds the gradients of the
chunks in the order of `distributed.reduce`. Only torch's DistributedDataParallel does not: each rank adds up its own
chunks one after the other, and in float32 ((a + b) + c) + d is not (a + b) + (c + d). It must agree to 1e-10 after one
step in float64 with a smooth activation.

The batch sizes are no multiples of the number of workers, nor of the chunk size.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import ROOT, Program, Start, slow

pytestmark = pytest.mark.thorough

SHORT = ("trainer.steps=20", "trainer.val_every=20", "checkpoint.every=10", "logger.every=20", "model.filters=16",
         "logger.tensorboard=false", "logger.plots=false", "logger.report=false", "run=r")  # fmt: skip
TASKS = ("trainer.meta_batch_size=7", "trainer.task_chunk=2", "trainer.val_tasks=5", "trainer.test_tasks=7")
LEARNERS = {
    "supervised": (
        *SHORT, "experiment=supervised_glyphs", "dataset.ways=20", "dataset.known=30", "trainer.meta_batch_size=23",
        "trainer.task_chunk=5", "trainer.val_tasks=11", "trainer.test_tasks=17",
    ),
    "maml": (*SHORT, *TASKS),
    "varying shots": (*SHORT, *TASKS, "dataset.shots=[1,3]"),
    "first-order maml": (*SHORT, *TASKS, "algorithm.first_order=true"),
}  # fmt: skip
STRATEGIES = {
    "rpc": ("strategy=rpc",),
    "rpc_autograd": ("strategy=rpc_autograd",),
    "ddp": ("strategy=ddp",),
    "split": ("strategy=split", "strategy.micro_batches=2"),
}


def is_slow(learner: str, strategy: str, workers: int) -> bool:
    """Rows that only ./scripts/test.sh --slow runs: one worker; remote calls for supervised learning; and those whose
    code a faster row runs too, except for a few lines."""
    return (
        learner == "first-order maml"
        or (learner == "varying shots" and strategy != "rpc_autograd")
        or workers == 1
        or (learner, strategy)
        in (
            *(("supervised", strategy) for strategy in ("rpc", "rpc_autograd", "ddp")),
            ("maml", "rpc"),
            ("maml", "rpc_autograd"),
        )
    )


TABLE = [
    pytest.param(*row, marks=slow if is_slow(*row) else ())
    for row in product(LEARNERS, STRATEGIES, (1, 2))
    if row[1] != "split" or row[0] == "supervised"
]


def run_dir(folder: Path) -> Path:
    (path,) = folder.glob("outputs/*/r")
    return path


def params(folder: Path, checkpoint: str = "last") -> bytes:
    return (run_dir(folder) / "checkpoints" / checkpoint / "params.safetensors").read_bytes()


def evaluations(folder: Path) -> tuple[object, object]:
    result = json.loads((run_dir(folder) / "result.json").read_text())
    return result["val"], result["test"]


def completed(program: Program) -> str:
    code, text = program.wait()
    assert code == 0, text
    return text


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a learner that was trained in one process, once it is asked for."""

    @cache
    def trained(learner: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        completed(Program([sys.executable, str(ROOT / "train.py"), *LEARNERS[learner], "strategy=local"], folder))
        return folder

    return trained


@pytest.mark.parametrize(("learner", "strategy", "workers"), TABLE)
def test_every_strategy_trains_the_same_model(
    learner: str, strategy: str, workers: int, alone: Callable[[str], Path], start: Start, tmp_path: Path
) -> None:
    exact = ["strategy.overlap=false"] if strategy == "ddp" and learner == "supervised" else []
    completed(start(*LEARNERS[learner], *STRATEGIES[strategy], *exact, f"workers={workers}"))
    assert params(tmp_path) == params(alone(learner))
    assert evaluations(tmp_path) == evaluations(alone(learner))


@slow
def test_distributed_data_parallel_agrees_in_one_step(start: Start, tmp_path: Path) -> None:
    smooth = [
        *LEARNERS["supervised"],
        "trainer.steps=1",
        "precision=float64",
        "model.activation=softplus",
        "optimizer.eps=1.0",
    ]
    ones = []
    for name, strategy in (("one", ["strategy=local"]), ("two", ["strategy=ddp", "workers=2"])):
        completed(start(*smooth, *strategy, f"hydra.run.dir={name}"))
        ones.append(load_file(tmp_path / name / "checkpoints/last/params.safetensors"))
    assert ones[0].keys() == ones[1].keys()
    for name, value in ones[0].items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(ones[1][name], value, rtol=0, atol=1e-10)


WAYS = {
    "local": ("strategy=local",),
    "split": (*STRATEGIES["split"], "workers=2"),
    "ddp": ("strategy=ddp", "strategy.overlap=false", "workers=2"),
}


@slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("local", "split", marks=slow),
        ("split", "ddp"),
        pytest.param("ddp", "local", marks=slow),
    ],
)
def test_one_strategy_resumes_the_run_of_another(first: str, second: str, start: Start, tmp_path: Path) -> None:
    learner = [*LEARNERS["supervised"], "optimizer.schedule=constant"]
    completed(start(*learner, "strategy=local", "hydra.run.dir=whole"))
    completed(start(*learner, *WAYS[first], "trainer.steps=10"))
    assert "going on after step 10" in completed(start(*learner, *WAYS[second]))
    assert params(tmp_path) == (tmp_path / "whole/checkpoints/last/params.safetensors").read_bytes()


@slow
def test_a_network_made_to_keep_running_statistics(start: Start, tmp_path: Path) -> None:
    """torchvision's batch norm: every strategy normalises a micro-batch by its own statistics, and stores none."""
    tiny = [override for override in LEARNERS["supervised"] if not override.startswith("model.")]
    resnet = [*tiny, "model=torchvision", "trainer.steps=2", "trainer.task_chunk=6"]
    for name, way in (("local", ["strategy=local"]), ("rpc", ["strategy=rpc", "workers=2"]), ("ddp", WAYS["ddp"])):
        completed(start(*resnet, *way, f"hydra.run.dir={name}"))
    one, *others = (
        load_file(tmp_path / name / "checkpoints/last/params.safetensors") for name in ("local", "rpc", "ddp")
    )
    assert not [name for name in one if "running" in name or "num_batches" in name]
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)


@slow
def test_more_workers_than_chunks(start: Start, tmp_path: Path) -> None:
    """A worker without a chunk adds nothing to the result."""
    few = [*LEARNERS["maml"], "trainer.meta_batch_size=2", "trainer.task_chunk=2", "trainer.steps=3"]
    runs = {}
    for name, strategy in (("local", "strategy=local"), ("rpc", "strategy=rpc"), ("ddp", "strategy=ddp")):
        completed(start(*few, strategy, f"workers={1 if name == 'local' else 3}", f"hydra.run.dir={name}"))
        runs[name] = (tmp_path / name / "checkpoints/last/params.safetensors").read_bytes()
    assert runs["rpc"] == runs["local"] == runs["ddp"]
    supervised = [*LEARNERS["supervised"], "trainer.meta_batch_size=2", "trainer.steps=1", "precision=float64"]
    for name, strategy in (("one", "strategy=local"), ("three", "strategy=ddp")):
        completed(start(*supervised, strategy, f"workers={1 if name == 'one' else 3}", f"hydra.run.dir={name}"))
    one, three = (load_file(tmp_path / name / "checkpoints/last/params.safetensors") for name in ("one", "three"))
    assert all(torch.allclose(one[name], three[name], rtol=0, atol=1e-10) for name in one)


@pytest.mark.parametrize(
    ("form", "strategy", "workers"),
    [
        ("TextsInParts", "rpc_autograd", 2),
        pytest.param("TextsInParts", "rpc", 4, marks=slow),
        pytest.param("Texts", "ddp", 2, marks=slow),
        pytest.param("Texts", "rpc", 4, marks=slow),
    ],
)
def test_tokens_and_several_inputs_have_one_processs_bits(
    form: str, strategy: str, workers: int, start: Start, tmp_path: Path
) -> None:
    texts = (
        "plugins=[tests]", "dataset=sinusoid", f"dataset._target_=tests.own_functions.{form}",
        "model=module", "model.network._target_=tests.own_functions.Reads", "model.network.num_classes=2",
        "model.inputs=tasks", "model.channels=1", "algorithm=maml", "algorithm.inner_lr=0.1", *TASKS,
        *(part for part in SHORT if not part.startswith("model.")), "trainer.steps=4", "trainer.val_every=4",
    )  # fmt: skip
    worlds = []
    for name, parts in (("one", ["strategy=local"]), ("all", [f"strategy={strategy}", f"workers={workers}"])):
        completed(start(*texts, *parts, f"hydra.run.dir={name}"))
        worlds.append((tmp_path / name / "checkpoints/last/params.safetensors").read_bytes())
    assert worlds[0] == worlds[1]
