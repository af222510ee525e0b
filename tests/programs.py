"""Exported programs, run where neither this checkout nor torch is seen."""

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="onnx, onnxscript or onnxruntime is not installed (extra onnx)",
)


def said_by_card(folder: Path, pictures: Sequence[Path]) -> list[list[str]]:
    """For each picture its file, the label and the probability, by the lines of Python of an ONNX program's card."""
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    places = {sysconfig.get_paths()["purelib"], *(path for path in sys.path if path.endswith("site-packages"))}
    hidden = f"import sys; sys.path += {sorted(places)}; sys.modules.update(torch=None, metalearn=None)\n"
    (folder / "use.py").write_text(hidden + block)
    command = [sys.executable, "-I", "-S", "use.py", *map(str, pictures)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return [line.split("\t") for line in run.stdout.splitlines()]
