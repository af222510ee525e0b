"""Files that are written whole or not at all, and JSON."""

import json
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a kill, or a link to somebody's file
    with temporary.open("x") as file:
        file.write(text)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file, or it holds no JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content
