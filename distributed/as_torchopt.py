"""Runs a program for `torchopt.distributed` on this package, without a change to the program.

    torchrun --nproc_per_node=2 -m distributed.as_torchopt program.py --its arguments

From Python: call `distributed.as_torchopt.install()` before the program's modules are imported.
"""

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import distributed
from distributed import api, autograd, world


def install() -> None:
    """Makes `import torchopt.distributed` give this package. Raises RuntimeError if that has been imported already.

    If torchopt is installed, the rest of it stays as it is. If not, `torchopt` holds only `distributed` and
    `module_clone`.
    """
    imported = sys.modules.get("torchopt.distributed")
    if imported is distributed:
        return
    if imported is not None:
        raise RuntimeError("torchopt.distributed has been imported already; call install() before that")
    sys.modules["torchopt.distributed"] = distributed
    for name, part in (("api", api), ("autograd", autograd), ("world", world)):
        sys.modules[f"torchopt.distributed.{name}"] = part
    if importlib.util.find_spec("torchopt") is not None:
        package = importlib.import_module("torchopt")
    else:
        package = ModuleType("torchopt", "The names that the package `distributed` replaces, and no others.")
        package.__path__ = []
        package.module_clone = distributed.module_clone  # type: ignore[attr-defined]
        sys.modules["torchopt"] = package
    package.distributed = distributed  # type: ignore[attr-defined]


def main(argv: list[str]) -> None:
    """Runs `argv[0]` as the main program, with the rest as its arguments."""
    program = argv[0] if argv else ""
    if not Path(program).is_file():
        raise SystemExit(f"program={program}: must be a file; type python -m distributed.as_torchopt program.py")
    install()
    sys.argv = argv
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
