"""Files from somebody else: each is refused with exit code 2 and a message that names it, and nothing in it runs."""

import csv
import io
import json
import logging
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hydra_async_sweeper.settings import _recorded as recorded_rounds
from hydra_async_sweeper.space import Number, SpaceError
from metalearn.api.export import export
from metalearn.cli import compare, evaluate, train
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.config.foreign import read_config
from metalearn.config.options import CONF
from metalearn.config.saved import changed_config
from metalearn.config.values import to_container
from metalearn.errors import ConfigError, DataError, RunError
from metalearn.reporting.loggers.protocol import Window
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal, run_log
from metalearn.reporting.page import section
from metalearn.reporting.page import text as as_html
from metalearn.runs import checkpoint, folder
from metalearn.storage import files
from metalearn.tasks.common.picture_folders import _decode, only_pictures, picture_folders
from tests.runs import ROOT, Program, said_by, slow
from tests.saved import MARKER, SECRET, copy_to_damage, saved_run

pytestmark = pytest.mark.timeout(60)
"""A refusal that takes as many seconds counts as hanging."""

TINY = ("model.filters=8", "trainer.test_tasks=2", "trainer.val_tasks=2", "trainer.meta_batch_size=1")

Meta = dict[str, Any]


class Payload:
    """Unpickled without care, it makes the marker in the working folder."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARKER}",)


class Sized(NamedTuple):
    """Unpickled, it takes `size` bytes."""

    size: int

    def __reduce__(self) -> tuple[type[bytearray], tuple[int]]:
        return bytearray, (self.size,)


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


def checkpoint_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints/step_000000"


def seal(run_dir: Path) -> None:
    """Makes the manifest fit: whoever made the files has made it too."""
    path = checkpoint_of(run_dir)
    names = [file for file in path.iterdir() if file.name != "manifest.json" and file.is_file()]
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


def with_pipe(name: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        (checkpoint_of(run_dir) / name).unlink()
        os.mkfifo(checkpoint_of(run_dir) / name)

    return damage


def with_link(name: str, target: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        path = run_dir / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return damage


def archive(data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save makes around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("state/data.pkl", data)
        file.writestr("state/version", "3\n")
    return buffer.getvalue()


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


EMPTY: dict[str, Any] = {"optimizer": {}, "progress": {}}
COMMAND = {"_target_": "os.system", "command": f"touch {MARKER}"}
MODULE = {"_target_": "metalearn.models.module.module", "network": COMMAND, "channels": 3, "image_size": 28}
BOMB = {"file": "bomb.npy", "allow_pickle": True}

CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a network of the checkpoint's own": (
        with_config(model=MODULE), "model.network._target_=os.system: only the checkpoint names this network"),
    "a dataset that is a shell": (with_config(dataset=COMMAND), "dataset._target_=os.system: is no factory of dataset"),
    "what our modules import": (
        with_config(dataset=BOMB | {"_target_": "metalearn.tasks.common.cache.np.load"}), "is no factory of dataset"),
    "what our modules define": (
        with_config(algorithm={"_target_": "metalearn.runs.checkpoint.rewind"}), "is no factory of algorithm"),
    "a factory of another group": (
        with_config(model={"_target_": "metalearn.tasks.glyphs.glyphs"}), "is no factory of model"),
    "a module to import": (with_config(inner={"_target_": "planted.factory"}), "is no factory of inner"),
    "an environment variable": (
        with_config(dataset={"root": "${oc.env:SECRET}"}), "dataset.root='${oc.env:SECRET}': the checkpoint's config"),
    "an environment variable in a list": (with_config(run=["a", {"b": "x${oc.env:SECRET}"}]), "is never resolved"),
    "an environment variable as a key": (with_config(dataset={"${oc.env:SECRET}": 1}), "is never resolved"),
    "a hundred thousand threads": (with_config(threads=100_000), "threads=100000: must be a whole number"),
    "a config that is none": (with_meta(lambda meta: meta.update(config="x")), "meta.json: holds no config"),
    "a group that is none": (with_config(trainer="x"), "trainer: is no group of keys"),
    "no dataset": (
        with_meta(lambda meta: meta["config"].pop("dataset")), "dataset: the checkpoint's config does not say which"),
    "a missing value": (with_config(trainer="???"), "trainer=???: the checkpoint's config has no value here"),
    "a nested config": (with_config(dataset=nested(100)), "meta.json: is nested more than 32 deep"),
    "a deep file": (with_file("meta.json", b"[" * 500_000), "meta.json: is nested more than 32 deep"),
    "many values": (with_config(dataset={"x": list(range(20_000))}), "has more than 10,000 values"),
    "a large file": (with_file("meta.json", b"1" * 5_000_000), "meta.json: has 5,000,000 bytes, and at most 4,194,304"),
    "another kind of file": (with_file("meta.json", b"[]"), "meta.json: holds no JSON object"),
    "a step that is none": (with_meta(lambda meta: meta.update(step="../../x")), "step='../../x'"),
    "a pipe": (with_pipe("meta.json"), "meta.json: is not a regular file"),
    "a device": (with_link("checkpoints/step_000000/state.pt", "/dev/zero"), "state.pt: is not a regular file"),
    "a pickle that runs": (
        with_file("state.pt", archive(pickle.dumps(Payload(), 2))), "state.pt: holds no state (it names posix system)"),
    "a bare pickle": (with_file("state.pt", pickle.dumps(Payload())), "state.pt: holds no state"),
    "a pickle that takes memory": (
        with_file("state.pt", archive(pickle.dumps(EMPTY | {"x": Sized(2**28)}, 2))), "it names __builtin__ bytearray"),
    "an archive behind a pickle that takes memory": (
        with_file("state.pt", pickle.dumps(EMPTY | {"x": Sized(2**28)}, 2) + saved(EMPTY)),
        "it is no file of torch.save"),
    "a compressed archive": (
        with_file("state.pt", archive(bytes(10**8), zipfile.ZIP_DEFLATED)), "its members are compressed"),
    "a tensor without end": (
        with_file("state.pt", saved(EMPTY | {"x": torch.zeros(1).expand(2**40)})), "holds a tensor [1099511627776]"),
    "a state that is none": (with_file("state.pt", saved([1])), "state.pt: holds no state of a run"),
    "a long header": (with_file("params.safetensors", b"\xff" * 64), "is not a complete checkpoint"),
    "a link out of the run": (with_link("evaluations", "../elsewhere"), "evaluations/step_000000: leads out of"),
}  # fmt: skip
"""A damage to a run folder, and a part of the message that `evaluate.py` ends with."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused(name: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, message = CHECKPOINTS[name]
    (run_dir.parent / "bomb.npy").write_bytes(pickle.dumps(Payload()))
    (run_dir.parent / "planted.py").write_text(f"open('{MARKER}', 'w')")
    (run_dir.parent / "elsewhere").mkdir()
    damage(run_dir)
    if not {"a pipe", "a device"} & {name}:
        seal(run_dir)
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}"]) == 2
    said = capfd.readouterr().err
    assert message in said and said.startswith("error: ") and SECRET not in said
    assert not any((run_dir.parent / "elsewhere").iterdir())


