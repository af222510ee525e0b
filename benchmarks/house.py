"""The size of the house: lines, files, raises and guards of each room, as a table in Markdown.

    python -m benchmarks.house
    python -m benchmarks.house /path/to/another/checkout

A *guard* is a line that refuses something or mends its failure: an `if` or `for` that only raises, a raise, an
exception's handler. Its share is of the lines that are not blank. Lines of *code* have neither docstrings nor comments.
`raises` are those of 1,000 lines of code. `called once` are functions with one use in the product, of those that are
not public in the sense of a leading underscore.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("distributed", "metalearn", "hydra_async_sweeper/src")


class Counted(NamedTuple):
    """What a file has; `functions` are the lines of each function, and `names` those of private ones."""

    lines: int
    filled: int
    code: int
    comments: int
    raises: int
    guards: int
    functions: list[int]
    names: list[str]
    uses: Counter[str]


def counted(path: Path) -> Counted:
    """Counts a file."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    filled = {number for number, line in enumerate(lines, start=1) if line.strip()}
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# fmt:", "# noqa", "# type:"))
    }
    alone = {number for number in comments if lines[number - 1].lstrip().startswith("#")}
    docs = {number for node in ast.walk(tree) if _is_text(node) for number in _lines_of(node)}
    guards = {number for node in ast.walk(tree) if _is_guard(node) for number in _lines_of(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    uses.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return Counted(
        len(lines), len(filled), len(filled - docs - alone), len(comments),
        sum(isinstance(node, ast.Raise) for node in ast.walk(tree)), len(guards & filled),
        [len(set(_lines_of(node)) & filled) for node in functions],
        [node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")], uses,
    )  # fmt: skip


def _lines_of(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_guard(node: ast.AST) -> bool:
    only_raises = isinstance(node, ast.If | ast.For) and not node.orelse and isinstance(node.body[-1], ast.Raise)
    return only_raises or isinstance(node, ast.Raise | ast.ExceptHandler)


def rooms(root: Path) -> dict[str, list[Counted]]:
    """The files of the product by room: a folder of metalearn or distributed, or a whole package."""
    by_room: dict[str, list[Counted]] = {}
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root / package).parts
            room = package.partition("/")[0] + (f"/{parts[0]}" if len(parts) > 1 and "/" not in package else "")
            by_room.setdefault(room, []).append(counted(path))
    return by_room


def report(root: Path) -> Iterator[str]:
    """The lines of the table, and of the totals."""
    by_room = rooms(root)
    yield "| room | files | lines | raises | guards |"
    yield "| --- | --- | --- | --- | --- |"
    for room, files in by_room.items():
        yield _row(room, files)
    every = [file for files in by_room.values() for file in files]
    yield _row("**product**", every)
    lengths = [length for file in every for length in file.functions]
    uses: Counter[str] = sum((file.uses for file in every), Counter[str]())
    once = sum(uses[name] == 1 for file in every for name in file.names)
    lines, filled = sum(file.lines for file in every), sum(file.filled for file in every)
    yield (
        f"\n{len(lengths)} functions, median {statistics.median(lengths):.0f} lines, {once} private ones called once; "
        f"comments on {sum(file.comments for file in every) / filled:.1%} of lines that are not blank; blank "
        f"{1 - filled / lines:.1%}"
    )
    for folder in ("tests", "benchmarks", "hydra_async_sweeper/tests"):
        paths = sorted((root / folder).rglob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        yield f"{folder}: {lines} lines, {len(paths)} files"
    for folder in ("conf", "results"):
        yield f"{folder}: {sum(path.is_file() for path in (root / folder).rglob('*'))} files"


def _row(room: str, files: Sequence[Counted]) -> str:
    lines, filled, code, _, raises, guards = (sum(values) for values in list(zip(*files, strict=True))[:6])
    return f"| {room} | {len(files)} | {lines} | {1000 * raises / max(1, code):.0f} | {guards / max(1, filled):.0%} |"


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)))
