"""The model card: README.md with the fields of Hugging Face's hub, and what a reader of a model wants to know."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from metalearn.errors import printable

FOLDER, ONNX, TORCH = FORMATS = "folder", "onnx", "torch-export"
"""Formats of what is exported: this program reads the first; the others are programs that run without it."""

_LICENCES = (
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0",
    "gpl-3.0", "lgpl-3.0", "mpl-2.0", "unlicense",
)  # fmt: skip
"""Those that the hub knows by such a name, of the ones that are common."""


def use(name: str, **words: str) -> str:
    """How to use a model, in Markdown: the text in `use/NAME.md`, with these words in capitals replaced."""
    text = (Path(__file__).parent / "use" / f"{name}.md").read_text(encoding="utf-8").removesuffix("\n")
    for word, value in words.items():
        text = text.replace(word, value)
    return text


class Reached(NamedTuple):
    """A figure of the hub's table: `value` of `metric` on pictures or tasks called `data`."""

    metric: str
    value: float
    data: str


def _line(text: str) -> str:
    """A text as one line of Markdown, in which a name is neither HTML nor a link."""
    return " ".join(printable(text).split()).replace("<", "&lt;").replace("[", "\\[")


class Card(NamedTuple):
    """What a model card says."""

    title: str  # of the model
    task: str  # the hub's name of what it does, such as image-classification
    tags: Sequence[str]  # those of the hub
    licence: str | None  # None: it is not known
    facts: Mapping[str, str]  # lines by their names; backquotes mark code
    use: Mapping[str, str]  # how to use the model, in Markdown, by the format in which it is exported
    reached: Reached | None = None  # the figure that it has reached

    def text(self, file_format: str) -> str:
        """README.md of a model in this format."""
        tags = [*self.tags, *([] if file_format == FOLDER else [file_format])]
        front: dict[str, Any] = {"library_name": "metalearn-train", "pipeline_tag": self.task, "tags": tags}
        if self.licence is not None:
            first = self.licence.split()[0].lower() if self.licence.strip() else ""
            other = {"license": "other", "license_name": self.licence}
            front = ({"license": first} if first in _LICENCES else other) | front
        if self.reached is not None:
            result = {
                "task": {"type": self.task}, "dataset": {"type": "own", "name": self.reached.data},
                "metrics": [{"type": self.reached.metric, "value": round(self.reached.value, 4)}],
            }  # fmt: skip
            front["model-index"] = [{"name": self.title, "results": [result]}]
        lines = [f"- **{name}**: {_line(text)}" for name, text in self.facts.items() if text]
        text = "\n".join([f"# {_line(self.title)}", "", *lines, "", "## Use", "", self.use[file_format]])
        return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{text}\n"