def test_a_config_without_all_that_is_published_is_refused(run_dir: Path) -> None:
    for name in ("trainer", "inner", "dataset"):
        with_meta(lambda meta, name=name: meta["config"].pop(name))(run_dir)
        seal(run_dir)
        with pytest.raises(ConfigError, match=f"{name}: the checkpoint's config does not say which {name} the run had"):
            export(checkpoint_of(run_dir), run_dir.parent / "model")


BILLION = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))])

CONFIGS: dict[str, tuple[str | None, str]] = {
    "a billion laughs": (BILLION, "config.yaml: has the alias *a0"),
    "a deep one": ("[" * 1000, "config.yaml: is nested more than 32 deep"),
    "a large one": ("# \n" * 200_000, "config.yaml: has 600,000 bytes"),
    "a pipe": (None, "config.yaml: is not a regular file"),
    "an environment variable": ("seed: ${oc.env:SECRET}\nmodel: {}", "holds a run with another config"),
    "links in a circle": ("seed: ${run}\nrun: ${seed}", "holds a run with another config"),
}
"""A config.yaml in a run folder without a checkpoint (None: a pipe), and a part of the message."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_run_folder_is_refused(name: str, run_dir: Path) -> None:
    text, message = CONFIGS[name]
    path = run_dir / ".hydra/config.yaml"
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "train.log").touch()
    path.unlink()
    path.write_text(text) if text is not None else os.mkfifo(path)
    with pytest.raises(ConfigError) as caught:
        inspect(run_dir)
    assert message in str(caught.value) and SECRET not in str(caught.value)


def test_a_value_of_the_environment_makes_no_other_run(run_dir: Path) -> None:
    """A run that was killed before its first checkpoint; Hydra records what was typed, not what it stood for."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "train.log").touch()
    config = compose_config(TINY).config
    path = run_dir / ".hydra/config.yaml"
    OmegaConf.save(config, path)
    path.write_text(path.read_text().replace("init_from: null", "init_from: ${oc.env:SECRET}"))
    config.init_from = "elsewhere/checkpoints/best"
    assert folder.inspect(run_dir, config, {}, lambda saved: None).snapshot is None
    config.optimizer.lr = 0.5
    with pytest.raises(ConfigError, match=r"holds a run with another config:\n  optimizer\.lr: 0\.001 → 0\.5\n"):
        folder.inspect(run_dir, config, {}, lambda saved: None)


