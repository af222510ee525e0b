"""Every command that a document shows is one that the program understands."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from metalearn.__main__ import COMMANDS
from metalearn.config.compose import compose_config, parsed
from tests.runs import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")))
"""But RESULTS.md: tests/benchmarks/test_reproduce.py composes its rows."""

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)

PLACEHOLDER = "…"
"""In place of what only the reader knows. A command with such an option, or with parts of one's own, is not composed;
tests/processes/test_extending.py runs those."""


def commands() -> Iterator[tuple[str, ...]]:
    """The commands of all documents, each once."""
    lines = (
        line
        for document in sorted(DOCUMENTS)
        for block in BLOCK.findall((ROOT / document).read_text())
        for line in block.replace("\\\n", " ").splitlines()
    )
    for line in lines:
        yield tuple(shlex.split(line, comments=True))


ALL = sorted(set(commands()))


def overrides_of(command: tuple[str, ...]) -> list[str] | None:
    """What a training is told; None if the command is no training, or one with parts of the reader's own."""
    first = next((place for place, word in enumerate(command) if "=" not in word), 0)  # behind VARIABLE=VALUE
    starts = [place for place, word in enumerate(command) if word == "train.py"]
    starts += [first] if command[first:] and command[first].endswith("metalearn") else []
    if not starts or "--help" in command or any(word.startswith("--config-dir") for word in command):
        return None
    overrides = [word for word in command[starts[0] + 1 :] if word not in ("--multirun", "-m", "--")]
    return None if overrides and overrides[0] in COMMANDS else overrides


TRAININGS = [overrides for command in ALL if (overrides := overrides_of(command)) is not None]


def one_job(overrides: list[str]) -> list[str]:
    """The overrides with one value in place of those that a multirun takes."""
    single = []
    for override in parsed(overrides):
        swept = override.is_sweep_override()
        single.append(f"{override.get_key_element()}=1" if swept else str(override.input_line))
    return single


@pytest.mark.parametrize("overrides", TRAININGS, ids=" ".join)
def test_every_training_can_be_composed(overrides: list[str]) -> None:
    if "hydra/launcher=ray" in overrides and find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("the package hydra-ray-launcher is not installed")
    GlobalHydra.instance().clear()
    compose_config(one_job([word for word in overrides if PLACEHOLDER not in word]))


SCRIPTS = [command for command in ALL if any(word.startswith("scripts/") for word in command)]


@pytest.mark.parametrize("command", SCRIPTS, ids=" ".join)
def test_every_script_has_these_options(command: tuple[str, ...]) -> None:
    place = next(place for place, word in enumerate(command) if word.startswith("scripts/"))
    name = Path(command[place]).stem
    modules = (f"metalearn/cli/{name}", f"benchmarks/{name}", f"benchmarks/{name}/command")
    sources = (ROOT / command[place], *(ROOT / f"{module}.py" for module in modules))
    text = "".join(path.read_text() for path in sources if path.exists())
    assert (ROOT / command[place]).is_file()
    missing = [word for word in command[place + 1 :] if word.startswith("--") and f'"{word}"' not in text]
    assert not missing, f"{command[place]} has no option {' '.join(missing)}"


def test_there_are_commands_to_check() -> None:
    assert len(TRAININGS) > 30 and len(SCRIPTS) > 10
