"""A hook of mkdocs: the pages that are made when the site is built, so that none can go stale in the repository.

The config page comes from the comments in `conf/`, the command line's from the `--help` of each command, the API's from
docstrings by mkdocstrings, an algorithm's from its yaml and its module. Results, changelog and security are files at
the top of the repository.
"""

import ast
import contextlib
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from metalearn.__main__ import COMMANDS, main  # noqa: E402 (the path comes first, here and below)
from metalearn.config.options import PROGRAM, groups, owners, shipped, summary, text_of  # noqa: E402  # noqa: E402

ALGORITHMS = "reference/algorithms"

ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})(?![^<]*</(?:a|code|title)>)")

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads for pages that are opened from files; docs/site.js does the same without a network."""

FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:[^\"' >]*)")
"""What a page would load from elsewhere."""

WIDE = "---\nhide: [navigation]\n---\n\n"
"""Begins a page that needs the width."""

LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s]+)(?=\))")
"""The target of a link to a file."""


def on_config(config: MkDocsConfig) -> None:
    """Adds the algorithms to the navigation."""
    section = _entry(config.nav, "Algorithms")
    section += [{name: f"{ALGORITHMS}/{name}.md"} for name in algorithms()]


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the generated pages."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))


def on_page_content(html: str, **_: Any) -> str:
    """Makes a link of each paper's number."""
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', html)


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Raises PluginError if the page would load anything from elsewhere."""
    return self_contained(output, get_relative_url("site.js", page.url))


def on_post_template(output_content: str, *, template_name: str, **_: Any) -> str:
    """The same for the page of a wrong address, which may be shown at any depth."""
    return self_contained(output_content, "/site.js") if template_name.endswith(".html") else output_content


def self_contained(html: str, script: str) -> str:
    """The page with our script in place of the theme's.

    Raises:
        PluginError: it loads something from elsewhere.
    """
    html = html.replace(SHIM, script)
    foreign = FOREIGN.search(html)
    if foreign:
        raise PluginError(f"{foreign[1]}: a page would load this from elsewhere; put a copy into docs/")
    return html


def pages() -> Iterator[tuple[str, str]]:
    """The path and the text of each generated page."""
    yield "reference/config.md", config_page()
    yield "reference/cli.md", cli_page()
    yield from api_pages()
    yield f"{ALGORITHMS}/index.md", algorithms_page()
    for name in algorithms():
        yield f"{ALGORITHMS}/{name}.md", algorithm_page(name)
    for name, head in (("RESULTS.md", WIDE), ("CHANGELOG.md", WIDE), ("SECURITY.md", "")):
        yield name.lower(), head + from_the_top((ROOT / name).read_text(encoding="utf-8"))


@functools.cache
def config_page() -> str:
    """Every group with its options, and every key with its default."""
    lines = [
        "# Config",
        "",
        "From the comments in `conf/`; `metalearn help` prints the same. Choose an option by `GROUP=OPTION`, set a key",
        "by `KEY=VALUE`, sweep with `--multirun KEY=A,B`. `${…}` is another key's value.",
        "",
        "## Groups",
    ]
    for group, options in groups().items():
        lines += ["", f"### `{group}`", "", "| option | what |", "| --- | --- |"]
        lines += [f"| `{option}` | {_cell(summary(text_of(group, option)))} |" for option in options]
    lines += ["", "## Keys"]
    for owner, keys in owners():
        name = owner if owner == PROGRAM else f"`{owner}`"
        lines += ["", f"### Keys of {name}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{key.name}` | `{key.default}` | {_cell(key.meaning)} |" for key in keys]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return text.replace("|", "\\|")


def from_the_top(text: str) -> str:
    """A document of the repository's top folder, with links as seen from docs/; links that leave the site are text."""

    def target(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        return path.removeprefix("docs/") + (f"#{anchor}" if anchor else "")

    leaving = re.compile(r"\[([^]]*)\]\((?!https?:|#|docs/)[^)]*\)")
    return LINK.sub(target, leaving.sub(r"\1", text))


# The command line


def cli_page() -> str:
    """What `--help` says, command by command; that of `train` is the page of the config."""
    lines = [
        "# Command line",
        "",
        "`metalearn COMMAND …`; KEY=VALUE without a command trains. Also as `python -m metalearn`, and in a checkout "
        "`python train.py` is `metalearn train`.",
        "",
        "## `metalearn train`",
        "",
        "Trains. `GROUP=OPTION` and `KEY=VALUE` choose everything: see [Config](config.md).",
        "",
        "## `metalearn sweep`",
        "",
        "`metalearn train --multirun`, with `hydra/sweeper=async` unless another is chosen: see "
        "[Sweep](../how-to/sweep.md).",
    ]
    for command in COMMANDS:
        if command not in ("train", "sweep", "help"):
            lines += ["", f"## `metalearn {command}`", "", "```text", help_of(command), "```"]
    return "\n".join(lines) + "\n"


def help_of(command: str) -> str:
    """What `metalearn COMMAND --help` prints, 100 characters wide."""
    printed = io.StringIO()
    arguments, width = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [f"metalearn {command}"], "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        sys.argv = arguments
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return printed.getvalue().strip()


# The API


def api_pages() -> Iterator[tuple[str, str]]:
    """The public names of the packages; mkdocstrings puts their docstrings in."""
    yield "reference/api/metalearn.md", _api("metalearn", exported("metalearn"))
    types = [name for name in classes("metalearn/types.py") if not name.startswith("_")]
    yield "reference/api/types.md", _api("metalearn.types", types)
    modules = {path.stem for path in (ROOT / "distributed").glob("*.py")} | {"dist", "rpc"}
    names = [name for name in exported("distributed") if name not in modules]
    names += [f"autograd.{name}" for name in exported("distributed.autograd") if name != "DistAutogradContext"]
    yield "reference/api/distributed.md", _api("distributed", names)


def _api(module: str, names: list[str]) -> str:
    about = ast.get_docstring(_tree(_source(module))) or ""
    lines = [f"# `{module}`", "", about]
    for name in names:
        lines += ["", f"::: {module}.{name}"]
    return "\n".join(lines) + "\n"


def exported(package: str) -> list[str]:
    """The names in `__all__` of a package."""
    return list(importlib.import_module(package).__all__)  # which may be computed


def classes(path: str) -> list[str]:
    return [node.name for node in _tree(ROOT / path).body if isinstance(node, ast.ClassDef)]


def _source(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# Algorithms


def algorithms() -> list[str]:
    """The options of the group `algorithm`."""
    return list(shipped("algorithm"))


def algorithms_page() -> str:
    """The table of all algorithms."""
    lines = [
        "# Algorithms",
        "",
        "Choose one by `algorithm=NAME`. Each page has the formulas, how they differ from the authors' code, the tests "
        "that prove them, the keys and the experiments. [What algorithms share](../../explanation/learning.md) holds "
        "for all of them.",
        "",
        "| `algorithm` | what | experiments |",
        "| --- | --- | --- |",
    ]
    for name in algorithms():
        named = "<br>".join(f"`{experiment}`" for experiment in experiments(name))
        lines.append(f"| [{name}]({name}.md) | {_summary('algorithm', name)} | {named} |")
    return "\n".join(lines) + "\n"


def algorithm_page(name: str) -> str:
    """One algorithm: the docstring of its module, its keys and its experiments."""
    factory: str = shipped("algorithm")[name]._target_
    module = factory.rpartition(".")[0]
    title, _, about = (ast.get_docstring(_tree(_source(module))) or "").partition("\n")
    lines = [f"# {name}", "", f"{title}", about, "", "## Keys", "", f"`metalearn train algorithm={name} …`", ""]
    lines += [_keys(f"algorithm={name}") or "It has no keys."]
    if experiments(name):
        lines += ["", "## Experiments", "", "| `experiment` | what |", "| --- | --- |"]
        lines += [f"| `{experiment}` | {_summary('experiment', experiment)} |" for experiment in experiments(name)]
    lines += ["", "## Factory", "", f"::: {factory}"]
    return "\n".join(lines) + "\n"


def experiments(algorithm: str) -> list[str]:
    """The experiments that choose an algorithm."""
    return [name for name in shipped("experiment") if _chosen(name) == algorithm]


def _chosen(experiment: str) -> str | None:
    """The algorithm of an experiment, which may begin from another experiment."""
    named = None
    for entry in shipped("experiment")[experiment].get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            named = _chosen(entry)
        elif "override /algorithm" in entry:
            named = entry["override /algorithm"]
    return named


def _summary(group: str, option: str) -> str:
    """What the config page says of an option."""
    table = config_page().partition(f"\n### `{group}`\n")[2].partition("\n#")[0]
    match = re.search(rf"^\| `{option}` \| (.*) \|$", table, re.MULTILINE)
    return match[1] if match else ""


def _keys(owner: str) -> str:
    """The table of the config page for the keys of a choice."""
    return config_page().partition(f"\n### Keys of `{owner}`\n")[2].partition("\n#")[0].strip()


def _entry(nav: Any, name: str) -> list[Any]:
    """The list of a section of the navigation, wherever it is."""
    for entry in nav:
        for title, content in entry.items() if isinstance(entry, dict) else ():
            if isinstance(content, list):
                section: list[Any] = content if title == name else _entry(content, name)
                if section:
                    return section
    return []
