"""Characters in the designs of many fonts: `fonts.csv` lists the fonts, and `NAME_classes.csv` the characters.

`scripts` has letters of six scripts, and a split has whole scripts. Two letters are alike if their ink correlates after
it is stretched to a square and blurred; the median over the fonts that have both counts. A letter is no class if it
is like an earlier one: by 0.9 in its own split, as o is like O; by 0.8 across splits, as the Latin A is like Α.
Greek comes first, then Cyrillic, Latin, hiragana, katakana and Hangul; in each, large letters come before small ones.
The Latin S, k, n and ŋ are no classes either: they were seen to be like ς, κ and η among the nearest by features.

`fonts_left_out.csv` names what a font shows wrongly: one picture for two characters is right for one of them at most.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont, features

from metalearn.datasets.drawing import HERE, Design, Drawings, Listed, SetRecipe, designs_of, few, listed
from metalearn.datasets.packages import APT, members
from metalearn.tasks.common.episodes import Images

SIDE = 56
FREETYPE = "2.14.3"
"""The version of FreeType in Pillow that has drawn the published pictures."""

_SCALE, _EM = 2, 50
"""Characters are drawn `_SCALE` times as large as they become, and their em has `_EM` of the `SIDE` pixels."""
_LEAST_INK = 12
"""A character with less ink, in full pixels, is one that the font lists and does not draw."""


def kanji(classes: int | None = None) -> SetRecipe:
    """The recipe of the kanji; of the first `classes` characters of each split, if given."""
    return _characters("kanji", classes)


def scripts(classes: int | None = None) -> SetRecipe:
    """The recipe of the letters of six scripts; of the first `classes` of each split, if given."""
    return _characters("scripts", classes)


def _characters(name: str, classes: int | None) -> SetRecipe:
    chosen = few(listed(HERE / f"{name}_classes.csv"), classes)
    renderer = f"FreeType {features.version('freetype2')}"
    return SetRecipe(
        name, renderer, (SIDE, SIDE), APT, designs_of(HERE / "fonts.csv"), chosen, draw, distinct=True,
        source="the font packages of Debian 12",
    )  # fmt: skip


def left_out(font: str) -> re.Pattern[str]:
    """Matches the characters that a font shows wrongly. The list has single ones and ranges, such as 가-힣."""
    with (HERE / "fonts_left_out.csv").open(encoding="utf-8", newline="") as file:
        characters = "".join(row["characters"] for row in csv.DictReader(file) if row["font"] == font)
    return re.compile(f"[{characters}]" if characters else r"(?!)")


def draw(design: Design, package: Path, classes: Sequence[Listed]) -> Drawings:
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
    return numbers, np.stack(pictures) if pictures else np.empty((0, SIDE, SIDE), np.uint8)


def character(font: ImageFont.FreeTypeFont, sign: str) -> Images:
    """A character with its ink in the middle, uint8 [side, side]; what is larger than the square is reduced to it."""
    large = SIDE * _SCALE
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
