"""The documents name configs, tests, files and pages: all of them exist, and so do those that other files name."""

import ast
import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from metalearn.__main__ import COMMANDS
from metalearn.config.options import groups
from scripts import docs_pages
from tests.runs import ROOT

DOCUMENTS = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")})

ALGORITHMS = sorted((ROOT / "metalearn/algorithms").glob("[a-z]*.py"))

RELIABILITY = ROOT / "docs/explanation/reliability.md"

GROUPS = "experiment|algorithm|inner|dataset|model|optimizer|strategy"

CHOICE = re.compile(rf"(?<![\w.])({GROUPS})=(\w+(?:,\w+)*)(?![\w.(…])")
"""A chosen option of a group, or several."""

PATH = re.compile(r"(?<![\w./-])((?:docs|tests|benchmarks|deploy)/[\w./-]+\.[a-z]+|[A-Z]{5,}\.md)(#[\w-]+)?")
"""A file of this repository, and a heading of a page."""

BASELINES = ("scratch", "supervised")
"""Algorithms without a paper."""

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@functools.cache
def generated() -> set[Path]:
    """The pages that the site makes."""
    return {ROOT / "docs" / path for path, _ in docs_pages.pages()}


def tracked() -> list[Path]:
    """The files of the repository that may name a page, as text."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    text = (".cfg", ".ipynb", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".sbatch", "Dockerfile")
    others = ("results/", "tests/cases/")  # records of runs, and programs as their users wrote them
    paths = [ROOT / name for name in listed if name.endswith(text) and not name.startswith(others)]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def is_there(match: re.Match[str]) -> bool:
    path = ROOT / match[1]
    return path.exists() and (match[2] is None or match[2] in headings(path))


def wrong_paths(text: str) -> list[str]:
    """The paths that a text names and that do not exist, or lack the heading."""
    return [match[0] for match in PATH.finditer(text) if not is_there(match)]


def test_every_page_that_anything_names_is_there() -> None:
    wrong = {str(path.relative_to(ROOT)): wrong_paths(path.read_text()) for path in tracked()}
    assert not {path: names for path, names in wrong.items() if names}


def test_a_page_or_a_heading_that_is_not_there_is_found() -> None:
    assert wrong_paths("see docs/how-to/deploy.md#slurm and `docs/explanation/reliability.md`.") == []
    assert wrong_paths("see docs/deploy.md#slurm") == ["docs/deploy.md#slurm"]
    assert wrong_paths("see docs/how-to/deploy.md#cobalt, RELIABILITY.md") == [
        "docs/how-to/deploy.md#cobalt",
        "RELIABILITY.md",
    ]


@every_document
def test_every_link_between_files_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"(?<=\]\()(?!https?:)([^)\s]+)(?=\))", document.read_text()):
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        assert page.exists() or page in generated(), f"{document.name}: {target}"
        outside = document.is_relative_to(ROOT / "docs") and not page.is_relative_to(ROOT / "docs")
        assert not outside, f"{document.name}: {target}: the site has docs alone"
        if anchor and page.exists():
            assert f"#{anchor}" in headings(page), f"{document.name}: {target}"


@every_document
def test_every_chosen_config_is_there(document: Path) -> None:
    text = document.read_text()
    theirs = {*re.findall(r"^`my_conf/(\w+)/(\w+)\.yaml`:$", text, re.MULTILINE), ("algorithm", "my_algorithm")}
    chosen = {(group, name) for group, names in CHOICE.findall(text) for name in names.split(",")} - theirs
    assert not {(group, name) for group, name in chosen if name not in groups()[group]}


@functools.cache
def defined_tests() -> set[str]:
    sources = [path.read_text() for folder in ROOT.glob("**/tests") for path in folder.rglob("*.py")]
    return {name for source in sources for name in re.findall(r"^ *def (test_\w+)", source, re.MULTILINE)}


@pytest.mark.parametrize("path", [*DOCUMENTS, *ALGORITHMS], ids=lambda path: path.name)
def test_every_named_test_is_there(path: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", path.read_text()))
    assert named <= defined_tests(), sorted(named - defined_tests())


def test_every_promise_names_a_test_that_is_there() -> None:
    parts = RELIABILITY.read_text().split("\n\n")
    tables = [part.splitlines() for part in parts if part.startswith("| if this happens | then | test |")]
    rows = [row for _, _, *rows in tables for row in rows]
    assert len(rows) > 20
    defined = defined_tests()
    for row in rows:
        tests = re.findall(r"`(test_[^`]+)`", row.split(" | ")[2])
        assert tests and set(tests) <= defined, row


def test_every_algorithm_has_its_paper() -> None:
    factories = [yaml.safe_load(path.read_text())["_target_"] for path in (ROOT / "conf/algorithm").glob("*.yaml")]
    modules = {factory.rpartition(".")[0].rpartition(".")[2] for factory in factories}
    assert modules == {path.stem for path in ALGORITHMS}
    for path in ALGORITHMS:
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert path.stem in BASELINES or re.search(r"arXiv \d{4}\.\d{5}", about), path.name


# The pages that are made when the site is built


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return dict(docs_pages.pages())


def test_an_algorithms_page_has_formula_keys_and_experiments(made: dict[str, str]) -> None:
    page = made["reference/algorithms/cavia.md"]
    assert "φᵢ = φ₀ − α ∇φ L_support(φ₀, θ)" in page and "::: metalearn.algorithms.cavia.cavia" in page
    assert "| `algorithm.contexts` | `5` |" in page and "| `cavia_sinusoid` |" in page
    assert "| `dataset.train_ways` | `null` |" in made["reference/config.md"]
    table = made["reference/algorithms/index.md"]
    assert re.findall(r"^\| \[(\w+)\]", table, re.MULTILINE) == sorted(
        p.stem for p in (ROOT / "conf/algorithm").iterdir()
    )
    assert "| [anil](anil.md) |" in table and "`anil_omniglot_fast`" in table  # by way of another experiment


def test_the_page_of_the_command_line_has_every_command(made: dict[str, str]) -> None:
    page = made["reference/cli.md"]
    for command in COMMANDS:
        assert f"## `metalearn {command}`" in page or command == "help"
    assert "--workers WORKERS" in page


def test_the_pages_of_the_api_have_every_public_name(made: dict[str, str]) -> None:
    for package in ("metalearn", "distributed"):
        module = importlib.import_module(package)
        shown = re.findall(rf"^::: {package}\.([\w.]+)$", made[f"reference/api/{package}.md"], re.MULTILINE)
        needs_scikit_learn = {"PFNClassifier", "PFNRegressor"} & {*module.__all__}
        others = {*module.__all__} - needs_scikit_learn
        functions = {name for name in others if not isinstance(getattr(module, name), type(re))} | needs_scikit_learn
        assert functions <= set(shown)
    assert "::: metalearn.types.Algorithm" in made["reference/api/types.md"]


def test_results_and_changelog_link_to_pages_of_the_site(made: dict[str, str]) -> None:
    assert "](docs/" not in made["results.md"] and "](how-to/" in made["results.md"]
    text = docs_pages.from_the_top("[a](docs/how-to/train.md#loggers), [b](LICENSE), [c](#e)")
    assert text == "[a](how-to/train.md#loggers), b, [c](#e)"


def test_a_page_that_loads_something_from_elsewhere_is_refused() -> None:
    assert docs_pages.self_contained('<script src="https://unpkg.com/iframe-worker/shim"></script>', "site.js") == (
        '<script src="site.js"></script>'
    )
    assert docs_pages.self_contained('<a href="https://arxiv.org/abs/1703.03400">', "site.js")
    for tag in (
        '<script async src="https://example.org/x.js">',
        "<link rel=stylesheet href=https://example.org/x.css>",
    ):
        with pytest.raises(docs_pages.PluginError, match="would load this from elsewhere"):
            docs_pages.self_contained(tag, "site.js")
