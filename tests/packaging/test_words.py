"""Plain words: a list of words that are not the field's, references to files that exist, and short names of tests.

The numbers in `PHRASES` and `NAMES` are what is left of each: they are exact, and only go down.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

from tests.packaging.test_house import name_of, nodes
from tests.runs import ROOT

PHRASES = {
    "so many": 0, "nobody": 0, "anew": 0, "somebody": 0, "whoever": 1, "newcomer": 0, "so much": 0, "for so long": 0,
    "stands in for": 0,
}  # fmt: skip
"""How often each may stand in the product, its yamls and pages: a name, a number or a plain sentence says more."""

NAMES = {
    "own": 0, "said": 0, "given": 0, "there": 0, "wanted": 0, "chosen": 0, "found": 0,
    "told": 3,  # as in ask-and-tell: a column of the sweeper's trials.csv, and a field that its journal keeps
    "known": 11,  # the config key dataset.known, as `Shape` and `of_tables` of priors have it
}  # fmt: skip
"""How many variables, arguments, fields and functions of the product may have each name: say what it holds."""

ELSEWHERE = ("x.py", "x.yaml", "to_x.py", "measure_accuracy.py", "sitecustomize.py")
"""Files that a page tells one to write, or of another program."""

TRACKED = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
TRACKED = [name for name in TRACKED if (ROOT / name).exists()]
ROOMS = ("metalearn/", "distributed/", "benchmarks/", "scripts/", "examples/", "hydra_async_sweeper/src/", "train.py")
PRODUCT = [ROOT / name for name in TRACKED if name.endswith(".py") and name.startswith(ROOMS)]
PAGES = [ROOT / name for name in TRACKED if name.endswith(".md") and not name.startswith(("CHANGELOG", "results/"))]
YAMLS = [ROOT / name for name in TRACKED if name.startswith("conf/")]
TESTS = [ROOT / name for name in TRACKED if name.endswith(".py") and "tests/" in name]


def test_words_that_are_not_the_fields_are_counted() -> None:
    text = "\n".join(path.read_text() for path in [*PRODUCT, *PAGES, *YAMLS])
    patterns = {
        phrase: rf"\b{phrase}\b".replace(" ", r"\s+(?:# )?") for phrase in PHRASES
    }  # a comment may break within
    counts = {phrase: len(re.findall(pattern, text, re.IGNORECASE)) for phrase, pattern in patterns.items()}
    assert counts == PHRASES


def test_names_that_say_nothing_are_counted() -> None:
    names: Counter[str] = Counter()
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
            elif isinstance(node, ast.FunctionDef):
                names[node.name] += 1
            elif isinstance(node, ast.arg):
                names[node.arg] += 1
    assert {name: names[name] for name in NAMES} == NAMES


@cache
def prose(path: Path) -> str:
    """The comments and docstrings of a program; all of a page, without commands of an earlier commit."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"`[^`]*` of commit", "", text)
    comments = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT]  # fmt: skip
    docs = [str(node.value.value) for node in nodes(path)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]  # fmt: skip
    return "\n".join([*comments, *docs])


def test_files_that_are_named_exist() -> None:
    folders = {name.partition("/")[0] for name in TRACKED if "/" in name}
    endings = {name.rpartition("/")[2] for name in TRACKED}
    stale = []
    for path in [*PRODUCT, *PAGES, *YAMLS, *TESTS]:
        for name in re.findall(r"(?<![\w/.{}$…-])[\w-]+(?:/[\w.-]+)*\.(?:py|sh|yaml)\b", prose(path)):
            in_program = path.suffix == ".py" and name.endswith(".py")  # where a bare name is one of our files
            is_ours = name.partition("/")[0] in folders if "/" in name else in_program
            if is_ours and name not in TRACKED and name not in endings and not name.endswith(ELSEWHERE):
                stale.append(f"{name_of(path)}: {name}")
    assert not stale, "\n".join(stale)


@cache
def defined(path: Path) -> frozenset[str]:
    """Every name that a file gives to anything."""
    names = (getattr(node, kind, None) for node in nodes(path) for kind in ("name", "arg", "id"))
    texts = (str(node.value) for node in nodes(path) if isinstance(node, ast.Constant))  # such as of a lazy __getattr__
    return frozenset(name.rpartition(".")[2] for name in names if name) | {
        word for text in texts for word in text.split()
    }


def test_modules_and_their_parts_that_are_named_exist() -> None:
    modules = {name.rpartition("src/")[2][:-3].replace("/", ".").removesuffix(".__init__"): ROOT / name
               for name in TRACKED if name.endswith(".py")}  # fmt: skip
    packages, stale = "metalearn|distributed|hydra_async_sweeper|benchmarks", []
    for path in [*PRODUCT, *PAGES, *YAMLS, *TESTS]:
        for named in re.findall(rf"(?<![\w./])(?:{packages})\.[\w.]+", prose(path)):
            module, part = named.rstrip("."), ""
            while module not in modules:
                module, _, part = module.rpartition(".")
            if part and part not in ("py", "yaml", "CLASS") and part not in defined(modules[module]):
                stale.append(f"{name_of(path)}: {named}")
    assert not stale, "\n".join(stale)


LONG = 0
"""How many tests may have a name of more than 60 characters."""


def test_tests_have_short_names() -> None:
    names = [node.name for path in TESTS for node in nodes(path)
             if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]  # fmt: skip
    long = [name for name in names if len(name) > 60]
    assert len(long) <= LONG, long


FROM_INDEX = re.compile(r"metalearn-train\[|pip install [^`\n,]*(?<![/\w])metalearn")


def test_no_text_installs_the_program_from_an_index() -> None:
    """It is on none, and the index has another project called metalearn."""
    for path in (ROOT / name for name in TRACKED if name.endswith((".py", ".md", ".yaml", ".toml", ".ipynb"))):
        if path != Path(__file__):
            assert not (wrong := FROM_INDEX.search(path.read_text())), f"{path}: {wrong[0]}"
