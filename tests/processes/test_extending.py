"""Parts of one's own, in folders outside the repository: those of docs/how-to/extend.md, and what is refused."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.config.options import search, search_flags
from metalearn.config.saved import changed_config
from metalearn.config.values import to_container
from metalearn.errors import ConfigError
from tests.metalearn.learners import close, network, start_of, tasks
from tests.runs import PROGRAM, ROOT, Program, result_of, slow

FILE = re.compile(r"^`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)

PAGE = (ROOT / "docs/how-to/extend.md").read_text()

COMMAND = shlex.split(re.findall(r"^metalearn train (.*)$", PAGE, re.MULTILINE)[0])
"""The arguments of the command on that page."""

OWN = [word for word in COMMAND if not word.startswith("workers=")]
SHORT = ["trainer.steps=4", "trainer.val_every=2", "trainer.val_tasks=4", "trainer.test_tasks=4", "logger.plots=false"]
SHORT += ["run=seed0", "logger.report=false", "logger.tensorboard=false"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of docs/how-to/extend.md."""
    folder = tmp_path_factory.mktemp("home")
    files = FILE.findall(PAGE)
    assert len(files) == 18 and PAGE.count("```bash") == 1, "every block of the page is run here"
    assert PAGE.count("```python") == sum(name.endswith(".py") for name, _ in files)
    for name, content in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def found(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, in this process as the command line brings it in."""
    GlobalHydra.instance().clear()
    monkeypatch.syspath_prepend(home)
    search(str(home / "my_conf"))
    yield home
    search(None)


def run(home: Path, *arguments: str, program: str = "train.py") -> tuple[int, str]:
    command = [sys.executable, str(ROOT / program), *arguments]
    return tuple(Program(command, home, {"PYTHONPATH": "."}).wait())  # type: ignore[return-value]


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """The run folder of all these parts on two workers."""
    code, text = run(home, *COMMAND, *SHORT)
    assert code == 0, text
    return home / "outputs/square_waves/seed0"


@pytest.mark.thorough
def test_the_parts_of_the_page_are_trained_and_evaluated(home: Path, trained: Path) -> None:
    assert result_of(trained)["workers"] == 2
    notes = (trained / "notes.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in notes] == ["step 2, val", "step 4, val", "step 4, test"]
    checkpoint = f"checkpoint={trained / 'checkpoints/best'}"
    code, text = run(home, checkpoint, "plugins=[my_parts]", "tasks=4", program="scripts/evaluate.py")
    assert code == 0, text
    code, text = run(home, checkpoint, "tasks=4", program="scripts/evaluate.py")
    assert code == 2 and "If my_parts is a package of your own, type 'plugins=[my_parts]'" in text


def test_the_second_algorithm_is_right_on_compiled_networks(found: Path) -> None:
    layer_rates = importlib.import_module("my_parts.layer_rates").layer_rates
    compiled, options = network(), {"inner_lr": 0.01, "inner_steps": 2, "eval_steps": 2, "penalty": 0.1}
    ours, torchs = (layer_rates(model=model, **options) for model in (compiled, compiled._replace(network=None)))
    params = start_of(ours)
    got, expected = (learner.meta_grad(params, tasks(2), 1) for learner in (ours, torchs))
    close(got.grads, expected.grads, atol=1e-10)
    assert got.grads["inner_lr.conv1.weight"].shape == () and got.grads["inner_lr.conv1.weight"] != 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        ["model.waves=2,4"],
        pytest.param(["hydra/sweeper=async", "hydra.sweeper.sampler=grid", "model.waves=choice(2,4)"], marks=slow),
    ],
    ids=["grid", "async"],
)
def test_a_multirun_brings_them_to_every_job(home: Path, how: list[str], tmp_path: Path) -> None:
    code, text = run(home, "--multirun", *OWN, *SHORT, *how, "workers=2", f"hydra.sweep.dir={tmp_path}")
    assert code == 0, text
    results = [json.loads(path.read_text())["status"] for path in tmp_path.glob("*/result.json")]
    assert results == ["completed", "completed"], text


def test_they_are_options_with_keys_and_defaults(found: Path) -> None:
    config = compose_config(["plugins=[my_parts]", "experiment=square_waves", "model.waves=3"]).config
    assert config.model.waves == 3 and config.algorithm.inner_lr == 0.01
    assert build(config, "model").activations == 6
    with pytest.raises(ConfigError, match=r"model.wave: .* did you mean model.waves?"):
        compose_config(["plugins=[my_parts]", "experiment=square_waves", "model.wave=3"])
    with pytest.raises(ConfigError, match=r"model.waves=0: must be a whole number of at least 1"):
        build(compose_config(["plugins=[my_parts]", "experiment=square_waves", "model.waves=0"]).config, "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plugins=[no_such_package]"], r"plugins=\[no_such_package\]: cannot be imported .* PYTHONPATH"),
        (["plugins=my_parts"], r"must be a list of packages; type 'plugins=\[my_package\]'"),
        (["plugins=['a b']"], "must be a list of packages"),
        (["model._target_=my_parts.fourier.fourier"], r"type 'plugins=\[my_parts\]'"),
        (["plugins=[my_parts]", "model._target_=my_parts.fourier.nothing"], "is not found"),
        (["plugins=[my_parts]", "model._target_=my_parts.fourier.torch.load"], "that my_parts defines"),
        (["plugins=[my_parts]", "model._target_=os.system"], "is no factory of model"),
        (["--config-dir=nowhere"], "--config-dir=nowhere: must be a folder"),
    ],
)
def test_wrong_ones_end_with_what_to_type(
    found: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from metalearn.cli import train

    monkeypatch.chdir(found)
    own = [] if arguments[0].startswith("--") else ["--config-dir=my_conf"]
    assert train.main([*own, *arguments, "run=wrong"], PROGRAM) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(found.glob("outputs/*/wrong"))


def test_an_option_of_ours_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/maml.yaml").write_text("_target_: my_parts.other\n")
    with pytest.raises(ConfigError, match="algorithm=maml is an option of ours; rename"):
        search(str(tmp_path))
    assert search_flags() == []


def test_neither_a_yaml_nor_a_saved_config_admits_a_package(found: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/theirs.yaml").write_text("# @package _global_\nplugins: [my_parts]\n")
    search(str(tmp_path))
    with pytest.raises(ConfigError, match=r"a yaml names packages, and only the command line may"):
        compose_config(["experiment=theirs"])
    search(None)
    theirs = {"plugins": ["my_parts"], "model": {"_target_": "my_parts.fourier.fourier", "waves": 2}}
    saved = to_container(compose_config([]).config) | theirs
    config = changed_config(saved, [], {})
    assert config.plugins == []
    with pytest.raises(ConfigError, match=r"model._target_=my_parts.fourier.fourier: is no factory of model"):
        build(config, "model")
    assert build(changed_config(saved, ["plugins=[my_parts]"], {}), "model").activations == 4
