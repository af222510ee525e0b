"""Where what can be made again is kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`METALEARN_CACHE`, else the user's cache folder."""
    if "METALEARN_CACHE" in os.environ:
        return Path(os.environ["METALEARN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metalearn"
