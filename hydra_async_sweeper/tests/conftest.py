"""An environment that holds the sweeper and what it requires, and nothing else."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def lone_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel of the sweeper, and links to the packages that its pyproject.toml
    requires and to those that these require."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    packages = next(folder.glob("environment/lib/python*/site-packages"))
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    for distribution in needed(project["dependencies"]):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(distribution.locate_file(name))))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("pip or setuptools is missing, which build the package; type pip install 'setuptools>=77'")
    python = folder / "environment/bin/python"
    source = folder / "source"  # the build writes beside the sources
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(FOLDER / name)
    for path in (FOLDER / "src").rglob("*.py"):
        (source / path.relative_to(FOLDER)).parent.mkdir(parents=True, exist_ok=True)
        (source / path.relative_to(FOLDER)).write_bytes(path.read_bytes())
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True)
    install = [*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, folder.glob("*.whl"))], check=True)
    return python


def needed(requirements: Iterable[str]) -> list[importlib.metadata.Distribution]:
    """The distributions that these requirements lead to, on this platform and without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        text = waiting.pop()
        match = re.match(r"[\w.-]+", text)
        assert match is not None
        name = re.sub("[-_.]+", "-", match[0]).lower()
        if name not in found and "extra ==" not in text:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:  # for another platform or Python
                continue
            waiting += found[name].requires or []
    return list(found.values())
