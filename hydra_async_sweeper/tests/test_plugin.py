"""Hydra's own suites for launchers and sweepers, with the sweeper `async` and two slots."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import _UNSPECIFIED_, VersionBase
from omegaconf import DictConfig

SOURCES = Path(__file__).resolve().parent.parent / "src"

# the suites' applications leave it to Hydra whether to change the working folder, of which it warns
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*change working directory:UserWarning"),
]


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suites want a Hydra that no earlier test has told a version; and the programs that they start in folders of
    their own must find our plugin."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    before = VersionBase.instance()
    VersionBase.set_instance(VersionBase.__new__(VersionBase))
    VersionBase.instance().version_base = _UNSPECIFIED_
    yield
    VersionBase.set_instance(before)


OVERRIDES = ["hydra/sweeper=async", "hydra.sweeper.n_jobs=2"]


def test_hydra_discovers_the_sweeper() -> None:
    assert "AsyncSweeper" in [plugin.__name__ for plugin in Plugins.instance().discover(Sweeper)]


@pytest.mark.parametrize("launcher_name, overrides", [("basic", list(OVERRIDES))])
class TestAsLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize("launcher_name, overrides", [("basic", list(OVERRIDES))])
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [(DictConfig({}), ["-m", *OVERRIDES])])
class TestIntegration(IntegrationTestSuite):
    pass
