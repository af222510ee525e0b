"""A classifier leaves the machine: as a folder that this program reads elsewhere, or as one program with the network,
its normalisation and the head, which runs without this program."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from metalearn.api.card import CARD, Reached, card
from metalearn.api.pictures import described
from metalearn.checks import first_line, one_of
from metalearn.classifier.backbones import DEFAULT, Backbone
from metalearn.classifier.heads import HEADS, State, centred
from metalearn.classifier.saved import DESCRIPTION, Weights, write
from metalearn.classifier.validation import compared, why_unknown
from metalearn.errors import ConfigError
from metalearn.nn.precision import computing_with
from metalearn.storage.files import is_path_here, read_object, whole_folder

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

FOLDER, ONNX, TORCH = FORMATS = "folder", "onnx", "torch-export"

PROGRAMS = {ONNX: "model.onnx", TORCH: "model.pt2"}
"""The file of a format."""

PREPROCESSING = "preprocessing.json"

LARGEST_DIFFERENCE = 1e-4
"""Of a probability or a similarity, between an exported program and ours."""

_MOST_NAMED = 100
"""Classes that the card names."""

_NEEDED = ("onnx", "onnxscript", "onnxruntime")

Run = Callable[[Tensor], tuple[Tensor, Tensor]]


def export(
    classifier: "PictureClassifier",
    out: Path,
    *,
    file_format: str,
    licence: str | None,
    name: str | None = None,
    key: str = "path",
) -> list[str]:
    """Writes a classifier into the new folder `out`; returns what there is to say, in lines.

    Args:
        file_format: one of `FORMATS`.
        licence: of the network's weights, if the backbone does not know it.
        name: what the card calls it; None: as the folder.
        key: what messages call `out`.

    Raises:
        ConfigError: a package is missing, the exported program differs from ours, a path of this machine would be in
            the folder, or it cannot be written.
    """
    one_of("format", file_format, FORMATS)
    missing = [name for name in _NEEDED if file_format == ONNX and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format={ONNX}: {' and '.join(missing)} are not installed; type pip install 'metalearn-train[onnx]'"
        )
    backbone, said = classifier.opened(), list[str]()
    licence = licence or backbone.licence
    if licence is None:
        said.append("licence: that of the network's weights is not known to this program; type --licence TEXT")
    preprocessing = {
        "input": "pictures: float32 [n, channels, image_size, image_size], red, green, blue; on white if transparent",
        **(described(backbone.form) or {}), "filter": backbone.form.resample, "crop": backbone.form.crop,
        "output": "probabilities [n, classes]; similarity [n]",
        "classes": classifier.classes_.tolist(), "threshold": classifier.report_["threshold"],
    }  # fmt: skip
    with whole_folder(key, out) as folder:
        if file_format == FOLDER:
            if not backbone.state:
                raise ConfigError(
                    f"format={FOLDER}: {backbone.name} cannot be made anew from its weights alone; type "
                    f"--format {ONNX} or --format {TORCH}"
                )
            weights = Weights(backbone.state, licence)
            write(folder, classifier._saved(), replace=False, weights=weights, page=None)
        else:
            difference = _write_program(classifier, folder / PROGRAMS[file_format], file_format)
            said.append(f"largest difference from this program: {difference:.1e}")
        (folder / PREPROCESSING).write_text(json.dumps(preprocessing, indent=1, allow_nan=False) + "\n", "utf-8")
        (folder / CARD).write_text(_card(classifier, name or out.name, file_format, licence), encoding="utf-8")
        _refuse_paths(folder)
    return said


def _refuse_paths(folder: Path) -> None:
    """Raises ConfigError if a file of the folder has a path of this machine, such as a label that is one."""
    for file in (DESCRIPTION, PREPROCESSING):
        if (folder / file).exists():
            for key, value in _texts(read_object(folder / file)):
                if is_path_here(value):
                    raise ConfigError(
                        f"{key}={value}: is a path of this machine, and what is exported holds none; fit with other "
                        "labels, such as the names of the folders"
                    )


def _texts(node: object, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text, and of every name in an object."""
    if isinstance(node, str):
        yield key, node
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from ((key, name), *_texts(value, name))
    for value in node if isinstance(node, list) else ():
        yield from _texts(value, key)


