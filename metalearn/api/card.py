"""The model card: README.md with the fields of Hugging Face's hub, and what a reader of a model wants to know."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from metalearn.errors import printable

CARD = "README.md"

_LICENCES = (
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0",
    "gpl-3.0", "lgpl-3.0", "mpl-2.0", "unlicense",
)  # fmt: skip
"""Those that the hub knows by such a name, of the ones that are common."""


class Reached(NamedTuple):
    """A figure of the hub's table: `value` of `metric` on pictures or tasks called `data`."""

    metric: str
    value: float
    data: str


def card(
    title: str, *, task: str, tags: Sequence[str], licence: str | None, reached: Reached | None,
    facts: Mapping[str, str], use: str,
) -> str:  # fmt: skip
    """The text of README.md.

    Args:
        task: the hub's name of what the model does, such as image-classification.
        facts: lines by their names; backquotes mark code.
        use: how to use the model, in Markdown.
    """
    front: dict[str, Any] = {"library_name": "metalearn-train", "pipeline_tag": task, "tags": list(tags)}
    if licence is not None:
        known = licence.split()[0].lower() if licence.strip() else ""
        named = {"license": known} if known in _LICENCES else {"license": "other", "license_name": licence}
        front = named | front
    if reached is not None:
        result = {
            "task": {"type": task}, "dataset": {"type": "own", "name": reached.data},
            "metrics": [{"type": reached.metric, "value": round(reached.value, 4)}],
        }  # fmt: skip
        front["model-index"] = [{"name": title, "results": [result]}]
    lines = [f"- **{name}**: {quoted_line(text)}" for name, text in facts.items() if text]
    text = "\n".join([f"# {quoted_line(title)}", "", *lines, "", "## Use", "", use])
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{text}\n"


def quoted_line(text: str) -> str:
    """A text that may have parts of a file as one line of Markdown, in which no HTML and no link is left."""
    line = " ".join(printable(text).split())
    return line.replace("<", "&lt;").replace("[", "\\[").replace("](", "]\\(")
