"""The rule of the house: imports point one way and in no circle, and only named files may call what is dangerous."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.runs import ROOT

FILES = sorted([*ROOT.glob("distributed/**/*.py"), *ROOT.glob("metalearn/**/*.py")])
SEARCH = sorted([*ROOT.glob("hydra_async_sweeper/src/**/*.py")])

MAY_IMPORT = {
    "metalearn/types.py": {"nn"},
    "metalearn/errors.py": set(),
    "metalearn/storage": {"storage", "errors"},
    "metalearn/saved": {"saved", "nn", "tasks.common", "errors", "storage"},
    "metalearn/nn": {"nn", "storage"},
    "metalearn/tasks": {"tasks.common", "tasks.priors", "types", "errors", "storage"},
    "metalearn/models": {"models.common", "nn", "saved", "types", "errors", "storage"},
    "metalearn/algorithms": {"algorithms.common", "bilevel", "nn", "types", "errors"},
    "metalearn/config": {"config", "saved.form", "errors", "storage"},
    "metalearn/runs": {"config", "runs", "saved", "types", "errors", "storage"},
    "metalearn/reporting": {"reporting", "runs", "saved", "config", "types", "errors", "storage"},
    "metalearn/training": {
        "training",
        "reporting",
        "runs",
        "saved",
        "algorithms.common",
        "nn",
        "types",
        "errors",
    },
}
"""What each room of metalearn may import from metalearn; a room that is not named here may import all of it."""

JOINS = ("metalearn/app/", "metalearn/cli/", "metalearn/api/", "metalearn/__init__.py")
"""The rooms that bring metalearn and distributed together, and the file that says where users' names come from."""


CIRCLES = {"metalearn.api": 4, "metalearn.classifier": 2}
"""How many files of a room import each other, also within functions: to become none. Other rooms have none."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in a file; each file is parsed once."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return frozenset(names)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_point_one_way() -> None:
    for path in FILES:
        name, modules = name_of(path), imported(path)
        if name.startswith("distributed/"):
            assert not {m for m in modules if m.split(".")[0] in ("metalearn", "hydra", "omegaconf")}, name
        elif not name.startswith(JOINS):
            assert not {m for m in modules if m.startswith(("torch.distributed", "distributed", "metalearn.app"))}, name
        for room, allowed in MAY_IMPORT.items():
            if name.startswith(room):
                ours = {m.removeprefix("metalearn.") for m in modules if m.startswith("metalearn.")}
                assert all(any(m == a or m.startswith(f"{a}.") for a in allowed) for m in ours), (name, ours)


def test_imports_run_in_no_circle() -> None:
    """Those within functions count, too: a circle that Python bears is one that a reader has to walk."""
    paths = {name_of(path).rpartition("src/")[2][:-3].replace("/", ".").removesuffix(".__init__"): path
             for path in [*FILES, *SEARCH]}  # fmt: skip
    uses = {name: {m for m in imported(path) if m in paths and m != name} for name, path in paths.items()}
    reached = {name: set(direct) for name, direct in uses.items()}
    for middle in paths:
        for name, names in reached.items():
            if middle in names:
                reached[name] |= reached[middle]
    circles = sorted(name for name, names in reached.items() if name in names)
    counts = Counter(".".join(name.split(".")[:2]) for name in circles)
    assert not [room for room, count in counts.items() if count > CIRCLES.get(room, 0)], circles


def test_the_builder_of_data_sets_is_called_from_one_place() -> None:
    """It is a folder that one can delete."""
    callers = [name_of(path) for path in FILES if any(m.startswith("metalearn.datasets") for m in imported(path))]
    assert [name for name in callers if not name.startswith("metalearn/datasets/")] == ["metalearn/cli/data.py"]


def test_sweeps_know_neither_torch_nor_what_is_trained() -> None:
    for path in SEARCH:
        assert not {m for m in imported(path) if m.split(".")[0] in ("torch", "metalearn", "distributed")}, path


def test_a_sweeps_first_files_import_no_optuna() -> None:
    """Hydra loads every plugin at every start; and a nursery is forked before optuna may start threads."""
    names = (
        "hydra_plugins.async_sweeper",
        "hydra_async_sweeper.sweep",
        "hydra_async_sweeper.islands",
        "hydra_async_sweeper.report",
    )
    program = f"import sys, {', '.join(names)}; print(sorted({{'optuna', 'torch', 'matplotlib'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stdout + run.stderr


@pytest.mark.parametrize(
    "room", ["metalearn/algorithms", "metalearn/tasks", "metalearn/models", "distributed/strategies"]
)
def test_siblings_do_not_import_each_other(room: str) -> None:
    package = room.replace("/", ".")
    for path in (ROOT / room).glob("*.py"):
        if path.name != "__init__.py":
            siblings = {m for m in imported(path) if m.startswith(package)}
            assert not {m for m in siblings if not f"{m}.".startswith(f"{package}.common.")}, path


def test_nothing_unsafe_is_called() -> None:
    lookups = []
    for path in [*FILES, *SEARCH, ROOT / "train.py"]:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.rpartition(".")[2] == "get_object":
                    lookups.append(name_of(path))
                assert called.rpartition(".")[2] != "instantiate", path
                assert called not in ("eval", "exec", "pickle.load", "pickle.loads"), path
                for keyword in node.keywords:
                    value = ast.unparse(keyword.value)
                    assert (keyword.arg, value) not in (("weights_only", "False"), ("shell", "True")), path
    assert lookups == ["metalearn/config/build.py", "metalearn/models/module.py"]


def test_private_names_of_torch_stand_in_one_folder() -> None:
    """What torch may change without a word is behind the door to its RPC."""
    for path in FILES:
        if not name_of(path).startswith("distributed/calls/"):
            private = [
                node.attr for node in nodes(path)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("autograd", "rpc", "dist")
                and node.attr.startswith("_")
            ]  # fmt: skip
            assert not private, path


def test_a_class_name_stands_for_one_class() -> None:
    """A reader who meets a name, or searches for it, finds one class."""
    rooms = ("metalearn", "distributed", "scripts", "benchmarks", "sweeps", "hydra_async_sweeper")
    places: dict[str, list[str]] = {}
    for path in sorted(file for room in rooms for file in ROOT.glob(f"{room}/**/*.py")):
        if "tests" not in path.relative_to(ROOT).parts:
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{name_of(path)}:{node.lineno}")
    twice = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not twice, "name each class by what it is; these names stand for several:\n" + "\n".join(twice)
