"""Files that are written whole or not at all, and the cache folder."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def cache_folder() -> Path:
    """The folder for what can be made again: `METALEARN_CACHE`, else one in the user's cache folder."""
    if "METALEARN_CACHE" in os.environ:
        return Path(os.environ["METALEARN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metalearn"
