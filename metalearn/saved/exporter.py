"""The one exporter: of a learner, an adapted task, a classifier or a table. It writes a folder for other machines, in
the form that this program reads, or with one program that runs without it: ONNX, or torch's own export. Each has a
model card: README.md with the fields of Hugging Face's hub, and what a reader of a model wants to know."""

import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from metalearn.errors import ConfigError, first_line, install, one_of, printable
from metalearn.nn.surroundings import computing_with
from metalearn.saved.form import CARD, META, NotSavedError, check_fields
from metalearn.storage.files import whole_folder
from metalearn.tasks.common.pictures import PictureForm, Pixels

# Formats of what is exported: this program reads the first; the others are programs that run without it.
FOLDER, ONNX, TORCH = FORMATS = "folder", "onnx", "torch-export"
FILES = {ONNX: "model.onnx", TORCH: "model.pt2"}  # the file of a program
PREPROCESSING = "preprocessing.json"
LARGEST_DIFFERENCE = 1e-4  # of an output, between an exported program and ours
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_LICENCES = (  # those that the hub knows by such a name, of the ones that are common
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0",
    "gpl-3.0", "lgpl-3.0", "mpl-2.0", "unlicense",
)  # fmt: skip


class Card(NamedTuple):
    """What a model card says."""

    title: str  # of the model
    task: str  # the hub's name of what it does, such as image-classification
    tags: Sequence[str]  # those of the hub
    licence: str | None  # None: it is not known
    facts: Mapping[str, str]  # lines by their names; backquotes mark code
    use: Mapping[str, str]  # how to use the model, in Markdown, by the format in which it is exported
    reached: tuple[str, float, str] | None = None  # a metric, its value, and on what, for the hub's table

    def text(self, file_format: str) -> str:
        """README.md of a model in this format."""
        tags = [*self.tags, *([] if file_format == FOLDER else [file_format])]
        front: dict[str, Any] = {"library_name": "metalearn-train", "pipeline_tag": self.task, "tags": tags}
        if self.licence is not None:
            first = self.licence.split()[0].lower() if self.licence.strip() else ""
            other = {"license": "other", "license_name": self.licence}
            front = ({"license": first} if first in _LICENCES else other) | front
        if self.reached is not None:
            metric, value, data = self.reached
            result = {
                "task": {"type": self.task}, "dataset": {"type": "own", "name": data},
                "metrics": [{"type": metric, "value": round(value, 4)}],
            }  # fmt: skip
            front["model-index"] = [{"name": self.title, "results": [result]}]
        lines = [f"- **{name}**: {_line(text)}" for name, text in self.facts.items() if text]
        text = "\n".join([f"# {_line(self.title)}", "", *lines, "", "## Use", "", self.use[file_format]])
        return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{text}\n"


def _line(text: str) -> str:
    """A text as one line of Markdown, in which a name is neither HTML nor a link."""
    return " ".join(printable(text).split()).replace("<", "&lt;").replace("[", "\\[")


def use(name: str, **words: str) -> str:
    """How to use a model, in Markdown: the text in `use/NAME.md`, with these words in capitals replaced."""
    text = (Path(__file__).parent / "use" / f"{name}.md").read_text(encoding="utf-8").removesuffix("\n")
    for word, value in words.items():
        text = text.replace(word, value)
    return text


class NetworkToExport(NamedTuple):
    """A network that becomes a program."""

    answer: Callable[[Tensor], tuple[Tensor, ...]]  # from pictures, or rows of a table, float [n, …], to outputs [n, …]
    x: Tensor  # four of these
    name: str  # what messages call the network
    outputs: Sequence[str]  # their names
    inputs: str = "pictures"  # the name of the input
    folded: bool = False  # compute beforehand what does not depend on the input


class _OfFunction(nn.Module):
    """A function as a module, which torch exports."""

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.forward = function


def export(
    key: str, out: Path, file_format: str, *, fill: Callable[[Path], None],
    program: Callable[[], NetworkToExport] | None, about: tuple[str, Mapping[str, Any]] | None, card: Card,
) -> list[str]:  # fmt: skip
    """Writes the new folder `out`, whole or not at all; returns what there is to say, in lines. Raises ConfigError if a
    package is missing, the program differs from this one by more than 1e-4, a path of this machine would be in the
    folder, or it cannot be written.

    Args:
        key: what messages call `out`.
        file_format: one of `FORMATS`.
        fill: writes the saved form into an empty folder.
        program: gives the program; None: there is only the folder.
        about: the name and the content of the file that says what a program reads and answers.
        card: for README.md.
    """
    one_of("format", file_format, FORMATS if program else (FOLDER,))
    missing = [name for name in _NEEDED if file_format == ONNX and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"format={ONNX}: {' and '.join(missing)} are not installed; type {install('onnx')}")
    lines = []
    with whole_folder(key, out) as folder:
        if about is not None:  # first, so that the manifest has it
            name, content = about
            _refuse_paths(content)
            (folder / name).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if program is None or file_format == FOLDER:
            fill(folder)
            _refuse_paths(json.loads((folder / META).read_text(encoding="utf-8")))
        else:
            difference = write_program(program(), folder / FILES[file_format], file_format)
            lines.append(f"largest difference from this program: {difference:.1e}")
        (folder / CARD).write_text(card.text(file_format), encoding="utf-8")
    return lines


