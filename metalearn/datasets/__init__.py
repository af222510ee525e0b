"""Builds the data sets of `metalearn data`: drawn ones from packages, and photographs that people have.

Nothing else of metalearn imports this folder, but for that command's one call of `make`; without it all else works.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metalearn.tasks.common.stored import DrawnSet


def make(name: str, out: Path, *, source: Path | None, partly: bool) -> "DrawnSet":
    """Builds the set `name` in the folder `out`, or goes on with it. Raises ConfigError, DataError or RunError as
    `collect` of photographs.py, or `SetRecipe.build` of drawing.py.

    Args:
        source: where photographs lie; None: the set is drawn.
        partly: also photographs that are not as published.
    """
    # Each needs packages that the other one does not.
    if source is not None:
        from metalearn.datasets.photographs import SETS, collect

        return collect(SETS[name](), source, out, partly=partly)
    from metalearn.datasets.designs import characters, emoji

    return (emoji() if name == "emoji" else characters(name)).build(out)
