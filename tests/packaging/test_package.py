"""The installed package: its command does in any folder what train.py does in the checkout."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.runs import LIMIT, ROOT, Program, slow

pytestmark = pytest.mark.thorough

TINY = [
    "experiment=maml_glyphs", "model.filters=8", "trainer.steps=2", "trainer.val_every=2", "trainer.meta_batch_size=4",
    "trainer.task_chunk=2", "trainer.val_tasks=4", "trainer.test_tasks=4", "logger.tensorboard=false",
    "logger.plots=false", "logger.report=false",
]  # fmt: skip

FOLDERS = ("metalearn", "distributed", "conf")
"""What a wheel holds."""


def files_of(folder: Path, root: Path) -> set[str]:
    """The files below a folder, by their names below `root`, without those that Python has compiled."""
    return {str(path.relative_to(root)) for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the built package, and sees what the package depends on."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "outputs", "data", "shared")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)  # the build writes beside the sources
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "show", "-q", "setuptools"], capture_output=True).returncode:
        pytest.skip("pip or setuptools is missing, which build the package; type python -m pip install setuptools")
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    run = subprocess.run(build, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = [*pip, "--python", str(environment / "bin/python"), "install", "-q", "--no-deps", "--no-index"]
    run = subprocess.run([*install, *map(str, folder.glob("*.whl"))], capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr
    return environment / "bin"


@pytest.fixture(scope="module")
def runs(bin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same run by train.py, and by the command with two workers."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for run, command in {
        "checkout": [sys.executable, str(ROOT / "train.py")],
        "two": [str(bin_folder / "metalearn"), "workers=2"],
    }.items():
        outcome = Program([*command, *TINY, f"run={run}"], folder).wait()
        assert outcome.code == 0, outcome.text
    return folder / "outputs/maml_glyphs"


def test_the_command_writes_the_parameters_of_train_py(runs: Path) -> None:
    written = [(runs / run / "checkpoints/last/params.safetensors").read_bytes() for run in ("checkout", "two")]
    assert written[0] == written[1]


def test_the_package_holds_all_of_the_program_and_nothing_else(bin_folder: Path) -> None:
    packages = next(bin_folder.parent.glob("lib/python*/site-packages"))
    ours = {name for folder in FOLDERS for name in files_of(ROOT / folder, ROOT)}
    inside = {f"metalearn/{name}" if name.startswith("conf/") else name for name in ours}
    installed = {name for name in files_of(packages, packages) if ".dist-info/" not in name}
    assert installed == inside | {"dependencies.pth"}
    assert len(inside) > 200


def test_a_checkpoint_is_evaluated_from_another_folder(bin_folder: Path, runs: Path, tmp_path: Path) -> None:
    checkpoint = f"checkpoint={runs / 'two/checkpoints/best'}"
    outcome = Program([str(bin_folder / "metalearn"), "evaluate", checkpoint, "tasks=4"], tmp_path).wait()
    assert outcome.code == 0 and "test accuracy" in outcome.text, outcome.text


def test_a_search_without_the_sweeper_says_what_to_install(bin_folder: Path, tmp_path: Path) -> None:
    command = [str(bin_folder / "metalearn"), "--multirun", *TINY, "hydra/sweeper=async", "seed=0,1"]
    outcome = Program(command, tmp_path).wait()
    assert outcome.code == 2 and "type pip install ./hydra_async_sweeper" in outcome.text, outcome.text


def test_wrong_usage_says_what_to_type(bin_folder: Path, tmp_path: Path) -> None:
    outcome = Program([str(bin_folder / "metalearn"), "evalute", "checkpoint=x"], tmp_path).wait()
    assert outcome.code == 2 and "did you mean evaluate?" in outcome.text
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    outcome = Program([str(bin_folder / "python"), "-m", "metalearn", "workers=4"], tmp_path, started).wait()
    assert outcome.code == 2 and "torchrun --nproc_per_node=4 -m metalearn train workers=4" in outcome.text


@pytest.mark.parametrize(
    "command", [["metalearn", "trainer.steps=1"], pytest.param(["python", "-c", "import metalearn.app"], marks=slow)]
)
def test_another_package_called_distributed_is_named(bin_folder: Path, tmp_path: Path, command: list[str]) -> None:
    dask = tmp_path / "first/distributed"
    dask.mkdir(parents=True)
    (dask / "__init__.py").write_text("raise SystemExit('this was imported')\n")
    program = [str(bin_folder / command[0]), *command[1:]]
    outcome = Program(program, tmp_path, {"PYTHONPATH": str(dask.parent)}).wait()
    assert outcome.code == (2 if command[0] == "metalearn" else 1)
    last = outcome.text.splitlines()[-1]
    assert str(dask) in last and "Dask's has the same name" in last and "pip uninstall -y distributed" in last
    if command[0] == "metalearn":
        assert outcome.text.splitlines() == [last]
