"""The design of every page: one file that needs nothing else, for screens of any width, light and dark."""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence

from metalearn.errors import printable

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #5c6670; --edge: #dfe3e7;
  --accent: #0b5fa5; --c1: #0b6fb8; --c2: #c2500a; --c3: #00785a; --c4: #a8478b; --c5: #6b7480; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1c2127; --ink: #e5e8eb; --soft: #9ba6b1;
  --edge: #333b44; --accent: #79bdf5; --c1: #62b0ee; --c2: #f39a55; --c3: #3fc79f; --c4: #e39aca; --c5: #97a2ad; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem clamp(.9rem, 3vw, 2rem) 3rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: .98rem; margin: 0 0 .5rem; }
p { margin: .4rem 0 .8rem; max-width: 48rem; } .note { color: var(--soft); font-size: .9rem; }
a { color: var(--accent); }
.result { font-size: 1.2rem; margin: .2rem 0 1rem; }
.result b { font-size: 2rem; line-height: 1.2; margin-right: .35rem; font-variant-numeric: tabular-nums; }
pre, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; }
pre { padding: .7rem .9rem; margin: .5rem 0 1rem; white-space: pre-wrap; font-size: .85rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least)), 1fr)); }
.card { padding: .8rem .9rem; min-width: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .92rem; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; } thead th { border-bottom: 1px solid var(--edge); }
.facts th { white-space: nowrap; font-weight: 400; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll td, .scroll th { white-space: nowrap; }
.scroll table:not(.matrix) td:first-child { white-space: normal; min-width: 8.5rem; max-width: 24rem; }
table.index td { white-space: normal; min-width: 6.5rem; max-width: 20rem; }
table.index .n { white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
figure { margin: 0; } svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--edge); } svg .axis { stroke: var(--soft); }
svg path { fill: none; } svg path.line, svg path.dots, svg path.dashes { stroke-width: 1.8; stroke-linejoin: round; }
svg path.dashes { stroke-dasharray: 6 4; } svg path.bars { stroke-width: 1.2; opacity: .65; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; padding-left: 14%; font-size: .85rem;
  color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid var(--c);
  vertical-align: middle; margin-right: .4rem; }
.key.dashes::before { border-top-style: dashed; }
.key.points::before { width: .55rem; height: .55rem; border: 0; border-radius: 50%; background: var(--c); }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
svg path.c1, svg path.c2, svg path.c3, svg path.c4, svg path.c5 { stroke: var(--c); } svg circle { fill: var(--c); }
.tiles { display: flex; flex-wrap: wrap; gap: .5rem; margin: .2rem 0 .7rem; }
.tile { width: 4.6rem; margin: 0; font-size: .76rem; line-height: 1.3; color: var(--soft); }
.wide .tile { width: 8.5rem; }
.tile img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border: 2px solid var(--edge);
  border-radius: 4px; background: #fff; image-rendering: auto; }
.tile.right img { border-color: var(--c3); } .tile.wrong img { border: 2px dashed var(--c2); }
.tile b { display: block; } .tile.right b { color: var(--c3); } .tile.wrong b { color: var(--c2); }
.class { margin: .7rem 0 .15rem; font-weight: 600; font-size: .9rem; }
.bar { display: flex; width: 100%; min-width: 7rem; height: .8rem; margin-top: .3rem; border-radius: 2px;
  overflow: hidden; background: var(--edge); }
.bar i { background: var(--c); }
.drop { display: block; padding: 2rem 1rem; border-style: dashed; text-align: center; } .drop input { max-width: 100%; }
.answers { margin-top: 1.5rem; } .answers td { white-space: pre-line; min-width: 5rem; }
.answers img { max-width: 100%; }
.matrix td { text-align: center; padding: .15rem .35rem; min-width: 1.9rem; border: 1px solid var(--edge); }
.matrix thead td { border: 0; }
.matrix thead th { writing-mode: vertical-rl; transform: rotate(180deg); border: 0; padding: .3rem .1rem;
  max-height: 9rem; overflow: hidden; text-overflow: ellipsis; }
.matrix tbody th { max-width: 9rem; overflow: hidden; text-overflow: ellipsis; }
.matrix .hit { background: color-mix(in srgb, var(--c3) var(--share), var(--card)); }
.matrix .miss { background: color-mix(in srgb, var(--c2) var(--share), var(--card)); }
"""


def page(title: str, parts: Iterable[str], *, script: str = "", connects: bool = False) -> str:
    """The page: in ASCII, so that no editor or server can spoil it. A browser loads nothing from a network for it, and
    runs nothing but `script`.

    Args:
        title: as text.
        parts: HTML.
        script: JavaScript that nothing of the data is in.
        connects: the script may ask the server of the page, and show pictures that it was given.
    """
    script = script.encode("ascii", "backslashreplace").decode()  # HTML's entities mean nothing in a script
    allowed = f"script-src 'sha256-{_sha256(script)}'; " if script else ""
    allowed += "connect-src 'self'; img-src blob:; " if connects else "img-src data:; "
    policy = f"default-src 'none'; {allowed}style-src 'unsafe-inline'"
    content = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + (f"\n<script>{script}</script>" if script else "")
        + "\n</main></body></html>\n"
    )
    return content.encode("ascii", "xmlcharrefreplace").decode()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def text(value: object) -> str:
    """A value of any origin as HTML that shows it."""
    return html.escape(printable(str(value)))


def section(title: str, *content: str) -> str:
    """A part of a page with its heading; `content` is HTML."""
    return f"<section><h2>{text(title)}</h2>\n{''.join(content)}</section>"


def folded(summary: str, content: str) -> str:
    """What is shown on demand."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def note(words: str) -> str:
    """An explanation."""
    return f'<p class="note">{text(words)}</p>'


def grid(cards: Iterable[str], least: str = "22rem") -> str:
    """Parts beside each other, as many as there is room for where each has the width `least`."""
    return (
        f'<div class="grid" style="--least:{least}">'
        + "".join(f'<div class="card">{card}</div>' for card in cards)
        + "</div>"
    )


def card(title: str, content: str) -> str:
    """A part of a grid, with its heading."""
    return f"<h3>{text(title)}</h3>{content}"


def facts(values: Mapping[str, object]) -> str:
    """Names with their values."""
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in values.items())
    return f'<table class="facts">{rows}</table>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table that scrolls by itself where it is too wide. Cells are HTML; all columns but the first hold `numbers`."""
    right = ' class="n"' if numbers else ""
    head = "".join(f"<th{right if place else ''}>{text(name)}</th>" for place, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{right if place else ''}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tile(png: bytes, caption: str, *, right: bool | None = None, answer: str = "") -> str:
    """A small picture with what it shows below it; and whether it was predicted `right`, and as what."""
    style = "" if right is None else " right" if right else " wrong"
    verdict = "" if right is None else f"<b>{'&#10003; right' if right else '&#10007; wrong'}</b> "
    image = f'<img alt="{text(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    return f'<figure class="tile{style}">{image}{verdict}{text(answer)}</figure>'


def provenance(made: Mapping[str, str], commands: Sequence[str]) -> str:
    """The section on where a page comes from: what it was `made` with, and the commands that make it again."""
    if commands:
        head = "The command that makes this:" if len(commands) == 1 else "The commands that make this, in their order:"
    else:
        head = "It was made in Python, not by a command."
    lines = "<pre>" + "\n".join(map(text, commands)) + "</pre>" if commands else ""
    return section("Where this comes from", f"<p>{head}</p>", lines, facts(made))