@pytest.mark.parametrize("group", ["algorithm=maml", "algorithm=anil"])
def test_a_value_computed_from_another_key_makes_no_other_run(group: str, run_dir: Path) -> None:
    """A run that was killed before its first checkpoint; Hydra records `${inner_rate:…}`, not the rate."""
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "train.log").touch()
    typed = to_container(OmegaConf.load(CONF / f"algorithm/{group.partition('=')[2]}.yaml"), resolve=False)
    config = compose_config([*TINY, group]).config
    path = run_dir / ".hydra/config.yaml"
    OmegaConf.save(config, path)
    text = path.read_text().replace(f"inner_lr: {config.algorithm.inner_lr}", f"inner_lr: {typed['inner_lr']}")
    path.write_text(text)
    assert "${inner_rate:" in text
    assert folder.inspect(run_dir, config, {}, lambda saved: None).snapshot is None
    config.algorithm.inner_lr = 0.5
    with pytest.raises(ConfigError, match=r"holds a run with another config:\n  algorithm\.inner_lr: 1\.0 → 0\.5\n"):
        folder.inspect(run_dir, config, {}, lambda saved: None)


def test_computed_values_lead_no_farther_than_a_few_keys(run_dir: Path) -> None:
    path = run_dir / ".hydra/config.yaml"
    path.write_text("".join(f"k{n}: ${{oc.select:k{n + 1},null}}\n" for n in range(5000)) + "r: ${inner_rate:${r}}\n")
    found = read_config(path)
    assert found["k0"] == "${oc.select:k9,null}"
    assert (found["k4999"], found["r"]) == (None, "${inner_rate:${r}}")


def test_a_config_of_many_and_long_values_is_told_in_few_lines(run_dir: Path) -> None:
    (run_dir / "checkpoints").rename(run_dir.parent / "elsewhere")
    (run_dir / "train.log").touch()
    (run_dir / ".hydra/config.yaml").write_text("".join(f"k{number}: {'x' * 900}\n" for number in range(250)))
    with pytest.raises(ConfigError, match=r"  … and \d{3} more\ntype run=NAME") as caught:
        inspect(run_dir)
    assert len(str(caught.value)) < 10_000


def test_a_config_with_code_is_not_followed(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "train.log").touch()
    code = f"!!python/object/apply:os.system ['touch {MARKER}']"
    (run_dir / ".hydra/config.yaml").write_text(f"seed: {code}")
    assert inspect(run_dir).snapshot is None


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"status": "completed", "steps": 1}', "[]", '{"status": "paused"}']
)
def test_a_hostile_result_is_no_result(content: str, run_dir: Path) -> None:
    (run_dir / "result.json").write_text(content)
    assert folder.finished(run_dir, 1) is None and folder.pause_of(run_dir, 1) == ""


