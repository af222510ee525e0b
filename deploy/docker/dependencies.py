"""Prints what pyproject.toml requires, with the extras that the command line names: python dependencies.py sweep

In place of the sweeper, which is installed from its folder, stands what that requires.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any


def project(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads(Path(folder, "pyproject.toml").read_text())["project"]
    return content


own = project(".")
wanted = [*own["dependencies"], *(text for name in sys.argv[1:] for text in own["optional-dependencies"][name])]
if "hydra-async-sweeper" in wanted:
    wanted.remove("hydra-async-sweeper")
    wanted += project("hydra_async_sweeper")["dependencies"]
print("\n".join(wanted))
