"""A classifier leaves the machine: as a folder that this program reads elsewhere, or as one program with the network,
its normalisation and the head, which runs without this program."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from metalearn.api.card import CARD, Reached, card
from metalearn.api.program import (
    FILES,
    ONNX,
    PROGRAMS,
    TORCH,
    USES,
    check_packages,
    first_few_of,
    noise,
    refuse_paths,
    write_preprocessing,
    write_program,
)
from metalearn.checks import one_of
from metalearn.classifier.backbones import DEFAULT, Backbone
from metalearn.classifier.heads import HEADS, State, centred
from metalearn.classifier.saved import DESCRIPTION, Weights, write
from metalearn.classifier.validation import compared, why_unknown
from metalearn.errors import ConfigError
from metalearn.storage.files import read_object, whole_folder

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

FOLDER = "folder"
FORMATS = (FOLDER, *PROGRAMS)

OUTPUTS = ("probabilities", "similarity")


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
    check_packages(file_format)
    backbone, said = classifier.opened(), list[str]()
    licence = licence or backbone.licence
    if licence is None:
        said.append("licence: that of the network's weights is not known to this program; type --licence TEXT")
    with whole_folder(key, out) as folder:
        if file_format == FOLDER:
            if not backbone.state:
                raise ConfigError(
                    f"format={FOLDER}: {backbone.name} cannot be made anew from its weights alone; type "
                    f"--format {ONNX} or --format {TORCH}"
                )
            weights = Weights(backbone.state, licence)
            write(folder, classifier._saved(), replace=False, weights=weights, page=None)
            refuse_paths(read_object(folder / DESCRIPTION))
        else:
            difference = _write_program(classifier, folder / FILES[file_format], file_format)
            said.append(f"largest difference from this program: {difference:.1e}")
        write_preprocessing(
            folder, backbone.form, classifier.classes_.tolist(), threshold=classifier.report_["threshold"],
            output="probabilities [n, classes]; similarity [n]",
        )  # fmt: skip
        (folder / CARD).write_text(_card(classifier, name or out.name, file_format, licence), encoding="utf-8")
    return said


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
    """Writes the program; returns the largest difference of an output from ours."""
    backbone, report = classifier.opened(), classifier.report_
    learned = (report["head"], report["sharpness"], classifier._state, classifier._centre, classifier._means)
    shown = [torch.from_numpy(picture) for picture in noise(backbone.form)]
    probabilities, near = classifier._probabilities(torch.cat([backbone.features(x[None]) for x in shown]))
    return write_program(
        ExportedNetwork(backbone, *learned).eval(), torch.stack(shown).permute(0, 3, 1, 2).float() / 255,
        (torch.from_numpy(probabilities), near), path, file_format, name=backbone.name, outputs=OUTPUTS,
    )  # fmt: skip


# The card


def _card(classifier: "PictureClassifier", name: str, file_format: str, licence: str | None) -> str:
    report, backbone, origin = classifier.report_, classifier.opened(), classifier._origin
    counts = torch.bincount(classifier._y, minlength=len(classifier.classes_)).tolist()
    named = first_few_of(f"{label} ({count})" for label, count in zip(classifier.classes_, counts, strict=True))
    tags = ["image-classification", "few-shot", *([] if file_format == FOLDER else [file_format])]
    facts = {
        "Accuracy": _accuracy(report),
        "Classes (pictures)": named,
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
    ONNX: USES[ONNX],
    TORCH: USES[TORCH].replace("OUTPUTS", ", ".join(OUTPUTS))
    + """

If `similarity` is below `threshold` in `preprocessing.json`, the picture is none of the classes.""",
}
"""How to use what is exported, by format. NAME, FOLDER and PACKAGE are replaced."""
