"""Who draws the sets: designers of emoji, and fonts.

**emoji**: one idea, drawn in colour by up to nine designers. The names of the drawings are `emoji_classes.csv`. A class
is an emoji, or a family of emoji that differ in gender, hair or skin. A split has whole subgroups of Unicode's list.
Where two classes of different splits share a drawing, one of them is without it, and so are both of two classes that
one designer draws alike: `emoji_left_out.csv` gives the reasons. One class, the red square, is left out.

**kanji, scripts**: characters in the designs of many fonts: `fonts.csv` lists the fonts, and `NAME_classes.csv` the
characters. `scripts` has letters of six scripts, and a split has whole scripts. Two letters are alike if their ink
correlates after it is stretched to a square and blurred; the median over the fonts that have both counts. A letter is
no class if it is like an earlier one: by 0.9 in its own split, as o is like O; by 0.8 across splits, as the Latin A is
like Α. Greek comes first, then Cyrillic, Latin, hiragana, katakana and Hangul; in each, large letters come before small
ones. The Latin S, k, n and ŋ are no classes either: among the nearest by features, they look like ς, κ and η.
`fonts_left_out.csv` names what a font shows wrongly: one picture for two characters is right for one of them at most.
"""

import io
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont, features

from metalearn.datasets.drawing import APT, HERE, NPM, Design, Drawings, Listed, SetRecipe, designs_of, listed, members
from metalearn.errors import ConfigError, DataError
from metalearn.tasks.common.episodes import Images, csv_rows

EMOJI_SIDE = 84
RENDERER = "0.5.0"  # the version of resvg-py that has drawn the published pictures


def emoji() -> SetRecipe:
    """The recipe of the emoji. Raises ConfigError if the renderer is missing, or is another version."""
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
    return SetRecipe(
        "emoji", f"resvg-py {RENDERER}", (EMOJI_SIDE, EMOJI_SIDE, 3), NPM, designs_of(HERE / "emoji_designs.csv"),
        listed(HERE / "emoji_classes.csv"), draw_emoji, distinct=False, source="the npm packages of Iconify",
    )  # fmt: skip


def draw_emoji(design: Design, package: Path, classes: Sequence[Listed]) -> Drawings:
    """Draws the icons of a design on white. Raises DataError if the design has no such icon."""
    import resvg_py

    icons = json.loads(members(package, [design.file])[design.file])
    numbers = [number for number, one in enumerate(classes) if one.row[design.name]]

    def picture(number: int) -> Any:
        name = classes[number].row[design.name]
        icon = icons["icons"].get(name)
        if icon is None:
            raise DataError(f"{icons.get('prefix')}: has no icon {name}")
        width, height = (icon.get(key, icons.get(key, 16)) for key in ("width", "height"))
        left, top = (icon.get(key, icons.get(key, 0)) for key in ("left", "top"))
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{EMOJI_SIDE}" height="{EMOJI_SIDE}" viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
        )
        png = resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", skip_system_fonts=True)
        return np.asarray(Image.open(io.BytesIO(png), formats=["PNG"]).convert("RGB"))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the renderer lets other threads work
        pictures = list(pool.map(picture, numbers))
    return numbers, np.stack(pictures) if pictures else np.empty((0, EMOJI_SIDE, EMOJI_SIDE, 3), np.uint8)


CHARACTER_SIDE = 56

# Characters are drawn `_SCALE` times as large as they become, and their em has `_EM` of `CHARACTER_SIDE` pixels.
_SCALE, _EM = 2, 50
_LEAST_INK = 12  # a character with less ink, in full pixels, is one that the font lists and does not draw


def characters(name: str) -> SetRecipe:
    """The recipe of `kanji`, or of the letters of six `scripts`."""
    return SetRecipe(
        name, f"FreeType {features.version('freetype2')}", (CHARACTER_SIDE, CHARACTER_SIDE), APT,
        designs_of(HERE / "fonts.csv"), listed(HERE / f"{name}_classes.csv"), draw_characters, distinct=True,
        source="the font packages of Debian 12",
    )  # fmt: skip


def left_out(font: str) -> re.Pattern[str]:
    """Matches the characters that a font shows wrongly. The list has single ones and ranges, such as 가-힣."""
    wrong = "".join(row["characters"] for row in csv_rows(HERE / "fonts_left_out.csv") if row["font"] == font)
    return re.compile(f"[{wrong}]" if wrong else r"(?!)")


def draw_characters(design: Design, package: Path, classes: Sequence[Listed]) -> Drawings:
    """Draws the characters of a font, ink on paper; without those that it has not, or shows by its sign for none,
    or that are left out."""
    content = members(package, [design.file], debian=True)[design.file]
    with TTFont(io.BytesIO(content), fontNumber=0, lazy=True) as tables:
        wrong = left_out(design.name)
        covered = {chr(code) for code in tables.getBestCmap() or () if not wrong.match(chr(code))}
    # The basic layout is the one that every build of Pillow has.
    font = ImageFont.truetype(io.BytesIO(content), _EM * _SCALE, layout_engine=ImageFont.Layout.BASIC)
    none = character(font, "\U0010ffff")
    numbers, pictures = [], []
    for number, one in enumerate(classes):
        drawn = character(font, one.one.key) if one.one.key in covered else None
        if drawn is not None and drawn.sum() >= 255 * _LEAST_INK and not np.array_equal(drawn, none):
            numbers.append(number)
            pictures.append(drawn)
    return numbers, np.stack(pictures) if pictures else np.empty((0, CHARACTER_SIDE, CHARACTER_SIDE), np.uint8)


def character(font: ImageFont.FreeTypeFont, sign: str) -> Images:
    """A character with its ink in the middle, uint8 [side, side]; what is larger than the square is reduced to it."""
    large = CHARACTER_SIDE * _SCALE
    paper = Image.new("L", (2 * large, 2 * large))
    ImageDraw.Draw(paper).text((large // 2, large // 2), sign, font=font, fill=255)
    box = paper.getbbox()
    whole = Image.new("L", (large, large))
    if box is not None:
        ink = paper.crop(box)
        if max(ink.size) > large:
            ink.thumbnail((large, large), Image.Resampling.BOX)
        whole.paste(ink, ((large - ink.width) // 2, (large - ink.height) // 2))
    return np.asarray(whole.reduce(_SCALE), np.uint8)
