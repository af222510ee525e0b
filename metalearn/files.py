"""Files that are written whole or not at all, JSON, and the cache folder."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file, or it holds no JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content


def cache_folder() -> Path:
    """The folder for what can be made again: `METALEARN_CACHE`, else one in the user's cache folder."""
    if "METALEARN_CACHE" in os.environ:
        return Path(os.environ["METALEARN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metalearn"
