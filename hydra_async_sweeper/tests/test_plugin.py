"""Hydra's own suites for launchers and sweepers, with the sweeper `async` and two slots; and an app of a stranger."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.sweeper import Sweeper
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import VersionBase
from omegaconf import DictConfig

HERE = Path(__file__).resolve().parent

# the suites' applications leave it to Hydra whether to change the working folder, of which it warns
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*change working directory:UserWarning"),
]

OVERRIDES = ["hydra/sweeper=async", "hydra.sweeper.n_jobs=2", "hydra.sweeper.plots=false"]


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suites want a Hydra that no earlier test has told a version; and the programs that they start in folders of
    their own must find our plugin."""
    Plugins.instance()  # registers the configs of all plugins once; the suites return to the state before each test
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent / "src"))
    instances: dict[Any, Any] = Singleton._instances
    before = instances.pop(VersionBase, None)
    yield
    instances.pop(VersionBase, None)
    if before is not None:
        instances[VersionBase] = before


def test_hydra_discovers_the_sweepers() -> None:
    names = [plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)]
    assert {"AsyncSweeper", "PbtSweeper"} <= set(names)


@pytest.mark.parametrize("launcher_name, overrides", [("basic", list(OVERRIDES))])
class TestAsLauncher(LauncherTestSuite):
    def test_failure_preserves_task_traceback(
        self, hydra_sweep_runner: Any, launcher_name: str, overrides: list[str], tmpdir: Path
    ) -> None:
        """The suite of Hydra 1.4 wants the exception itself. A trial's process hands over text only, in its log."""

        def task_func(_: DictConfig) -> None:
            try:
                raise ValueError("launcher cause")
            except ValueError as cause:
                raise RuntimeError("launcher failure") from cause

        sweep = hydra_sweep_runner(
            calling_file=None, calling_module="hydra.test_utils.a_module", task_function=task_func,
            config_path="configs", config_name="compose.yaml",
            overrides=[f"hydra/launcher={launcher_name}", *overrides, "hydra.sweeper.max_retries=0"], temp_dir=tmpdir,
        )  # fmt: skip
        with pytest.raises(SystemExit) as leaving, sweep:
            pass
        assert leaving.value.code == 1
        log = (Path(tmpdir) / "logs/trial_0000.log").read_text()
        for text in ("ValueError: launcher cause", "direct cause", "in task_func", "RuntimeError: launcher failure"):
            assert text in log


@pytest.mark.slow
@pytest.mark.parametrize("launcher_name, overrides", [("basic", list(OVERRIDES))])
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [(DictConfig({}), ["-m", *OVERRIDES])])
class TestIntegration(IntegrationTestSuite):
    pass


