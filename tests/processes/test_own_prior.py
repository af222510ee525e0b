"""A prior of the user's own: the page that explains it is right, and any number of workers gives the same bits."""

import re
from pathlib import Path

import pytest

from metalearn.cli import train
from metalearn.cli.data import prior
from tests.runs import ROOT, assert_same_bytes, result_of, train_in

pytestmark = pytest.mark.thorough

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_prior_of_the_page_is_checked_and_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kinds lie 2√2 · |z| apart: the best guess is right in about nine of ten rows, and chance in five."""
    blocks = BLOCK.findall((ROOT / "docs/how-to/prior.md").read_text())
    assert [language for language, _ in blocks] == ["python", "bash", "bash", "python"]
    (tmp_path / "my_prior.py").write_text(blocks[0][1])
    assert len(blocks[0][1].splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("metalearn.app.prior_check.SECONDS", 0.01)
    looked, trained = (block.replace("\\\n", "").replace("'", "").split() for _, block in blocks[1:3])
    assert prior([word if word != "20" else "3" for word in looked[2:]]) == 0
    assert "prior my_prior: 3 tasks" in capsys.readouterr().out and (tmp_path / "my_prior.html").exists()
    assert train.main([
        *trained[2:], "hydra.run.dir=run", "trainer.meta_batch_size=16", "optimizer.warmup=20", "model.width=32",
        "model.layers=2", "trainer.val_every=200", "trainer.val_tasks=64", "trainer.test_tasks=128",
        "logger.plots=false", "logger.report=false", "logger.tensorboard=false",
    ]) == 0  # fmt: skip
    assert result_of(tmp_path / "run")["test"]["accuracy"] > 0.8
    tables = "import numpy as np\nx, y = np.arange(120.0).reshape(60, 2), np.arange(60) % 2\n"
    (tmp_path / "mixed.py").write_text(tables + blocks[3][1])
    assert prior(["check", "mixed", "--tasks", "3"]) == 0
    assert "prior mixed: 3 tasks" in capsys.readouterr().out


RUN = (
    "experiment=in_context_sinusoid", "dataset=prior", "dataset.prior=tests.own_prior", "plugins=[tests]",
    "dataset.group=8", "model.inputs=3", "model.outputs=2", "algorithm.width=8", "algorithm.layers=1",
    "trainer.steps=6", "trainer.meta_batch_size=20", "trainer.val_every=6", "trainer.val_tasks=12",
    "trainer.test_tasks=12", "optimizer.warmup=0", "logger.plots=false", "logger.report=false",
    "logger.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_in(folder, *RUN)
    return folder


def test_two_workers_and_a_pause_give_the_bits_of_one(alone: Path, tmp_path: Path) -> None:
    """Steps of 20 tasks and groups of 8: chunks end where groups or steps do."""
    train_in(tmp_path / "run", *RUN, "workers=2", "pause_after=3")
    train_in(tmp_path / "run", *RUN)
    assert_same_bytes(alone, tmp_path / "run")
