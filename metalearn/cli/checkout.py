"""Commands that need a checkout of the repository, since what they measure or compare with is not in the wheel."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODULES = {
    "bench": "benchmarks.bench",
    "gpu-check": "benchmarks.gpu_check.check",
    "reproduce": "benchmarks.reproduce",
}


def main_of(command: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a command. Without a checkout, it says what to do and returns 2."""

    def refuse(arguments: Sequence[str]) -> int:
        need = "needs a checkout of the repository, with its folders benchmarks and conf"
        print(f"error: metalearn {command}: {need}; clone it, and type pip install -e . there", file=sys.stderr)
        return 2

    path = ROOT.joinpath(*MODULES[command].split(".")).with_suffix(".py")
    if not path.is_file():
        return refuse
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    main: Callable[[Sequence[str]], int] = importlib.import_module(MODULES[command]).main
    return main
