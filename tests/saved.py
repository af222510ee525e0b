"""Runs that are saved before their first step: real folders without the time that training takes."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from metalearn.app.job import script, to_job
from metalearn.app.parts import Parts, assemble, seen_in
from metalearn.config.compose import compose_config
from metalearn.config.values import to_container
from metalearn.runs.checkpoint import write
from metalearn.runs.metrics import KEY, Seen, to_meta
from metalearn.saved.form import MANIFEST, META, TENSORS, digest_of
from metalearn.training.trainer import TrainState
from tests.runs import ROOT

SECRET = "s3cret-of-the-environment"
"""The value of the environment variable SECRET while a folder is damaged."""

MARKER = "executed"
"""The name of the file that hostile content makes if it runs."""


def saved_run(run_dir: Path, *overrides: str, seen: bool = False) -> Parts:
    """Makes the run folder, with one checkpoint, to which `best` points; returns what the run is made of. The
    checkpoint names its classes if `seen`; else they are not known."""
    composed = compose_config([*overrides, f"hydra.run.dir={run_dir}"])
    parts = assemble(to_job(*composed, script(ROOT / "train.py"), []))
    state = TrainState.new(parts.start, parts.outer.start)
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra/config.yaml").write_text("seed: 0\n")
    classes = seen_in(parts.source, 1) if seen else Seen(complete=False)
    meta = {"config": to_container(composed.config), KEY: to_meta(classes)}
    checkpoint = write(run_dir / "checkpoints", state.snapshot(meta, {}))
    (run_dir / "checkpoints/best").symlink_to(checkpoint.name)
    return parts


def forge(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None, tensors: Any = None) -> None:
    """Changes meta.json by `change`, and the parameters by `tensors`; the digests are made anew, as who forges a folder
    would."""
    if change is not None:
        meta = json.loads((folder / META).read_text())
        change(meta)
        (folder / META).write_text(json.dumps(meta))
    if tensors is not None:
        save_file(tensors(load_file(folder / TENSORS)), folder / TENSORS)
    names = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({name: digest_of(folder / name) for name in names}))


@contextmanager
def copy_to_damage(genuine: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of a folder in the working folder `home`; at the end, what it holds must not have run."""
    copy = home / genuine.name
    shutil.copytree(genuine, copy)
    monkeypatch.chdir(home)
    monkeypatch.setenv("SECRET", SECRET)
    yield copy
    assert not list(home.rglob(MARKER)), "hostile content has run"
