"""Every command that a document shows is one that the program understands."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hydra.core.global_hydra import GlobalHydra

from metalearn.__main__ import COMMANDS, main
from metalearn.config.compose import compose_config, parsed
from tests.runs import ROOT, slow

DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")))
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
    starts += [
        place for place, word in enumerate(command) if word == "metalearn" and place in (first, after_m(command))
    ]
    if not starts or "--help" in command or any(word.startswith("--config-dir") for word in command):
        return None
    overrides = [word for word in command[starts[0] + 1 :] if word not in ("--multirun", "-m", "--")]
    if overrides and overrides[0] in ("train", "sweep"):
        return [*(["hydra/sweeper=async"] if overrides[0] == "sweep" else []), *overrides[1:]]
    return None if overrides and "=" not in overrides[0] else overrides


def after_m(command: tuple[str, ...]) -> int:
    """The place of the module that `-m` names; -1 if there is none."""
    return command.index("-m") + 1 if "-m" in command else -1


TRAININGS = [overrides for command in ALL if (overrides := overrides_of(command)) is not None]


def one_job(overrides: list[str]) -> list[str]:
    """The overrides with one value in place of those that a multirun takes."""
    single = []
    for override in parsed(overrides):
        swept = override.is_sweep_override()
        single.append(f"{override.get_key_element()}=1" if swept else str(override.input_line))
    return single


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(words, marks=slow if at % 4 else (), id=" ".join(words)) for at, words in enumerate(TRAININGS)],
)  # tests/docs/test_blocks.py runs those that need nothing
def test_every_training_can_be_composed(overrides: list[str]) -> None:
    if "hydra/launcher=ray" in overrides and find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("the package hydra-ray-launcher is not installed")
    GlobalHydra.instance().clear()
    compose_config(one_job([word for word in overrides if PLACEHOLDER not in word]))


COMMANDS_SHOWN = [
    command[place + 1 :]
    for command in ALL
    for place in (0, after_m(command))
    if place >= 0 and command[place : place + 1] == ("metalearn",) and overrides_of(command) is None
]


@pytest.mark.parametrize("command", COMMANDS_SHOWN, ids=" ".join)
def test_every_command_has_these_options(command: tuple[str, ...]) -> None:
    name, *words = command
    options = [word for word in words if word.startswith("--")]
    if name in ("train", "sweep") or not options:
        assert name in COMMANDS or [name, words[0].partition("=")[0]] == ["-sc", "install"]
        return
    shown = help_of(name)
    missing = [option for option in options if option not in shown]
    assert not missing, f"metalearn {name} has no option {' '.join(missing)}"


def help_of(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


UNQUOTED = re.compile(r"""'[^']*'|"[^"]*"|\\.|(#|[][()*?~]|(?:^|\s)=)""")
"""What zsh takes for a pattern outside of quotes, and `#`, which begins no comment where one types."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_line_can_be_pasted_into_zsh(document: str) -> None:
    for block in BLOCK.findall((ROOT / document).read_text()):
        for line in block.splitlines():
            wrong = [match[1] for match in UNQUOTED.finditer(line) if match[1]]
            assert not wrong, f"{document}: {line}: quote {' '.join(wrong)}"


def test_a_line_that_zsh_would_refuse_is_found() -> None:
    for line in ("metalearn train 'logger=[wandb]' # a comment", "metalearn train logger=[wandb]", "ls *"):
        assert any(match[1] for match in UNQUOTED.finditer(line)), line


def test_there_are_commands_to_check() -> None:
    assert len(TRAININGS) > 30 and len(COMMANDS_SHOWN) > 10
