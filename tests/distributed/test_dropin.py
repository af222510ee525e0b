"""A program written for torchopt.distributed runs unchanged, and gives the gradients of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import ROOT, slow

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parent / "programs/maml_rpc.py"
TASKS = 32


def run(command: list[str], folder: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment = outside | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *arguments]


def expected() -> list[torch.Tensor]:
    """The program's mathematics in one process, by torch.autograd alone."""
    text = PROGRAM.read_text().replace("import torchopt.distributed as todist\n", "import distributed as todist\n")
    names: dict[str, object] = {"__name__": "of_the_program"}
    exec(compile(text.replace("from torchopt import module_clone\n", ""), PROGRAM, "exec"), names)

    class Here:
        def to_here(self) -> torch.nn.Module:
            return net

    net = names["build_model"]()  # type: ignore[operator]
    tasks = names["build_tasks"](TASKS)  # type: ignore[operator]
    losses = [names["inner_loop"](Here(), i, *task)[0] for i, task in enumerate(tasks)]  # type: ignore[operator]
    return list(torch.autograd.grad(torch.stack(losses).mean(), list(net.parameters())))


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=slow) for way in ("one import changed", "unchanged, one process")), "unchanged"]
)
def test_a_program_for_torchopt_runs(way: str, tmp_path: Path) -> None:
    result = tmp_path / "result.pt"
    if way == "one import changed":
        text = PROGRAM.read_text().replace("import torchopt.distributed as todist", "import distributed as todist")
        program = tmp_path / "program.py"
        program.write_text(text.replace("from torchopt import module_clone", "from distributed import module_clone"))
        run(torchrun(str(program), str(result), str(TASKS)), tmp_path)
    elif way == "unchanged":
        run(torchrun("-m", "distributed.as_torchopt", str(PROGRAM), str(result), str(TASKS)), tmp_path)
    else:
        run([sys.executable, "-m", "distributed.as_torchopt", str(PROGRAM), str(result), str(TASKS)], tmp_path)
    gradients = torch.load(result, weights_only=True)["grads"]
    for ours, theirs in zip(gradients, expected(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients)


@slow
def test_it_stands_in_for_torchopt_installed_or_not(tmp_path: Path) -> None:
    check = (
        "from distributed import as_torchopt; as_torchopt.install(); as_torchopt.install()\n"
        "import distributed, torchopt.distributed as todist, torchopt.distributed.api as api, torchopt\n"
        "assert todist is distributed and api is distributed.api and torchopt.distributed is distributed\n"
    )
    run([sys.executable, "-c", check + "assert torchopt.module_clone is distributed.module_clone\n"], tmp_path)
    installed = tmp_path / "torchopt"
    (installed / "distributed").mkdir(parents=True)
    (installed / "__init__.py").write_text("from torchopt import distributed\nREST = 5\n")
    (installed / "distributed/__init__.py").write_text("raise AssertionError('the original was imported')\n")
    run([sys.executable, "-c", check + "assert torchopt.REST == 5\n"], tmp_path)