class ExportedNetwork(nn.Module):
    """The whole classifier: from pictures float32 [n, 3, size, size] in [0, 1] to the probabilities [n, classes] and
    the similarity [n] to the nearest class mean, both float32."""

    def __init__(self, backbone: Backbone, head: str, sharpness: float, state: State, centre: Tensor, means: Tensor):
        super().__init__()
        self.network, self.score, self.sharpness = backbone.network, HEADS[head].score, sharpness
        # Clones: a view that is smaller than its storage is not saved as it is.
        self.state = nn.ParameterDict({k: nn.Parameter(v.clone(), requires_grad=False) for k, v in state.items()})
        self.register_buffer("centre", centre.clone())
        self.register_buffer("means", means.clone())

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        z = centred(self.network(pictures), self.get_buffer("centre"))
        scores = self.score(dict(self.state.items()), z)
        near = (z @ self.get_buffer("means").T).amax(dim=1)
        return torch.softmax(scores * self.sharpness, dim=1).float(), near.float()


def _write_program(classifier: "PictureClassifier", path: Path, file_format: str) -> float:
    """Writes the program; returns the largest difference of an output from ours.

    Raises:
        ConfigError: it is above `LARGEST_DIFFERENCE`, or torch cannot export the network.
    """
    backbone = classifier.opened()
    network = ExportedNetwork(
        backbone, classifier.report_["head"], classifier.report_["sharpness"], classifier._state, classifier._centre,
        classifier._means,
    ).eval()  # fmt: skip
    size = backbone.form.size
    # Noise of all grain sizes: pictures that differ, so that no output is the same for all.
    generator = np.random.default_rng(0)
    coarse = (generator.integers(0, 256, (side, side, 3), np.uint8) for side in (2, 7, 23, size))
    places = np.linspace(0, 1, size, endpoint=False)
    shown = [torch.from_numpy(x[(places * len(x)).astype(int)][:, (places * len(x)).astype(int)]) for x in coarse]
    x = torch.stack(shown).permute(0, 3, 1, 2).float() / 255
    try:
        # torch.export asks a flag that torch cannot tell after a run in full precision; on a CPU it has no effect.
        with computing_with("tf32"), torch.no_grad():
            program = torch.export.export(network, (x[:2],), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
            run = _as_onnx(program, path) if file_format == ONNX else _as_torch(program, path)
            outputs = [torch.cat(parts) for parts in zip(run(x[:1]), run(x[1:]), strict=True)]  # batches of 1 and of 3
    except Exception as error:  # torch, onnx and onnxruntime raise many types
        reason = first_line(error)
        raise ConfigError(f"format={file_format}: {backbone.name} cannot be exported: {reason}") from error
    ours = classifier._probabilities(torch.cat([backbone.features(picture[None]) for picture in shown]))
    pairs = zip(outputs, (torch.from_numpy(ours[0]), ours[1]), strict=True)
    difference = max((theirs.double() - own).abs().max().item() for theirs, own in pairs)
    if not difference <= LARGEST_DIFFERENCE:
        raise ConfigError(
            f"format={file_format}: what was exported differs from this program by {difference:.1e}, and at most "
            f"{LARGEST_DIFFERENCE:.0e} is allowed; nothing is written"
        )
    return difference


def _as_torch(program: torch.export.ExportedProgram, path: Path) -> Run:
    torch.export.save(program, path)
    run: Run = torch.export.load(path).module()
    return run


def _as_onnx(program: torch.export.ExportedProgram, path: Path) -> Run:
    import onnxruntime

    # From torch.export's program, so that both formats hold the same. The exporter by TorchScript is deprecated since
    # torch 2.9, where this one became the default.
    made = torch.onnx.export(
        program, dynamo=True, input_names=["pictures"], output_names=["probabilities", "similarity"], verbose=False
    )
    assert made is not None
    made.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, similarity = (torch.from_numpy(y) for y in session.run(None, {"pictures": x.numpy()}))
        return probabilities, similarity

    return run


# The card


def _card(classifier: "PictureClassifier", name: str, file_format: str, licence: str | None) -> str:
    report, backbone, origin = classifier.report_, classifier.opened(), classifier._origin
    counts = torch.bincount(classifier._y, minlength=len(classifier.classes_)).tolist()
    named = [f"{label} ({count})" for label, count in zip(classifier.classes_, counts, strict=True)][:_MOST_NAMED]
    more = f", and {len(counts) - len(named)} more" if len(counts) > len(named) else ""
    tags = ["image-classification", "few-shot", *([] if file_format == FOLDER else [file_format])]
    facts = {
        "Accuracy": _accuracy(report),
        "Classes (pictures)": ", ".join(named) + more,
        "Data": f"{sum(counts)} pictures of {len(counts)} classes; SHA-256 of their features "
        f"{classifier.data_digest()}",
        "Network": f"{backbone.name}, {backbone.named or 'weights'}; SHA-256, with how pictures are shown, "
        f"{backbone.digest}",
        "Head": report["head"],
        "Tuning": compared(report["tuning"]) if report.get("tuning") else "",
        "Licence of the weights": licence or "not known",
        **{name.capitalize(): origin.get(name, "not known") for name in ("date", "commit", "versions", "hardware")},
    }
    accuracy = report["accuracy"]
    reached = (
        None if accuracy is None else Reached("accuracy", accuracy, "cross-validation over the pictures of the classes")
    )
    package = "'metalearn-train[pictures]'" if backbone.name == DEFAULT else "metalearn-train"
    use = _USES[file_format].replace("PACKAGE", package).replace("NAME", name).replace("FOLDER", Path(name).name)
    return card(name, task="image-classification", tags=tags, licence=licence, reached=reached, facts=facts, use=use)


def _accuracy(report: dict[str, Any]) -> str:
    if report["accuracy"] is None:
        return f"not known: {why_unknown(report)}"
    low, high = report["interval95"]
    return (
        f"{report['accuracy']:.1%} of pictures not learned from (95% interval {low:.1%} to {high:.1%}, "
        f"{report['pictures']} pictures by cross-validation, chance {1 / report['classes']:.1%})"
    )


_USES = {
    FOLDER: """With `pip install PACKAGE`, and nothing else:

```python
from metalearn import PictureClassifier

print(PictureClassifier.from_pretrained("NAME").answers(["picture.jpg"]))
```

or, in the folder that this one lies in, `metalearn predict FOLDER picture.jpg`.

`classifier.safetensors` has the features of the pictures, so that `metalearn add` and `metalearn remove` work.""",
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
    image, size, edge = image.convert("RGB"), (about["image_size"],) * 2, (1 - about["crop"]) / 2
    resample, (w, h) = Image.Resampling[about["filter"].upper()], image.size
    if about["framing"] == "whole":
        square = image.resize(size, resample, (w * edge, h * edge, w * (1 - edge), h * (1 - edge)))
    else:
        square = ImageOps.fit(image, size, resample, bleed=edge)
    return np.asarray(square, np.float32).transpose(2, 0, 1) / 255


pictures = np.stack([shown(path) for path in sys.argv[1:]])
for path, row, near in zip(sys.argv[1:], *session.run(None, {"pictures": pictures})):
    known = about["threshold"] is None or near >= about["threshold"]
    print(path, about["classes"][row.argmax()] if known else "none of these", f"{row.max():.6f}", sep="\\t")
```""",
    TORCH: """`torch.export.load` may run code of a file: load those that you trust.

```python
import torch

run = torch.export.load("model.pt2").module()
probabilities, similarity = run(pictures)  # float32 [n, 3, size, size] from 0 to 1, see preprocessing.json
```

If `similarity` is below `threshold` in `preprocessing.json`, the picture is none of the classes.""",
}
"""How to use what is exported, by format. NAME, FOLDER and PACKAGE are replaced."""
