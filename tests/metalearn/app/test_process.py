"""What a user sees of the program beside its runs: the first line, help in a pipe, configs of an earlier version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metalearn.app.ranks import check_gpus
from metalearn.config.compose import compose_config
from metalearn.config.help import config_page
from metalearn.config.names import folder_name
from metalearn.config.saved import FORMER, FREE_KEYS, MOVED, with_present_targets
from metalearn.config.values import differences, to_container
from metalearn.errors import ConfigError
from tests.runs import ROOT

pytestmark = pytest.mark.thorough

SAVED = json.loads((ROOT / "tests/saved_config.json").read_text())
"""The config in a checkpoint's meta.json, written before modules moved into rooms."""


def test_the_run_is_announced_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    run = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "run=first"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stderr.splitlines()[0] == "maml_glyphs: starting in outputs/maml_glyphs/first"
    assert "no torch here" in run.stderr


def test_help_may_be_cut_by_its_reader() -> None:
    for program in ("train.py", "scripts/evaluate.py"):
        command = [sys.executable, str(ROOT / program), "--help"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()  # as `head` does once it has enough
            assert process.stderr.read() == ""
            assert process.wait(60) == 0


def test_a_config_saved_by_an_earlier_version_is_the_same_run() -> None:
    overrides = ["experiment=maml_glyphs", "trainer.steps=40", "trainer.val_every=20", "checkpoint.every=20"]
    now = to_container(compose_config(overrides).config)
    assert differences(SAVED, now)
    newer = differences(with_present_targets(SAVED), now)
    on = [key for key, (old, new) in newer.items() if old != "absent" or new not in (None, False, FORMER.get(key))]
    assert all(any(f"{key}.".startswith(f"{free}.") for free in FREE_KEYS) for key in on), newer


def test_a_folder_of_a_multirun_is_one_short_name() -> None:
    assert folder_name("init_from=../../y/s20,seed=1") == "init_from=..-..-y-s20,seed=1"
    long = folder_name("name=" + "ü" * 100)
    assert len(long.encode()) <= 120 and long != folder_name("name=" + "ü" * 101)


def test_every_moved_target_leads_somewhere() -> None:
    for now in MOVED.values():
        assert (ROOT / f"{now.rstrip('.').replace('.', '/')}.py").is_file()


def test_the_page_of_keys_has_every_key_with_its_default() -> None:
    assert "| `dataset.train_ways` | `null` |" in config_page()


def test_fewer_gpus_than_workers_are_refused_only_where_gpus_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="this host has 2 GPUs for 4 workers; type workers=2"):
        check_gpus("cuda", 4, 2)
    for device, workers, gpus in (("cuda", 2, 2), ("auto", 4, 2), ("cpu", 4, 0)):
        check_gpus(device, workers, gpus)