def test_a_result_that_may_not_be_read_is_named(run_dir: Path) -> None:
    (run_dir / "result.json").symlink_to("result.json")
    with pytest.raises(ConfigError, match=r"result\.json: cannot be read: Too many levels of symbolic links; make it"):
        folder.finished(run_dir, 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a regular file; move it away"), ("x" * 2**20, "has a line of more than"), ("circle", "cannot be")],
)
def test_a_log_that_cannot_go_on_is_named(name: str, content: str | None, message: str, run_dir: Path) -> None:
    path = run_dir / name
    if content is None:
        path.mkdir()
    elif content == "circle":
        path.symlink_to(name)
    else:
        path.write_text(f"{content}\n")
    with pytest.raises(RunError, match=rf"{name}: {message}"):
        run_log(every=1, plots=False, csv=True)(run_dir, Window(0, 0, 10, 4))


def test_a_table_with_a_field_without_end_is_named(run_dir: Path) -> None:
    (run_dir / "metrics.csv").write_text("step,split\n" + "".join(f'"{"x" * 2**16}\n' for _ in range(3)))
    with pytest.raises(RunError, match=r"metrics\.csv: is no table \(field larger than .*move it away"):
        run_log(every=1, plots=False, csv=True)(run_dir, Window(0, 0, 10, 4))


def test_a_message_leaves_the_terminal_as_it_is(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with_config(dataset={"_target_": "\x1b[2J\nx"})(run_dir)
    seal(run_dir)
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}"]) == 2
    assert "dataset._target_=\\x1b[2J\nx: is no factory" in capfd.readouterr().err


def test_log_messages_and_pages_hold_no_raw_control_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("metalearn")
    monkeypatch.setattr(logger, "handlers", [])
    log_to_terminal()
    handler = log_to_file(tmp_path / "train.log")
    logger.warning("a name of others: %s", "\x1b[2J")
    try:
        raise ValueError("\x9b2J")
    except ValueError:
        logger.exception("and a reason")
    detach(handler)
    for text in (capfd.readouterr().err, (tmp_path / "train.log").read_text(), section("\x1b[2J", as_html("\x9b2J"))):
        assert "\\x1b[2J" in text and "\\x9b2J" in text and not {"\x1b", "\x9b"} & set(text)


ESCAPE = "\x1b[2J\u202e"


def test_names_and_texts_of_files_leave_the_terminal_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("metalearn"), "handlers", [])
    log_to_terminal()
    handler = log_to_file(tmp_path / "train.log")
    root = tmp_path / f"pictures{ESCAPE}"
    for name in (f"one{ESCAPE}", "two"):
        (root / name).mkdir(parents=True)
        (root / name / f"{ESCAPE}.txt").touch()
        (root / name / f"{ESCAPE}.png").write_text("no picture")
    folders = picture_folders(root)
    only_pictures(root, folders)
    detach(handler)
    with pytest.raises(DataError) as broken:
        _decode(root, folders["two"].pictures, (1, 8, 8))
    (root / "metrics.jsonl").write_text(json.dumps({"split": "val", "step": ESCAPE, "accuracy": 1}) + "\n")
    assert compare.main([str(root)]) == 2
    weights = tmp_path / "weights.pth"
    torch.save({ESCAPE: torch.zeros(1)}, weights)
    with pytest.raises(ConfigError) as of_weights:
        build(compose_config(["model=torchvision", f"model.weights='{weights}'"]).config, "model")
    told = capfd.readouterr().err
    shown = [told, (tmp_path / "train.log").read_text(), str(broken.value), str(of_weights.value)]
    for text in shown:
        assert "\\x1b[2J\\u202e" in text and not set(ESCAPE[0] + ESCAPE[-1]) & set(text), text


def test_nothing_is_downloaded_to_where_only_the_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METALEARN_DATA", raising=False)
    config = to_container(compose_config(["dataset=omniglot"]).config)
    for root, expected in ((str(tmp_path), (str(tmp_path), False)), (f"{tmp_path}/{'x' * 300}", ("data", True))):
        config["dataset"] |= {"root": root, "download": True}
        dataset = changed_config(config, [], {}).dataset
        assert (dataset.root, dataset.download) == expected


def test_a_link_out_of_a_run_folder_is_refused(run_dir: Path) -> None:
    (run_dir / "train.log").symlink_to("../.bashrc")
    with pytest.raises(ConfigError, match=r"train\.log: leads out of "):
        inspect(run_dir)