def noise(form: PictureForm) -> list[Pixels]:
    """Four pictures as `formed` gives them, of noise of all grain sizes: they differ, so that no output is the same for
    all."""
    generator, size = np.random.default_rng(0), form.size
    colours = (3,) if form.channels == 3 else ()
    coarse = (generator.integers(0, 256, (side, side, *colours), np.uint8) for side in (2, 7, 23, size))
    places = np.linspace(0, 1, size, endpoint=False)
    return [x[(places * len(x)).astype(int)][:, (places * len(x)).astype(int)] for x in coarse]


def write_program(program: NetworkToExport, path: Path, file_format: str) -> float:
    """Writes the program; returns the largest difference of an output from ours, as a part of the largest of it where
    that is above 1. Raises ConfigError if the difference is above `LARGEST_DIFFERENCE`, or torch cannot export the
    network."""
    answer, x, name, outputs, inputs, folded = program
    batches = x[:1], x[1:]  # of two sizes
    with torch.no_grad():
        ours = [torch.cat(parts) for parts in zip(*map(answer, batches), strict=True)]
    try:
        # torch.export asks a flag that torch cannot tell after a run in full precision; on a CPU it has no effect.
        with computing_with("tf32"), torch.no_grad():
            shapes = ({0: torch.export.Dim("n", min=1)},)
            graph = torch.export.export(_OfFunction(answer), (x[:2],), dynamic_shapes=shapes)
            if folded:
                from torch.fx.experimental.const_fold import split_const_subgraphs

                # Without operations in place, which would change a folded value at every call.
                plain = graph.run_decompositions({})
                with warnings.catch_warnings(action="ignore"):  # of torch, about nodes that it has made itself
                    module = split_const_subgraphs(plain.module(check_guards=False))
                    module.run_folding()
                graph = torch.export.export(module, (x[:2],), dynamic_shapes=shapes)
            if file_format == ONNX:
                import onnxruntime

                # From torch.export's program, so that both formats hold the same. The exporter by TorchScript is
                # deprecated since torch 2.9, where this one became the default.
                made = torch.onnx.export(
                    graph, dynamo=True, input_names=[inputs], output_names=list(outputs), verbose=False
                )
                assert made is not None
                made.save(path)
                session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
                of_batches = [session.run(None, {inputs: part.numpy()}) for part in batches]
                theirs = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*of_batches, strict=True)]
            else:
                with warnings.catch_warnings(action="ignore"):  # of torch, about groups of constants
                    torch.export.save(graph, path)
                run = torch.export.load(path).module()
                theirs = [torch.cat(parts) for parts in zip(*map(run, batches), strict=True)]
    except Exception as error:  # torch, onnx and onnxruntime raise many types
        raise ConfigError(f"format={file_format}: {name} cannot be exported: {first_line(error)}") from error
    sizes = [max(1.0, b.abs().max().item()) for b in ours]  # a mean may have any unit
    pairs = zip(theirs, ours, sizes, strict=True)
    difference = max((a.double() - b).abs().max().item() / size for a, b, size in pairs)
    if not difference <= LARGEST_DIFFERENCE:
        raise ConfigError(
            f"format={file_format}: what was exported differs from this program by {difference:.1e}, and at most "
            f"{LARGEST_DIFFERENCE:.0e} is allowed; nothing is written"
        )
    return difference


def picture_input(form: PictureForm, classes: Sequence[Any], **more: Any) -> tuple[str, dict[str, Any]]:
    """How pictures are shown to a program, and what its outputs mean."""
    words = "pictures: float32 [n, channels, image_size, image_size], red, green, blue; on white if transparent"
    return PREPROCESSING, {"input": words, **described(form), "classes": list(classes), **more}


def described(form: PictureForm) -> dict[str, Any]:
    """The form of pictures as plain values."""
    return {
        "image_size": form.size, "channels": form.channels, "framing": "whole" if form.whole else "middle",
        "inverted": form.inverted, "filter": form.resample, "crop": form.crop, "values": [0, 1],
    }  # fmt: skip


def read_form(values: Mapping[str, Any]) -> PictureForm:
    """The form that `described` has written. Raises NotSavedError if a value is missing or not allowed."""
    fields = {"image_size": int, "channels": int, "framing": str, "inverted": bool, "crop": float, "filter": str}
    check_fields(values, fields, "preprocessing")
    size, channels, framing, *others = (values[name] for name in fields)
    if framing not in ("whole", "middle"):
        raise NotSavedError(f"preprocessing: framing={framing!r:.40}: must be whole or middle")
    return PictureForm(size, channels, framing == "whole", *others)


def _refuse_paths(content: object, key: str = "") -> None:
    """Raises ConfigError if plain values, or the names in them, have a path of this machine, such as a label: one that
    begins with a folder that exists."""
    parts = Path(content).parts if isinstance(content, str) and os.path.isabs(content) else ()  # noqa: PTH117
    if len(parts) > 1 and os.path.lexists(os.path.join(*parts[:2])):  # noqa: PTH118
        raise ConfigError(
            f"{key}={content}: is a path of this machine, and what is exported holds none; fit with other labels, such "
            "as the names of the folders"
        )
    for name, value in content.items() if isinstance(content, dict) else ():
        _refuse_paths(name, key)
        _refuse_paths(value, name)
    for value in content if isinstance(content, list) else ():
        _refuse_paths(value, key)


def first_few_of(texts: Iterable[object], most: int = 100) -> str:
    """The first of them, and how many more there are."""
    every = [str(text) for text in texts]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


def uses_of_pictures(outputs: str) -> dict[str, str]:
    """How to use a program of pictures, by format."""
    call = f"{outputs} = run(pictures)  # float32 [n, channels, size, size] from 0 to 1, see {PREPROCESSING}"
    return {ONNX: use("pictures_onnx"), TORCH: use("torch", CALL=call)}
