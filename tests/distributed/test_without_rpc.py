"""A torch whose RPC cannot be imported: what needs none trains, is evaluated and resumes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_house import imported
from tests.runs import ROOT

HIDDEN = """
import sys
import torch, torch.distributed
sys.modules["torch.distributed.rpc"] = None
del torch.distributed.rpc
from metalearn.cli.train import main
{}
"""

RUN = [
    "experiment=maml_sinusoid", "trainer.meta_batch_size=8", "trainer.task_chunk=2", "trainer.val_every=2",
    "trainer.val_tasks=4", "trainer.test_tasks=4", "logger.plots=false", "logger.report=false", "hydra.run.dir=run",
]  # fmt: skip


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDDEN.format(program)]
    environment = {
        "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1",
        "METALEARN_CACHE": os.environ["METALEARN_CACHE"],  # compiled kernels
    }  # fmt: skip
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.thorough
@pytest.mark.parametrize("own", [["strategy=local"], ["workers=2", "strategy=ddp"]], ids=["local", "ddp"])
def test_local_and_ddp_need_no_rpc(own: list[str], tmp_path: Path) -> None:
    """The two ranks are forks of the process in which RPC is hidden."""
    calls = [[*RUN, *own, "trainer.steps=4", "pause_after=2"], [*RUN, *own, "trainer.steps=4", "pause_after=null"]]
    result = run(f"for call in {calls!r}: print('code', main(call))\nprint('rpc', sorted(sys.modules))", tmp_path)
    assert result.stdout.count("code 0") == 2 and "test mse" in result.stdout, result.stdout + result.stderr
    assert "going on after step 2" in result.stderr


def test_one_folder_imports_torchs_rpc() -> None:
    paths = [path for room in ("distributed", "metalearn") for path in ROOT.glob(f"{room}/**/*.py")]
    rpc = ("torch.distributed.rpc", "torch.distributed.autograd")
    found = {path.parent.relative_to(ROOT) for path in paths if any(name.startswith(rpc) for name in imported(path))}
    assert found == {Path("distributed/calls")}
