"""A classifier leaves the machine: as a folder that this program reads elsewhere, or as one program with the network,
its normalisation and the head, which runs without this program."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from metalearn.classifier.backbones import DEFAULT, Backbone
from metalearn.classifier.heads import HEADS, State, centred
from metalearn.classifier.saved import Weights, fill
from metalearn.classifier.validation import compared
from metalearn.errors import ConfigError
from metalearn.saved import exporter
from metalearn.saved.card import FOLDER, ONNX, TORCH, Card, Reached
from metalearn.saved.exporter import NetworkToExport

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

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
        file_format: one of `metalearn.saved.card.FORMATS`.
        licence: of the network's weights, if the backbone does not know it.
        name: what the card calls it; None: as the folder.
        key: what messages call `out`.

    Raises:
        ConfigError: as `metalearn.saved.exporter.export`.
    """
    backbone, report = classifier.opened(), classifier.report_
    licence = licence or backbone.licence

    def fill_folder(folder: Path) -> None:
        if not backbone.state:
            raise ConfigError(
                f"format={FOLDER}: {backbone.name} cannot be made anew from its weights alone; type --format {ONNX} or "
                f"--format {TORCH}"
            )
        fill(folder, classifier._saved(), Weights(backbone.state, licence), None)

    def program() -> NetworkToExport:
        learned = (report["head"], report["sharpness"], classifier._state, classifier._centre, classifier._means)
        shown = [torch.from_numpy(picture) for picture in exporter.noise(backbone.form)]
        probabilities, near = classifier._probabilities(torch.cat([backbone.features(x[None]) for x in shown]))
        return NetworkToExport(
            ExportedNetwork(backbone, *learned).eval(), torch.stack(shown).permute(0, 3, 1, 2).float() / 255,
            (torch.from_numpy(probabilities), near), backbone.name, OUTPUTS,
        )  # fmt: skip

    about = exporter.picture_input(
        backbone.form, classifier.classes_.tolist(), threshold=report["threshold"],
        output="probabilities [n, classes]; similarity [n]",
    )  # fmt: skip
    card = _card(classifier, name or out.name, licence)
    lines = exporter.export(key, out, file_format, fill=fill_folder, program=program, about=about, card=card)
    if licence is None:
        lines.append("licence: that of the network's weights is not known to this program; type --licence TEXT")
    return lines


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


def _card(classifier: "PictureClassifier", name: str, licence: str | None) -> Card:
    report, backbone, origin = classifier.report_, classifier.opened(), classifier._origin
    accuracy, reached = f"not known: {report.get('unknown')}", None
    if report["accuracy"] is not None:
        low, high = report["interval95"]
        accuracy = (
            f"{report['accuracy']:.1%} of pictures not learned from (95% interval {low:.1%} to {high:.1%}, "
            f"{report['pictures']} pictures by cross-validation, chance {1 / report['classes']:.1%})"
        )
        reached = Reached("accuracy", report["accuracy"], "cross-validation over the pictures of the classes")
    counts = torch.bincount(classifier._y, minlength=len(classifier.classes_)).tolist()
    facts = {
        "Accuracy": accuracy,
        "Classes (pictures)": exporter.first_few_of(
            f"{label} ({count})" for label, count in zip(classifier.classes_, counts, strict=True)
        ),
        "Data": f"{sum(counts)} pictures of {len(counts)} classes; SHA-256 of their features "
        f"{classifier.data_digest()}",
        "Network": f"{backbone.name}, {backbone.named or 'weights'}; SHA-256, with how pictures are shown, "
        f"{backbone.digest}",
        "Head": report["head"],
        "Tuning": compared(report["tuning"]) if report.get("tuning") else "",
        "Licence of the weights": licence or "not known",
        **{item.capitalize(): origin.get(item, "not known") for item in ("date", "commit", "versions", "hardware")},
    }
    package = "'metalearn-train[pictures]'" if backbone.name == DEFAULT else "metalearn-train"
    folder = _USE.replace("PACKAGE", package).replace("NAME", name).replace("FOLDER", Path(name).name)
    use = {FOLDER: folder, **exporter.uses_of_pictures(", ".join(OUTPUTS))}
    use[TORCH] += "\n\nIf `similarity` is below `threshold` in `preprocessing.json`, the picture shows none of them."
    return Card(name, "image-classification", ["image-classification", "few-shot"], licence, facts, use, reached)


_USE = """With `pip install PACKAGE`, and nothing else:

```python
from metalearn import PictureClassifier

print(PictureClassifier.from_pretrained("NAME").answers(["picture.jpg"]))
```

or, in the folder that this one lies in, `metalearn predict FOLDER picture.jpg`.

`params.safetensors` has the features of the pictures, so that `metalearn add` and `metalearn remove` work."""
"""How to use the exported folder. NAME, FOLDER and PACKAGE are replaced."""
