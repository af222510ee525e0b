"""Emoji: one idea, drawn in colour by up to nine designers. The names of the drawings are `emoji_classes.csv`.

A class is an emoji, or a family of emoji that differ in gender, hair or skin. A split has whole subgroups of Unicode's
list. Where two classes of different splits share a drawing, one of them is without it, and so are both of two classes
that one designer draws alike: `emoji_left_out.csv` gives the reasons. One class, the red square, is left out.
"""

import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from metalearn.datasets.drawing import HERE, Design, Drawings, Listed, SetRecipe, designs_of, few, listed
from metalearn.datasets.packages import NPM, members
from metalearn.errors import ConfigError, DataError

SIDE = 84
RENDERER = "0.5.0"
"""The version of resvg-py that has drawn the published pictures."""


def emoji(classes: int | None = None) -> SetRecipe:
    """The recipe of the emoji; of the first `classes` of each split, if given.

    Raises:
        ConfigError: the renderer is missing, or is another version.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(
            f"resvg-py is not installed, which draws the emoji: pip install resvg-py=={RENDERER}"
        ) from error
    if resvg_py.__version__ != RENDERER:
        raise ConfigError(
            f"resvg-py is version {resvg_py.__version__}, and {RENDERER} draws the published pictures: "
            f"pip install resvg-py=={RENDERER}"
        )
    chosen = few(listed(HERE / "emoji_classes.csv"), classes)
    designs = designs_of(HERE / "emoji_designs.csv")
    return SetRecipe(
        "emoji", f"resvg-py {RENDERER}", (SIDE, SIDE, 3), NPM, designs, chosen, draw, distinct=False,
        source="the npm packages of Iconify",
    )  # fmt: skip


def draw(design: Design, package: Path, classes: Sequence[Listed]) -> Drawings:
    """Draws the icons of a design."""
    found = json.loads(members(package, [design.file])[design.file])
    numbers = [number for number, one in enumerate(classes) if one.row[design.name]]
    drawings = [svg(found, classes[number].row[design.name]) for number in numbers]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the renderer lets other threads work
        pictures = list(pool.map(picture, drawings))
    return numbers, np.stack(pictures) if pictures else np.empty((0, SIDE, SIDE, 3), np.uint8)


def svg(icons: dict[str, Any], name: str) -> str:
    """The drawing of an icon.

    Raises:
        DataError: there is no such icon.
    """
    icon = icons["icons"].get(name)
    if icon is None:
        raise DataError(f"{icons.get('prefix')}: has no icon {name}")
    width, height = (icon.get(key, icons.get(key, 16)) for key in ("width", "height"))
    left, top = (icon.get(key, icons.get(key, 0)) for key in ("left", "top"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{SIDE}" height="{SIDE}" viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def picture(drawing: str) -> Any:
    """A drawing on white, uint8 [side, side, 3]."""
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=drawing, background="#ffffff", skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(png), formats=["PNG"]).convert("RGB"))