# An app that is not ours


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where nothing can be imported but what its environment holds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([python, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_foreign_app_is_swept_by_the_plugin_alone(lone_python: Path, tmp_path: Path) -> None:
    app = HERE / "foreign_app.py"
    assert len(app.read_text().splitlines()) <= 30
    absent = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'metalearn', 'distributed')])"
    assert run(lone_python, tmp_path, "-c", absent).stdout == "[None, None, None]\n"
    space = ("x=interval(-5,5)", "y=tag(log,interval(0.01,10))", "side=left,right")
    search = ("-m", "hydra/sweeper=async", "hydra.sweeper.n_trials=24", "hydra.sweeper.n_jobs=2",
              "hydra.sweep.dir=sweep", *space)  # fmt: skip
    swept = run(lone_python, tmp_path, str(app), *search)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    with (tmp_path / "sweep/trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == [str(number) for number in range(24)]
    results = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    best = min(rows, key=lambda row: float(row["value"]))
    assert results["best_value"] == float(best["value"])
    plots = {path.name for path in (tmp_path / "sweep/plots").iterdir()}
    assert plots == {f"{name}.png" for name in ("history", "importance", "parallel", "slice", "timeline")}
    program, *overrides = results["command"].split()[1:]
    assert Path(program) == app and run(lone_python, tmp_path, program, *overrides).returncode == 0

    again = run(lone_python, tmp_path, str(app), *search, "hydra.sweeper.n_trials=25")
    assert again.returncode == 0 and (tmp_path / "sweep/24/foreign_app.log").exists(), again.stdout + again.stderr
    assert "trial 24: starts" in again.stdout and "trial 23: starts" not in again.stdout
    (tmp_path / "sweep/trials.csv").unlink()
    report = run(lone_python, tmp_path, "-m", "hydra_async_sweeper.report", "sweep")
    assert report.returncode == 0 and "sweep/trials.csv" in report.stdout, report.stderr


def test_the_wheel_holds_the_sources_and_nothing_else(lone_python: Path) -> None:
    packages = next(lone_python.parent.parent.glob("lib/python*/site-packages"))
    sources = HERE.parent / "src"
    ours = {path.relative_to(sources) for path in sources.rglob("*.py")}
    tops = [packages / "hydra_async_sweeper", packages / "hydra_plugins"]  # no __init__.py: a namespace of all plugins
    files = [path for top in tops for path in top.rglob("*") if path.suffix not in ("", ".pyc")]
    assert {path.relative_to(packages) for path in files} == ours


def swept(folder: Path, app: Path, *overrides: str) -> tuple[int, str]:
    command = [sys.executable, str(app), "-m", *OVERRIDES, *overrides]
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_what_a_sweep_leaves_out_or_cannot_use_is_said(tmp_path: Path) -> None:
    search = ("hydra.sweeper.sampler=random", "hydra.sweep.dir=sweep", "x=interval(-5,5)")
    app = HERE / "foreign_app.py"
    for refused, line in (
        ("hydra.sweep.subdir=one", "error: hydra.sweep.subdir=one: all trials would share this folder; leave it out"),
        ("hydra.sweeper.pruner=median", "error: hydra.sweeper.pruner=median: reads a field of metrics.jsonl"),
    ):
        code, text = swept(tmp_path, app, *search, "hydra.sweeper.n_trials=3", refused)
        assert code == 2 and line in text and "Traceback" not in text, text
    other = ("hydra.sweep.subdir=one", "hydra.sweep.dir=other")
    assert swept(tmp_path, app, *search, "hydra.sweeper.n_trials=1", *other)[0] == 0
    assert swept(tmp_path, app, *search, "hydra.sweeper.n_trials=3")[0] == 0
    code, text = swept(tmp_path, app, *search, "hydra.sweeper.n_trials=2")
    assert code == 0 and "hydra.sweeper.n_trials=2: 3 trials have begun already, and all of them count" in text, text


TYPED = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

Colour = Enum("Colour", "RED BLUE")

@dataclass
class MySQL:
    port: int = 3306

@dataclass
class Config:
    db: MySQL = MISSING
    colour: Colour = Colour.RED
    place: Path = Path("a b")
    raw: bytes = b"x"
    ports: dict[Colour, MySQL] = field(default_factory=lambda: {Colour.BLUE: MySQL()})
    x: float = 0.0

ConfigStore.instance().store(name="config", node=Config)
ConfigStore.instance().store(group="db", name="mysql", node=MySQL)

@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    assert (config.place, config.raw) == (Path("a b"), b"x")
    return config.x + config.colour.value

main()
"""
"""An app with a structured config, as in Hydra's tutorials, of every type that OmegaConf has."""


def test_a_config_may_have_values_of_any_type(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(TYPED)
    search = ("colour=RED,BLUE", "x=1,2", "+db=mysql", "hydra.sweep.dir=sweep")
    for started in (True, False):
        code, text = swept(tmp_path, tmp_path / "app.py", *search)
        assert code == 0 and ("trial 3: starts" in text) == started and "colour=RED x=1 +db=mysql" in text, text
    code, text = swept(tmp_path, tmp_path / "app.py", *search, "place=c")
    assert code == 2 and "config.place: a b → c" in text, text


def test_the_first_line_says_how_to_resume_in_a_dated_folder(tmp_path: Path) -> None:
    search = ("hydra.sweeper.n_trials=1", "x=interval(-5,5)")
    first = swept(tmp_path, HERE / "foreign_app.py", *search)[1]
    (folder,) = tmp_path.glob("multirun/*/*")
    override = f"hydra.sweep.dir={folder.relative_to(tmp_path)}"
    assert first.splitlines()[0].endswith(f"to resume this sweep, type the same command with {override}"), first
    code, text = swept(tmp_path, HERE / "foreign_app.py", *search, override)
    assert code == 0 and "starts" not in text and "to resume" not in text, text


def test_a_stopped_sweep_in_a_dated_folder_says_how_to_resume(tmp_path: Path) -> None:
    text = (HERE / "foreign_app.py").read_text()
    (tmp_path / "app.py").write_text(text.replace("    print(", "    __import__('time').sleep(600)\n    print("))
    command = [sys.executable, "app.py", "-m", *OVERRIDES, "hydra.sweeper.n_trials=1", "x=interval(-5,5)"]
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=-1, stderr=-2, text=True) as process:
        assert process.stdout is not None
        assert any("trial 0: starts" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        last = process.stdout.read().splitlines()[-1]
    (folder,) = tmp_path.glob("multirun/*/*")
    override = f"hydra.sweep.dir={folder.relative_to(tmp_path)}"
    assert process.returncode == 130 and last.endswith(f"save; the same command with {override} resumes the sweep"), (
        last
    )