def test_a_hard_link_is_not_written_through(run_dir: Path) -> None:
    other = run_dir.parent / "other"
    other.write_text("of somebody")
    (run_dir / "metrics.jsonl").hardlink_to(other)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is a hard link, and the file of its other name would be"):
        inspect(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    checkpoint = checkpoint_of(run_dir)
    (run_dir.parent / "backup").hardlink_to(checkpoint / "meta.json")  # a backup may share what is never written to
    files.refuse_links(run_dir, run_dir.parent)


def test_a_note_in_the_checkpoints_is_not_written_through_a_link(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of checkpoints may be shared, but a restart writes this one."""
    monkeypatch.setattr(checkpoint, "job_id", lambda: "17")
    other = run_dir.parent / "other"
    other.write_text("of somebody")
    note = run_dir / "checkpoints/.went_back"
    for link in (note.hardlink_to, note.symlink_to):
        note.unlink(missing_ok=True)
        link(other)
        checkpoint.rewind(run_dir, 0)
        assert other.read_text() == "of somebody" and note.read_text() == "17"


@pytest.mark.parametrize("name", ["multirun.yaml", "0/.hydra/config.yaml", "0"])
def test_a_sweep_does_not_write_through_a_link(name: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hydra writes these files before any run is inspected."""
    other, sweep = run_dir.parent / "other", run_dir.parent / "sweep"
    (sweep / name).parent.mkdir(parents=True)
    if name == "0":
        other.mkdir()
        (sweep / name).symlink_to(other)
    else:
        other.write_text("of somebody")
        (sweep / name).hardlink_to(other)
    command = ["--multirun", f"hydra.sweep.dir={sweep}", "hydra.sweep.subdir=${hydra.job.num}", *TINY, "seed=0"]
    assert train.main(command) == 2
    said = capfd.readouterr().err
    assert str(sweep / name) in said and ("hard link" in said or "leads out of" in said)
    assert not any(other.iterdir()) if name == "0" else other.read_text() == "of somebody"


def test_links_in_a_circle_do_no_harm(run_dir: Path) -> None:
    for name, target in (("itself", "itself"), ("one", "other"), ("other", "one")):
        (run_dir / name).symlink_to(target)
    files.refuse_links(run_dir, run_dir)
    assert not folder.rewinds(run_dir, "itself")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "has a line that is no JSON"),
        ("[]", "has a line that is no JSON object"),
        ('{"split": "val", "accuracy": 1}', "has a line without step and accuracy as numbers"),
        ('{"split": "val", "step": 1e999, "accuracy": []}', "has a line without step and accuracy as numbers"),
        ("1" * 2_000_000, "has a line of more than 1,048,576 bytes"),
    ],
)
def test_hostile_metrics_are_not_drawn(
    line: str, message: str, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "metrics.jsonl").write_text(f"{line}\n")
    assert compare.main([str(run_dir)]) == 2
    assert message in capfd.readouterr().err


LINEAGE = "lineage: [{params: &a0 {x: [1, 2]}}, {params: {x: [*a0, *a0]}}]"


