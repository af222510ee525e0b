"""launch=sagemaker, in the environment of a training job as SageMaker's containers set it."""

import json
import socket
import sys
from pathlib import Path

import pytest

from metalearn.app.job import installed, to_job
from metalearn.config.compose import compose_config
from tests.runs import ROOT, Program, Start, slow

TINY = {
    "experiment": "maml_sinusoid",
    "run": "seed0",
    "trainer.steps": 5,
    "trainer.val_every": 5,
    "trainer.val_tasks": 4,
    "trainer.test_tasks": 8,
}
RUN = "maml_sinusoid/seed0"


def set_job(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    monkeypatch.delenv("METALEARN_DATA", raising=False)
    for name, value in {
        "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_NUM_GPUS": "0", "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training", "SM_MODEL_DIR": "/opt/ml/model",
        **variables,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def test_the_environment_of_a_job_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, SM_NUM_GPUS="4", SM_CHANNEL_TEST="/opt/ml/input/data/test")
    composed = compose_config(["launch=sagemaker", "experiment=maml_omniglot"])
    launch = composed.config.launch
    assert (launch.nnodes, launch.node_rank, launch.master_addr, launch.interface) == (2, 1, "algo-1", "lo")
    assert to_job(*composed, installed(), []).workers == 8
    assert composed.config.dataset.root == "/opt/ml/input/data/training"
    assert str(composed.run_dir) == "/opt/ml/checkpoints/maml_omniglot/seed0"
    assert launch.model == "/opt/ml/model/best"


@pytest.mark.parametrize(
    ("channels", "root"),
    [
        ({"OMNIGLOT": "/data/omniglot"}, "/data/omniglot"),
        ({"TRAIN": "/data/train", "TEST": "/data/test"}, "/opt/ml/input/data"),
        ({}, "/opt/ml/input/data"),
    ],
)
def test_the_data_is_the_only_channel_or_the_folder_of_all(
    channels: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, **{f"SM_CHANNEL_{name}": folder for name, folder in channels.items()})
    monkeypatch.delenv("SM_CHANNEL_TRAINING")
    assert compose_config(["launch=sagemaker", "dataset=omniglot"]).config.dataset.root == root


def test_one_host_is_as_without_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, SM_HOSTS='["algo-1"]', SM_CURRENT_HOST="algo-1", METALEARN_DATA="/mine")
    composed = compose_config(["launch=sagemaker", "dataset=omniglot"])
    launch = composed.config.launch
    assert (launch.nnodes, launch.master_addr, launch.interface) == (1, "127.0.0.1", None)
    assert to_job(*composed, installed(), []).workers == 1
    assert composed.config.dataset.root == "/mine"


def test_outside_a_job_the_missing_variable_is_named(start: Start) -> None:
    outcome = start("launch=sagemaker").wait()
    assert outcome.code == 2, outcome.text
    assert outcome.text.startswith("error: launch=sagemaker: the environment variable SM_HOSTS is not set"), (
        outcome.text
    )


@slow
@pytest.mark.thorough
def test_two_hosts_give_the_bits_of_one_and_leave_the_model(tmp_path: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hosts = ["127.0.0.1", "127.0.0.2"]
    numbers = {**TINY, "launch.master_port": port}
    parameters = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    programs = []
    for host in hosts:
        own = tmp_path / host
        (own / "model").mkdir(parents=True)
        environment = {
            "SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host, "SM_NETWORK_INTERFACE_NAME": "lo",
            "SM_MODEL_DIR": str(own / "model"), "SM_CHECKPOINT_DIR": str(own / "checkpoints"),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }  # fmt: skip
        programs.append(Program([str(ROOT / "deploy/sagemaker.sh"), *parameters], tmp_path, environment))
    for program in programs:
        outcome = program.wait()
        assert outcome.code == 0, outcome.text
    plain = start(*(f"{name}={value}" for name, value in TINY.items()), "workers=2").wait()
    assert plain.code == 0, plain.text
    params = (tmp_path / "outputs" / RUN / "checkpoints/last/params.safetensors").read_bytes()
    first, second = (tmp_path / host for host in hosts)
    assert (first / "checkpoints" / RUN / "checkpoints/last/params.safetensors").read_bytes() == params
    assert (first / "model/best/params.safetensors").read_bytes() == params  # the only validation was at the last step
    assert json.loads((first / "model/best/result.json").read_text())["workers"] == 2
    assert not list((second / "model").iterdir())


def test_hyperparameters_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    outcome = Program([str(ROOT / "deploy/sagemaker.sh"), "trainer.steps", "5"], tmp_path).wait()
    assert outcome == (2, "trainer.steps: must be --KEY VALUE, as SageMaker writes a hyperparameter\n")


# The copy of what a run has learned, which launch.model asks for anywhere


@pytest.mark.thorough
def test_a_completed_run_copies_its_lost_model_again(tmp_path: Path, start: Start) -> None:
    command = [*(f"{name}={value}" for name, value in TINY.items()), "launch.model=handed/out"]
    (tmp_path / "handed/out").mkdir(parents=True)
    (tmp_path / "handed/out/mine").touch()
    outcome = start(*command).wait()
    assert outcome.code == 2 and "error: launch.model=handed/out: " in outcome.text, outcome.text
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "handed/out/mine").unlink()
    best = tmp_path / "outputs" / RUN / "checkpoints/best"
    for _ in range(2):
        outcome = start(*command).wait()
        assert outcome.code == 0, outcome.text
        assert (tmp_path / "handed/out/params.safetensors").read_bytes() == (best / "params.safetensors").read_bytes()
        (tmp_path / "handed/out/params.safetensors").unlink()
    (tmp_path / "handed/out/evaluations").mkdir()
    outcome = start(*command).wait()
    assert outcome.code == 0, outcome.text
    assert (tmp_path / "handed/out/evaluations").exists()
    outcome = start(*command[:-1], f"launch.model={best.resolve()}").wait()
    assert outcome.code == 2 and (best / "params.safetensors").exists(), outcome.text
