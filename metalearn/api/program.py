"""A network as one program that runs without this one: ONNX, or torch's own export. The folder also has what its reader
needs: how pictures are shown to it, and a model card."""

import importlib.util
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metalearn.api.pictures import described
from metalearn.checks import first_line
from metalearn.errors import ConfigError
from metalearn.nn.precision import computing_with
from metalearn.storage.files import is_path_here
from metalearn.tasks.common.pictures import PictureForm, Pixels

ONNX, TORCH = PROGRAMS = "onnx", "torch-export"

FILES = {ONNX: "model.onnx", TORCH: "model.pt2"}
"""The file of a format."""

PREPROCESSING = "preprocessing.json"

LARGEST_DIFFERENCE = 1e-4
"""Of an output, between an exported program and ours."""

_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def check_packages(file_format: str) -> None:
    """Raises ConfigError if packages are missing that a format needs."""
    missing = [name for name in _NEEDED if file_format == ONNX and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format={ONNX}: {' and '.join(missing)} are not installed; type pip install 'metalearn-train[onnx]'"
        )


def noise(form: PictureForm) -> list[Pixels]:
    """Four pictures as `formed` gives them, of noise of all grain sizes: they differ, so that no output is the same for
    all."""
    generator, size = np.random.default_rng(0), form.size
    colours = (3,) if form.channels == 3 else ()
    coarse = (generator.integers(0, 256, (side, side, *colours), np.uint8) for side in (2, 7, 23, size))
    places = np.linspace(0, 1, size, endpoint=False)
    return [x[(places * len(x)).astype(int)][:, (places * len(x)).astype(int)] for x in coarse]


def in_batches(x: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures [4, …] that a program is tried with, in batches of two sizes."""
    return x[:1], x[1:]


def write_program(
    network: nn.Module,
    x: Tensor,
    ours: Sequence[Tensor],
    path: Path,
    file_format: str,
    *,
    name: str,
    outputs: Sequence[str],
    given: str = "pictures",
    folded: bool = False,
) -> float:
    """Writes the program; returns the largest difference of an output from ours, as a part of the largest of it where
    that is above 1.

    Args:
        network: from pictures, or rows of a table, float [n, …], as `x`, to a tuple of outputs [n, …].
        x: four of them.
        ours: what each output must be for them, computed `in_batches`.
        file_format: one of `PROGRAMS`.
        name: what messages call the network.
        outputs: the names of the outputs.
        given: the name of the input.
        folded: compute beforehand what does not depend on the input.

    Raises:
        ConfigError: the difference is above `LARGEST_DIFFERENCE`, or torch cannot export the network.
    """
    try:
        # torch.export asks a flag that torch cannot tell after a run in full precision; on a CPU it has no effect.
        with computing_with("tf32"), torch.no_grad():
            program = _exported(network, x[:2])
            if folded:
                # Without operations in place, which would change a folded value at every call.
                program = _exported(_folded(program.run_decompositions({})), x[:2])
            if file_format == ONNX:
                theirs = _run_as_onnx(program, path, x, given, outputs)
            else:
                theirs = _run_as_torch(program, path, x)
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


def _exported(network: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))


def _folded(program: torch.export.ExportedProgram) -> nn.Module:
    from torch.fx.experimental.const_fold import split_const_subgraphs

    with warnings.catch_warnings(action="ignore"):  # of torch, about nodes that it has made itself
        module = split_const_subgraphs(program.module(check_guards=False))
        module.run_folding()
    return module


def _run_as_torch(program: torch.export.ExportedProgram, path: Path, x: Tensor) -> list[Tensor]:
    with warnings.catch_warnings(action="ignore"):  # of torch, about groups of constants
        torch.export.save(program, path)
    run = torch.export.load(path).module()
    return [torch.cat(parts) for parts in zip(*map(run, in_batches(x)), strict=True)]


def _run_as_onnx(
    program: torch.export.ExportedProgram, path: Path, x: Tensor, given: str, outputs: Sequence[str]
) -> list[Tensor]:
    import onnxruntime

    # From torch.export's program, so that both formats hold the same. The exporter by TorchScript is deprecated since
    # torch 2.9, where this one became the default.
    made = torch.onnx.export(program, dynamo=True, input_names=[given], output_names=list(outputs), verbose=False)
    assert made is not None
    made.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = [session.run(None, {given: part.numpy()}) for part in in_batches(x)]
    return [torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True)]


# What lies beside it


def write_preprocessing(folder: Path, form: PictureForm, classes: Sequence[Any], **more: Any) -> None:
    """Writes how pictures are shown to a program, and what its outputs mean."""
    content = {
        "input": "pictures: float32 [n, channels, image_size, image_size], red, green, blue; on white if transparent",
        **(described(form) or {}), "filter": form.resample, "crop": form.crop, "classes": list(classes), **more,
    }  # fmt: skip
    refuse_paths(content)
    (folder / PREPROCESSING).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def refuse_paths(content: object) -> None:
    """Raises ConfigError if plain values have a path of this machine, such as a label that is one."""
    for key, value in _texts(content):
        if is_path_here(value):
            raise ConfigError(
                f"{key}={value}: is a path of this machine, and what is exported holds none; fit with other labels, "
                "such as the names of the folders"
            )


def _texts(node: object, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text, and of every name in an object."""
    if isinstance(node, str):
        yield key, node
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from ((key, name), *_texts(value, name))
    for value in node if isinstance(node, list) else ():
        yield from _texts(value, key)


def first_few_of(texts: Iterable[object], most: int = 100) -> str:
    """The first of them, and how many more there are."""
    every = [str(text) for text in texts]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


USES = {
    ONNX: """With `pip install onnxruntime pillow`, in this folder: `python use.py picture.jpg`, where `use.py` is

```python
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

with open("preprocessing.json", encoding="utf-8") as file:
    about = json.load(file)
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])


def shown(path):
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image, side, edge = image.convert("RGB"), about["image_size"], (1 - about["crop"]) / 2
    image = image.convert("L") if about["channels"] == 1 else image
    resample, (w, h) = Image.Resampling[about["filter"].upper()], image.size
    if about["framing"] == "whole":
        square = image.resize((side, side), resample, (w * edge, h * edge, w * (1 - edge), h * (1 - edge)))
    else:
        square = ImageOps.fit(image, (side, side), resample, bleed=edge)
    values = np.asarray(square, np.float32).reshape(side, side, -1).transpose(2, 0, 1) / 255
    return 1 - values if about["inverted"] else values


pictures = np.stack([shown(path) for path in sys.argv[1:]])
names = [output.name for output in session.get_outputs()]
found = dict(zip(names, session.run(None, {"pictures": pictures})))
for number, path in enumerate(sys.argv[1:]):
    row, least = found["probabilities"][number], about.get("threshold")
    known = least is None or found["similarity"][number] >= least
    print(path, about["classes"][row.argmax()] if known else "none of these", f"{row.max():.6f}", sep="\\t")
```""",
    TORCH: """`torch.export.load` may run code of a file: load those that you trust.

```python
import torch

run = torch.export.load("model.pt2").module()
OUTPUTS = run(pictures)  # float32 [n, channels, size, size] from 0 to 1, see preprocessing.json
```""",
}
"""How to use a program, by format. OUTPUTS is replaced."""
