"""The loggers: what they get, that a run that goes on doubles nothing, and that nothing is sent unasked."""

import contextlib
import importlib.util
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.logging import RichHandler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from metalearn.app.process import log_sweep
from metalearn.errors import RunError, log_to_stderr
from metalearn.reporting.loggers import Guarded, Logger, Window
from metalearn.reporting.logging import RunLog, log_to_terminal, run_log
from tests.runs import ROOT

CONFIG = {"seed": 0, "model": {"widths": [4, 8]}, "run": "a"}
PICTURES = {"train": np.full((6, 8, 3), 200, np.uint8)}


def logged(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.step(step, {"loss": 1 / step, "step_seconds": 0.1})
        if step % 4 == 0:
            log.evaluation(step, "val", {"loss": 0.5, "accuracy": 0.75, "ci95": 0.1, "tasks": 4})


def in_two_sessions(path: Path, **chosen: bool) -> None:
    """A run of ten steps that is killed after step 7, and goes on from its checkpoint of step 5."""
    open_log = run_log(every=1, plots=False, **chosen)
    killed = open_log(path, Window(0, 0, 10, 4))
    killed.start(CONFIG, PICTURES)
    logged(killed, 1, 7)
    killed.close()
    resumed = open_log(path, Window(5, 4, 10, 4))
    resumed.start(CONFIG, PICTURES)
    logged(resumed, 6, 10)
    resumed.evaluation(10, "test", {"loss": 0.4, "accuracy": 0.8, "ci95": 0.1, "tasks": 4})
    resumed.result(CONFIG, {"hparam/test_accuracy": 0.8})
    resumed.close()


@pytest.mark.parametrize("others", [logging.NullHandler, RichHandler])
@pytest.mark.parametrize(("begin", "package"), [(log_to_terminal, "metalearn"), (log_sweep, "hydra_async_sweeper")])
def test_messages_go_to_what_stderr_is_now(
    begin: Callable[[], None], package: str, others: type[logging.Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another program, such as pytest, has a handler of its own for them, which keeps its level."""
    theirs = others(logging.ERROR)
    for name in ("metalearn", "distributed", "hydra_async_sweeper"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [theirs])
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    for message in ("first", "second"):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            begin()
            logging.getLogger(package).info(message)
        assert stderr.getvalue() == f"{message}\n" and theirs.level == logging.ERROR


def test_a_command_that_trains_nothing_shows_warnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.DEBUG)  # as a run in the same process leaves it
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        log_to_stderr()
        logger.info("a line")
        logger.warning("a warning")
    assert stderr.getvalue() == "a warning\n"


def test_tensorboard_has_curves_config_and_pictures_once(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.yaml").write_text("- model=mlp\n- run=a\n")
    in_two_sessions(tmp_path, tensorboard=True)
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 11))
    assert [event.step for event in board.Scalars("val/accuracy")] == [4, 8]
    (config,) = board.Tensors("config/text_summary")
    assert b"    model:\n      widths:" in config.tensor_proto.string_val[0]
    (picture,) = board.Images("episodes/train")
    assert (picture.height, picture.width) == (6, 8)
    assert board.Scalars("z_test/accuracy")[-1].value == pytest.approx(0.8)
    groups = sorted({tag.partition("/")[0] for tag in board.Tags()["scalars"]})
    assert groups == ["train", "val", "z_test"]  # in the order in which TensorBoard shows them
    found = HParamsPluginData.FromString(board.PluginTagToContent("hparams")["_hparams_/experiment"])
    assert [info.name for info in found.experiment.hparam_infos] == [
        "model.widths",
        "run",
        "seed",
    ]  # the typed ones first


def test_a_start_before_the_first_checkpoint_is_made_again(tmp_path: Path) -> None:
    for session in range(2):
        log = run_log(every=1, plots=False, tensorboard=True)(tmp_path, Window(0, 0, 10, 4))
        log.start(CONFIG, PICTURES)
        log.close()
        if session == 0:
            (events,) = tmp_path.glob("events.*")
            events.rename(tmp_path / "events.out.tfevents.1000000000.host")  # older than the next
    assert len(EventAccumulator(str(tmp_path)).Reload().Images("episodes/train")) == 1


def test_a_failing_logger_is_dropped_and_named(tmp_path: Path) -> None:
    calls = []

    def broken(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError("the server is gone")

    class Broken(Logger):
        start = scalars = result = close = staticmethod(broken)  # type: ignore[assignment]

    window = Window(0, 0, 10, 4)
    logger = Guarded("mlflow", lambda *_: Broken(), tmp_path, window)
    logger.scalars(1, "train", {})
    logger.scalars(2, "train", {})
    logger.close()
    assert calls == [(1, "train", {})]
    with pytest.raises(
        RunError, match=r"logger\.mlflow: cannot be opened: the server is gone; type logger\.mlflow=false"
    ):
        Guarded("mlflow", broken, tmp_path, window)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(
        ValueError, match=rf"^{name}=true: the package {name} is not installed; type pip install {name}"
    ):
        run_log(every=1, plots=False, **{name: True})


# Other programs. Each test runs in a process of its own: they start threads and processes.


def run_apart(program: str, path: Path) -> str:
    before = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\npath = Path({str(path)!r})\n"
    command = [sys.executable, "-c", before + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=path, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed; type pip install {package}")


@pytest.mark.thorough
def test_mlflow_gets_every_point_once_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = run_apart(
        """
import json
from tests.metalearn.reporting.test_loggers import in_two_sessions
in_two_sessions(path, mlflow=True)
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{path}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("metalearn").experiment_id])
points = {name: [m.step for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
print(json.dumps([points, run.data.params, run.info.status]))
""",
        tmp_path,
    )
    points, params, status = json.loads(out.splitlines()[-1])
    assert points["train/loss"] == list(range(1, 11)) and points["val/accuracy"] == [4, 8]
    assert points["hparam/test_accuracy"] == [10] and params["model.widths"] == "[4, 8]" and status == "FINISHED"
    assert {path.name for path in tmp_path.glob("mlartifacts/**/*") if path.is_file()} == {"config.yaml", "train.png"}
    assert not (tmp_path / "mlruns").exists()


HISTORY = """
import json, struct
from wandb.proto.wandb_internal_pb2 import Record
for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
    data, at, whole = file.read_bytes(), 7, b""  # LevelDB's log format, behind a header of 7 bytes
    while at + 7 <= len(data):
        left = 32768 - at % 32768  # of this block
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])  # kinds: 1 whole, 2 first, 3 middle, 4 last part
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record.FromString(whole)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if items:
                print(json.dumps({name: json.loads(value) for name, value in items.items()}))
"""


@pytest.mark.thorough
def test_wandb_gets_every_point_once_and_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_apart(
        "from tests.metalearn.reporting.test_loggers import in_two_sessions\nin_two_sessions(path, wandb=True)",
        tmp_path,
    )
    sessions = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(sessions) == 2 and len({path.name for path in sessions}) == 1  # one run in two parts
    out = run_apart(HISTORY, tmp_path)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    assert [row["_step"] for row in rows if "val/accuracy" in row] == [4, 8]
    assert [row["_step"] for row in rows if any(name.startswith("episodes/train") for name in row)] == [0]
