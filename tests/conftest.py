"""Fixtures of several test modules: the real data, if it is there, and runs of the real program."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hub import hub  # noqa: F401 (a fixture)
from tests.runs import ROOT, Program, Start

FIRST = ("tests/docs/test_blocks.py", "tests/processes", "tests/faults", "tests/distributed", "tests/sweeps")
"""What takes longest. Where several files run at a time, these come first, so that no process ends last with one of
them while the others have nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path.relative_to(ROOT)).startswith(FIRST))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache folder for the whole test session; processes of pytest-xdist share it, since each kernel takes
    seconds to compile."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    before = os.environ.get("METALEARN_CACHE")
    os.environ["METALEARN_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["METALEARN_CACHE"]
    else:
        os.environ["METALEARN_CACHE"] = before


@pytest.fixture(scope="session")
def omniglot_root() -> Path:
    """The folder of the real Omniglot."""
    root = Path(os.environ.get("METALEARN_DATA", ROOT / "data"))
    if not list(root.glob("**/images_background.zip")):
        pytest.skip(f"Omniglot's archives are not under {root}; name their folder: METALEARN_DATA=/path")
    return root


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `train.py` (with `torchrun=N` by torchrun) in an empty folder; kills its processes at the end."""
    programs: list[Program] = []

    def start_program(
        *overrides: str, torchrun: int | None = None, torchrun_arguments: Sequence[str] = (), **extra: str
    ) -> Program:
        python = [sys.executable]
        if torchrun is not None:
            logs = (
                f"--log-dir={tmp_path.parent / 'torchrun'}"  # else folders stay behind, in the temporary folder of all
            )
            options = ["--standalone", f"--nproc_per_node={torchrun}", logs, *torchrun_arguments]
            python = [sys.executable, "-m", "torch.distributed.run", *options]
        programs.append(Program([*python, str(ROOT / "train.py"), *overrides], tmp_path, extra))
        return programs[-1]

    yield start_program
    for program in programs:
        program.kill()
