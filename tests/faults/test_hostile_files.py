"""Files from somebody else: no code of theirs runs, and each that is refused is named, with exit code 2."""

import io
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from metalearn.cli import evaluate
from metalearn.config.compose import compose_config
from metalearn.config.options import CONF
from metalearn.config.saved import changed_config
from metalearn.config.values import to_container
from metalearn.errors import ConfigError
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal
from metalearn.runs import folder
from tests.saved import MARKER, SECRET, copy_to_damage, saved_run

TINY = ("model.filters=8", "trainer.test_tasks=2", "trainer.val_tasks=2", "trainer.meta_batch_size=1")

Meta = dict[str, Any]


class Payload:
    """Unpickled without care, it makes the marker in the working folder."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARKER}",)


def inspect(run_dir: Path) -> folder.FolderState:
    return folder.inspect(run_dir, compose_config(TINY).config, {}, lambda saved: None)


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


def seal(run_dir: Path) -> None:
    """Makes the manifest fit: whoever made the files has made it too."""
    path = checkpoint_of(run_dir)
    names = [file for file in path.iterdir() if file.name != "manifest.json"]
    (path / "manifest.json").write_text(
        json.dumps({file.name: sha256(file.read_bytes()).hexdigest() for file in names})
    )


def with_meta(change: Callable[[Meta], object]) -> Callable[[Path], None]:
    """Changes meta.json."""

    def damage(run_dir: Path) -> None:
        path = checkpoint_of(run_dir) / "meta.json"
        meta = json.loads(path.read_text())
        change(meta)
        path.write_text(json.dumps(meta))

    return damage


def with_config(**groups: Any) -> Callable[[Path], None]:
    """Changes the config in meta.json: the keys of a group; or a whole value, as a group with another target is."""

    def change(meta: Meta) -> None:
        for name, new in groups.items():
            added = isinstance(new, dict) and "_target_" not in new
            meta["config"][name] = meta["config"][name] | new if added else new

    return with_meta(change)


def with_file(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        (checkpoint_of(run_dir) / name).write_bytes(content)

    return damage


def archive(data: bytes) -> bytes:
    """What torch.save makes around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("state/data.pkl", data)
        file.writestr("state/version", "3\n")
    return buffer.getvalue()


COMMAND = {"_target_": "os.system", "command": f"touch {MARKER}"}
MODULE = {"_target_": "metalearn.models.module.module", "network": COMMAND, "channels": 3, "image_size": 28}
BOMB = {"file": "bomb.npy", "allow_pickle": True}

CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a network of the checkpoint's own": (with_config(model=MODULE), "model.network._target_=os.system"),
    "what our modules import": (
        with_config(dataset=BOMB | {"_target_": "metalearn.tasks.common.cache.np.load"}), "dataset._target_="),
    "what our modules define": (
        with_config(algorithm={"_target_": "metalearn.runs.checkpoint.rewind"}), "algorithm._target_="),
    "a module to import": (with_config(inner={"_target_": "planted.factory"}), "inner._target_=planted.factory"),
    "a config that is none": (with_meta(lambda meta: meta.update(config="x")), "config"),
    "a pickle that runs": (with_file("state.pt", archive(pickle.dumps(Payload(), 2))), "state.pt"),
    "no tensors": (with_file("params.safetensors", b"\xff" * 64), "step_000000"),
}  # fmt: skip
"""A damage to a checkpoint, and what the message of `metalearn evaluate` names."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused(name: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, named = CHECKPOINTS[name]
    (run_dir.parent / "bomb.npy").write_bytes(pickle.dumps(Payload()))
    (run_dir.parent / "planted.py").write_text(f"open('{MARKER}', 'w')")
    damage(run_dir)
    seal(run_dir)
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}"]) == 2
    error = capfd.readouterr().err
    assert named in error and error.startswith("error: ") and "Traceback" not in error and SECRET not in error


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
    with_config(dataset={"_target_": "\x1b[2J\nx"})(run_dir)
    seal(run_dir)
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}"]) == 2
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [])
    log_to_terminal()
    handler = log_to_file(run_dir / "train.log")
    logger.warning("a name of others: %s", "\x1b[2J")
    detach(handler)
    for text in (capfd.readouterr().err, (run_dir / "train.log").read_text()):
        assert "\\x1b[2J" in text and "\x1b" not in text


def test_nothing_is_downloaded_to_where_only_the_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METALEARN_DATA", raising=False)
    config = to_container(compose_config(["dataset=omniglot"]).config)
    for root, expected in ((str(tmp_path), (str(tmp_path), False)), (f"{tmp_path}/{'x' * 300}", ("data", True))):
        config["dataset"] |= {"root": root, "download": True}
        dataset = changed_config(config, [], {}).dataset
        assert (dataset.root, dataset.download) == expected


def test_a_network_that_the_command_names_is_built(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message is about its parameters, which this checkpoint does not have."""
    with_config(model=MODULE | {"network": {"num_classes": 5}})(run_dir)
    seal(run_dir)
    named = "model.network._target_=torchvision.models.resnet18"
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}", "+" + named]) == 2
    assert "holds parameters of another model" in capfd.readouterr().err
