"""Prints what pyproject.toml requires, with the extras that the command line names: python dependencies.py sweep"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [requirement for name in sys.argv[1:] for requirement in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
