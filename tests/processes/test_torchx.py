"""The program under TorchX, on this host."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, Program, Start, assert_same_bytes

TINY = (
    "experiment=maml_sinusoid", "trainer.steps=5", "trainer.val_every=5", "trainer.val_tasks=4", "trainer.test_tasks=8",
)  # fmt: skip


@pytest.mark.thorough
def test_a_run_by_torchx_has_the_bits_of_our_launcher(tmp_path: Path, start: Start) -> None:
    if importlib.util.find_spec("torchx") is None:
        pytest.skip("the package torchx is not installed; type pip install torchx in an environment of its own")
    own = Path(sys.executable).parent
    path = os.pathsep.join([str(own), os.environ["PATH"]])
    if shutil.which("torchrun", path=path) is None:
        pytest.skip("torchrun is not on the path")
    for name in ("train.py", "metalearn", "distributed", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)  # local_cwd runs in the folder where it is typed
    command = ["run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script", "train.py", "--", *TINY, "run=torchx"]
    outcome = Program([sys.executable, "-m", "torchx.cli.main", *command], tmp_path, {"PATH": path}).wait()
    assert outcome.code == 0 and "2 workers; all in" in outcome.text, outcome.text
    plain = start(*TINY, "run=plain", "workers=2").wait()
    assert plain.code == 0, plain.text
    assert_same_bytes(*(tmp_path / "outputs/maml_sinusoid" / run for run in ("torchx", "plain")))
