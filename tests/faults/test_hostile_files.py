"""Files from somebody else: no code of theirs runs, and each that is refused is named, with exit code 2."""

import io
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from metalearn.cli import evaluate
from metalearn.config.compose import compose_config
from metalearn.config.options import CONF
from metalearn.config.values import to_container
from metalearn.errors import ConfigError
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal
from metalearn.runs import folder
from tests.saved import MARKER, copy_to_damage, forge, saved_run

TINY = ("model.filters=8", "trainer.test_tasks=2", "trainer.val_tasks=2", "trainer.meta_batch_size=1")


class Payload:
    """Unpickled without care, it makes the marker in the working folder."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARKER}",)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that has saved before its first step."""
    run_dir = tmp_path_factory.mktemp("genuine") / "run"
    saved_run(run_dir, *TINY)
    return run_dir


@pytest.fixture
def run_dir(genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to damage, in the working folder."""
    with copy_to_damage(genuine, tmp_path, monkeypatch) as copy:
        yield copy


@pytest.fixture
def begun(run_dir: Path) -> Path:
    """The same without a checkpoint, as a kill leaves it: only Hydra's record says which run it is."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "train.log").touch()
    return run_dir


def checkpoint_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints/step_000000"


def archive(data: bytes) -> bytes:
    """What torch.save makes around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("state/data.pkl", data)
        file.writestr("state/version", "3\n")
    return buffer.getvalue()


COMMAND = {"_target_": "os.system", "command": f"touch {MARKER}"}
MODULE = {"_target_": "metalearn.models.module.module", "network": COMMAND, "channels": 3, "image_size": 28}
BOMB = {"_target_": "metalearn.tasks.common.stored.np.load", "file": "bomb.npy", "allow_pickle": True}

CONFIGS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "what our modules import": ({"dataset": BOMB}, "dataset._target_="),
    "what our modules define": (
        {"algorithm": {"_target_": "metalearn.runs.checkpoint.rewind"}}, "algorithm._target_="),
    "a module to import": ({"inner": {"_target_": "planted.factory"}}, "inner._target_=planted.factory"),
    "a config that is none": ("x", "config"),
}  # fmt: skip
"""What meta.json has in place of parts of the config, and what the message of `metalearn evaluate` names."""

FILES = {
    "state.pt": (archive(pickle.dumps(Payload(), 2)), "state.pt"),
    "params.safetensors": (b"\xff" * 64, "step_000000"),
}
"""The same for the content of other files: a pickle that runs, and no tensors."""


@pytest.mark.parametrize("name", [*CONFIGS, *FILES])
def test_a_hostile_checkpoint_is_refused(name: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run_dir.parent / "bomb.npy").write_bytes(pickle.dumps(Payload()))
    (run_dir.parent / "planted.py").write_text(f"open('{MARKER}', 'w')")
    path = checkpoint_of(run_dir)
    if name in FILES:
        content, named = FILES[name]
        (path / name).write_bytes(content)
        forge(path)
    else:
        config, named = CONFIGS[name]
        forge(path, lambda meta: meta.update(config=config if config == "x" else meta["config"] | config))
    assert evaluate.main([f"checkpoint={path}"]) == 2
    error = capfd.readouterr().err
    assert named in error and error.startswith("error: ") and "Traceback" not in error


RECORDED = {
    "algorithm=maml": ("algorithm.inner_lr", None),
    "algorithm=anil": ("algorithm.inner_lr", None),
    "init_from=elsewhere/checkpoints/best": ("init_from", "${oc.env:SECRET}"),
}
"""What is typed; the key whose value Hydra records as it is typed, `${…}`; and that record, if conf/ has it not."""


@pytest.mark.parametrize("typed", RECORDED)
def test_a_value_recorded_as_typed_makes_no_other_run(typed: str, begun: Path) -> None:
    key, record = RECORDED[typed]
    config = compose_config([*TINY, typed]).config
    recorded = OmegaConf.create(to_container(config))
    group = OmegaConf.load(CONF / f"{typed.replace('=', '/')}.yaml") if record is None else None
    OmegaConf.update(recorded, key, record or to_container(group, resolve=False)["inner_lr"])
    OmegaConf.save(recorded, begun / ".hydra/config.yaml")
    assert "${" in (begun / ".hydra/config.yaml").read_text()
    assert folder.inspect(begun, config, {}, lambda saved: None).snapshot is None
    config.optimizer.lr = 0.5
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.001 → 0\.5"):
        folder.inspect(begun, config, {}, lambda saved: None)


@pytest.mark.parametrize("content", ["[]", '{"status": "paused"}'])
def test_a_damaged_result_is_no_result(content: str, run_dir: Path) -> None:
    (run_dir / "result.json").write_text(content)
    assert folder.finished(run_dir, 1) is None and folder.pause_of(run_dir, 1) == ""


def test_a_message_leaves_the_terminal_as_it_is(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forge(checkpoint_of(run_dir), lambda meta: meta["config"].update(dataset={"_target_": "\x1b[2J\nx"}))
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}"]) == 2
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [])
    log_to_terminal()
    handler = log_to_file(run_dir / "train.log")
    logger.warning("a name of others: %s", "\x1b[2J")
    detach(handler)
    for text in (capfd.readouterr().err, (run_dir / "train.log").read_text()):
        assert "\\x1b[2J" in text and "\x1b" not in text


def test_a_network_that_the_command_names_is_built(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message is about its parameters, which this checkpoint does not have."""
    forge(checkpoint_of(run_dir), lambda meta: meta["config"].update(model=MODULE | {"network": {"num_classes": 5}}))
    named = "model.network._target_=torchvision.models.resnet18"
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}", "+" + named]) == 2
    assert "holds parameters of another model" in capfd.readouterr().err