@pytest.mark.parametrize("text", [BILLION + "\nlineage: [{params: {x: *a59}}]", LINEAGE, "[" * 5000, None])
def test_a_hostile_lineage_is_not_replayed(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "optimization_results.yaml"
    path.write_text(text) if text is not None else os.mkfifo(path)
    with pytest.raises(SpaceError, match=r"^hydra\.sweeper\.replay=") as caught:
        recorded_rounds(tmp_path, {"x": Number(0.0, 1.0)})
    assert len(str(caught.value)) < 1000


# Through the real programs


def program(run_dir: Path, *command: str) -> Program:
    return Program([sys.executable, str(ROOT / command[0]), *command[1:]], run_dir.parent)


@pytest.mark.timeout(240)
@pytest.mark.thorough
def test_the_programs_refuse_what_is_hostile_and_take_what_is_genuine(run_dir: Path) -> None:
    copies = {}
    for name in ("a network of the checkpoint's own", "a pickle that runs"):
        copies[name] = run_dir.parent / name.replace(" ", "_") / "run"
        shutil.copytree(run_dir, copies[name])
        CHECKPOINTS[name][0](copies[name])
        seal(copies[name])
    network, state = copies.values()
    programs = [
        program(run_dir, "scripts/evaluate.py", f"checkpoint={checkpoint_of(run_dir)}"),
        program(network, "scripts/evaluate.py", f"checkpoint={checkpoint_of(network)}"),
        program(state, "train.py", *TINY, f"resume={checkpoint_of(state)}"),
    ]
    codes, texts = zip(*(started.wait() for started in programs), strict=True)
    assert codes == (0, 2, 2), texts
    assert "only the checkpoint names this network" in texts[1] and "it names posix system" in texts[2]
    with (run_dir / "evaluations/step_000000/test.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2


def test_a_network_that_the_command_names_is_built(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message is about its parameters, which this checkpoint does not have."""
    with_config(model=MODULE | {"network": {"num_classes": 5}})(run_dir)
    seal(run_dir)
    named = "model.network._target_=torchvision.models.resnet18"
    assert evaluate.main([f"checkpoint={checkpoint_of(run_dir)}", "+" + named]) == 2
    assert "holds parameters of another model" in capfd.readouterr().err


# What a file of 1 MB takes


def of_many_tensors() -> bytes:
    """A header of as many tensors as a megabyte can name."""
    header = json.dumps(
        {f"{number:x}": {"dtype": "U8", "shape": [], "data_offsets": [0, 0]} for number in range(15_000)}
    )
    return len(header).to_bytes(8, "little") + header.encode()


def of_zeros() -> bytes:
    """A table of as many zeros as a megabyte can hold."""
    file = io.BytesIO()
    np.savez_compressed(file, task=np.zeros(2**30, np.int8))
    return file.getvalue()


WEIGHTS = "from metalearn.models.common.weights import read_state; read_state(str(path))"
JSON = "from metalearn.storage.files import read_object; read_object(path)"
YAML = "from metalearn.config.foreign import read_config; read_config(path)"
TABLE = """
from metalearn.tasks.table import _Cells
cells = _Cells(path)
cells.numbers(next(iter(cells._columns)), "mean")
"""
LIST = "from metalearn.tasks.image_folder import by_lists; by_lists(path.parent, ['a'], '.')"

OF_A_MEGABYTE: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "a byte array of 2 GB": (WEIGHTS, "file.pt", lambda: b"\x80\x02c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR."),
    "many operations": (WEIGHTS, "file.pt", lambda: b"\x80\x02" + b"N0" * 500_000 + b"N."),
    "many tensors": (WEIGHTS, "file.safetensors", of_many_tensors),
    "JSON, deep": (JSON, "result.json", lambda: b"[" * 2**20),
    "JSON, many": (JSON, "result.json", lambda: b'{"a": [' + b"[]," * 2**18 + b"1]}"),
    "YAML, many": (YAML, "config.yaml", lambda: b"a: [" + b"1," * (2**17 - 8) + b"]"),
    "YAML, deep": (YAML, "config.yaml", lambda: b"[" * 2**17),
    "a table, packed": (TABLE, "table.npz", of_zeros),
    "a table, plain": (TABLE, "table.csv", lambda: b"a\n" + b"1\n" * 2**19),
    "a list of classes": (LIST, "train.txt", lambda: b"a\n" * 2**19),
}
"""By what it holds: the code that reads it, its name, and its content."""

TAKEN = """
import resource, sys, time
from pathlib import Path
import torch, metalearn.app.run
path, began = Path(sys.argv[1]), time.process_time()
try:
    exec(sys.argv[2])
    said = "read"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, time.process_time() - began, said[:150])
"""


@slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", OF_A_MEGABYTE)
def test_no_file_of_a_megabyte_takes_a_gigabyte_or_ten_seconds(kind: str, tmp_path: Path) -> None:
    code, name, content = OF_A_MEGABYTE[kind]
    (tmp_path / name).write_bytes(content())
    assert (tmp_path / name).stat().st_size < 1_100_000
    done = said_by([sys.executable, "-c", TAKEN, str(tmp_path / name), code])
    megabytes, seconds, said = done.stdout.split(maxsplit=2)
    print(f"{kind}: {megabytes} MB, {float(seconds):.1f} s: {said}")
    assert int(megabytes) < 1000 and float(seconds) < 10, done.stdout + done.stderr
