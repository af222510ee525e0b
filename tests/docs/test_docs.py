"""The documents name lines of code, configs and tests: all of them exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT

DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
ALGORITHMS = ROOT / "docs/algorithms.md"

REFERENCE = re.compile(r"`([\w./-]+\.\w+):(\d+)`(?:\s+`([^`]+)`)?")
"""`file:line`, and after it a piece of that line."""

GROUPS = "experiment|algorithm|inner|dataset|model|optimizer|strategy"

CHOICE = re.compile(rf"(?<![\w.])({GROUPS})=(\w+(?:,\w+)*)(?![\w.(…])")
"""A chosen option of a group, or several."""

SETTING = re.compile(r"`(\w+: [^`]+)`")
"""A key and its value, as a yaml has them."""

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def wrong_references(text: str) -> Iterator[str]:
    """A message for each wrong reference, with the line where its code really stands."""
    for name, number, code in REFERENCE.findall(text):
        path = ROOT / name
        if not path.is_file():
            yield f"{name}:{number}: there is no such file"
            continue
        if not code:
            yield f"{name}:{number}: write a piece of the line behind it, in backticks"
            continue
        lines = path.read_text().splitlines()
        if not 1 <= int(number) <= len(lines) or code not in lines[int(number) - 1]:
            places = [f"{name}:{line}" for line, content in enumerate(lines, start=1) if code in content]
            yield f"{name}:{number} `{code}`: it stands at {' or '.join(places) or 'no line of this file'}"


def configs_of(text: str) -> list[Path]:
    """The yamls that a text chooses, without the code that it refers to."""
    chosen = CHOICE.findall(REFERENCE.sub("", text))
    return [ROOT / f"conf/{group}/{name}.yaml" for group, names in chosen for name in names.split(",")]


@every_document
def test_every_line_that_is_referred_to_is_there(document: Path) -> None:
    wrong = list(wrong_references(document.read_text()))
    assert not wrong, f"{document.name}:\n" + "\n".join(wrong)


def test_a_reference_that_is_off_by_one_is_reported_with_the_right_line() -> None:
    text = ALGORITHMS.read_text()
    references = REFERENCE.findall(text)
    assert len(references) > 40
    for name, number, code in references:
        for other in (int(number) - 1, int(number) + 1):
            report = "".join(wrong_references(f"`{name}:{other}`\n`{code}`"))
            assert f"{name}:{number}" in report, (
                f"{name}:{number} `{code}`: line {other} has it, too; take another piece"
            )


@every_document
def test_every_chosen_config_is_there(document: Path) -> None:
    text = document.read_text()
    own = {ROOT / "conf" / name for name in re.findall(r"^`my_conf/([\w/]+\.yaml)`:$", text, re.MULTILINE)}
    missing = [path for path in configs_of(text) if not path.is_file() and path not in own]
    assert not missing, f"{document.name} chooses configs that do not exist: {', '.join(map(str, missing))}"


def test_every_promise_names_a_test_that_is_there() -> None:
    text = (ROOT / "RELIABILITY.md").read_text()
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("| if this happens | then | test |")]
    rows = [row for _, _, *rows in tables for row in rows]
    assert len(rows) > 20
    for row in rows:
        test = row.split(" | ")[2]
        files = re.findall(r"`(tests/[^`]+)`", test)
        code = "".join((ROOT / name).read_text() for name in files if name.endswith(".py"))
        assert files and all((ROOT / name).exists() for name in files), row
        for name in re.findall(r"`(test_[^`]+)`", test):
            assert f"def {name}(" in code, row


def test_every_algorithm_is_described() -> None:
    described = {path.stem for path in configs_of(ALGORITHMS.read_text()) if path.parent.name == "algorithm"}
    assert described == {path.stem for path in (ROOT / "conf/algorithm").glob("*.yaml")}


def test_settings_are_those_of_the_configs_beside_them() -> None:
    """In a paragraph that begins with Config, the settings behind a choice stand in its yaml."""
    checked = 0
    for paragraph in ALGORITHMS.read_text().split("\n\n"):
        if not paragraph.startswith("**Config.**"):
            continue
        chosen = [match.start() for match in CHOICE.finditer(paragraph)]
        for start, end in zip(chosen, [*chosen[1:], len(paragraph)], strict=True):
            part = paragraph[start:end]
            (path,) = configs_of(part)
            lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
            for setting in SETTING.findall(part):
                assert setting in lines, f"{setting}: is not in {path.relative_to(ROOT)}"
                checked += 1
    assert checked > 40


@every_document
def test_every_named_test_is_there(document: Path) -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert named <= defined, sorted(named - defined)
