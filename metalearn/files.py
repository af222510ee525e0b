"""Files that are written whole or not at all, and the cache folder."""

import os
from pathlib import Path


def put(path: Path, text: str) -> None:
    """Writes a file, or replaces it: a reader never finds half of it, nor does one who was killed leave it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def cache_folder() -> Path:
    """Where what can be made again is kept: `METALEARN_CACHE`, else the user's cache folder."""
    if "METALEARN_CACHE" in os.environ:
        return Path(os.environ["METALEARN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metalearn"
