"""Draws classes of pictures, as people have them: one thing in many places, sizes, colours and lights.

`python -m tests.drawn_pictures FOLDER [PICTURES] [SEED]` makes a folder of twelve classes.
"""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIZE = 160

Draw = ImageDraw.ImageDraw


def _star(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float, points: int = 5) -> None:
    corners = []
    for i in range(2 * points):
        length, angle = r if i % 2 == 0 else r * 0.42, turn + math.pi * i / points
        corners.append((at[0] + length * math.cos(angle), at[1] + length * math.sin(angle)))
    draw.polygon(corners, fill=colour)


def _polygon(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float, corners: int) -> None:
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    draw.polygon([(at[0] + r * math.cos(a), at[1] + r * math.sin(a)) for a in angles], fill=colour)


def _house(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    x, y = at
    draw.rectangle([x - r * 0.7, y - r * 0.1, x + r * 0.7, y + r], fill=colour)
    draw.polygon([(x - r, y - r * 0.1), (x + r, y - r * 0.1), (x, y - r)], fill=tuple(c // 2 for c in colour))


def _face(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    x, y = at
    draw.ellipse([x - r, y - r, x + r, y + r], fill=colour)
    for side in (-1, 1):
        draw.ellipse([x + side * r * 0.4 - 5, y - r * 0.3 - 5, x + side * r * 0.4 + 5, y - r * 0.3 + 5], fill="black")
    draw.arc([x - r * 0.5, y - r * 0.2, x + r * 0.5, y + r * 0.6], 20, 160, fill="black", width=4)


def _tree(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    x, y = at
    draw.rectangle([x - r * 0.15, y, x + r * 0.15, y + r], fill=(90, 60, 30))
    for dx, dy in ((-0.4, -0.2), (0.4, -0.2), (0, -0.6)):
        draw.ellipse([x + (dx - 0.5) * r, y + (dy - 0.5) * r, x + (dx + 0.5) * r, y + (dy + 0.5) * r], fill=colour)


def _ring(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    draw.ellipse([at[0] - r, at[1] - r, at[0] + r, at[1] + r], outline=colour, width=max(6, int(r * 0.3)))


def _cross(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    for angle in (turn, turn + math.pi / 2):
        dx, dy = r * math.cos(angle), r * math.sin(angle)
        draw.line([at[0] - dx, at[1] - dy, at[0] + dx, at[1] + dy], fill=colour, width=max(8, int(r * 0.35)))


def _stripes(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    for i in range(-3, 4):
        x = at[0] + i * r * 0.35
        draw.line(
            [x - r * 0.5 * math.sin(turn), at[1] - r, x + r * 0.5 * math.sin(turn), at[1] + r], fill=colour, width=9
        )


def _grid(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    step = r * 0.45
    for i in range(-2, 3):
        for j in range(-2, 3):
            x, y = at[0] + i * step, at[1] + j * step
            draw.ellipse([x - 6, y - 6, x + 6, y + 6], fill=colour)


def _fish(draw: Draw, r: float, at: tuple[float, float], colour: Any, turn: float) -> None:
    x, y = at
    draw.ellipse([x - r, y - r * 0.5, x + r * 0.6, y + r * 0.5], fill=colour)
    draw.polygon([(x + r * 0.5, y), (x + r, y - r * 0.5), (x + r, y + r * 0.5)], fill=colour)
    draw.ellipse([x - r * 0.7, y - r * 0.2, x - r * 0.5, y], fill="white")


THINGS: dict[str, Any] = {
    "star": _star, "square": partial(_polygon, corners=4), "triangle": partial(_polygon, corners=3), "house": _house,
    "face": _face, "tree": _tree, "ring": _ring, "cross": _cross, "stripes": _stripes, "dots": _grid, "fish": _fish,
    "disc": partial(_polygon, corners=40),
}  # fmt: skip


def drawn(thing: str, generator: np.random.Generator) -> Image.Image:
    """A picture of the thing, before an uneven background, a little blurred and noisy."""
    corners = generator.integers(90, 250, (2, 2, 3)).astype(np.uint8)
    image = Image.fromarray(corners).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    r, at = generator.uniform(35, 60), tuple(generator.uniform(62, 98, 2))
    colour = tuple(int(c) for c in generator.integers(0, 130, 3))
    THINGS[thing](ImageDraw.Draw(image), r, at, colour, generator.uniform(0, 2 * math.pi))
    image = image.filter(ImageFilter.GaussianBlur(generator.uniform(0, 1.5)))
    noise = generator.normal(0, 12, (SIZE, SIZE, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def put(root: Path, pictures: int = 8, seed: int = 0, things: tuple[str, ...] = tuple(THINGS)) -> Path:
    """Makes the folder `root` with so many pictures of each thing; returns it."""
    for thing in things:
        generator = np.random.default_rng([seed, list(THINGS).index(thing)])
        (root / thing).mkdir(parents=True)
        for number in range(pictures):
            drawn(thing, generator).save(root / thing / f"{number:02}.png")
    return root


if __name__ == "__main__":
    given = dict(zip(("pictures", "seed"), map(int, sys.argv[2:4]), strict=False))
    put(Path(sys.argv[1]), pictures=given.get("pictures", 8), seed=given.get("seed", 0))
