"""The saved form of a classifier: what it has learned in meta.json, the features of its pictures among the tensors, the
weights of its network in `backbone.safetensors`, unless a package or code brings them, and the page `report.html`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from metalearn.classifier.heads import HEADS
from metalearn.classifier.validation import strangers_in_words, twice_in_words
from metalearn.errors import ConfigError, one_of
from metalearn.models.common.pretrained import LICENCE, NAMED
from metalearn.reporting.page import Line, Tile, chart, page, side_by_side
from metalearn.reporting.provenance import made_with
from metalearn.saved import form
from metalearn.saved.form import Kind, kind_of, replaced_by
from metalearn.storage.files import is_folder, whole_folder

CLASSIFIER = Kind("classifier", 2, {
    "backbone": str, "weights": str, "digest": str, "classes": list, "names": [str], "origin": dict, "commands": [str],
    "settings": {"head": str, "folds": int, "seed": int, "threshold": float | str | None},
    "report": {"head": str, "accuracy": float | None, "sharpness": float, "threshold": float | None},
}, ("features", "labels"))  # fmt: skip

WEIGHTS, REPORT = "backbone.safetensors", "report.html"

_SHOWN = "shown."  # begins the names of small pictures


class Weights(NamedTuple):
    """The weights of a network, by name, and their licence where it is known."""

    state: Mapping[str, Tensor]
    licence: str | None


@dataclass(frozen=True, eq=False)
class Saved:
    """What a folder holds."""

    backbone: str  # the network
    weights: str  # torchvision's name of its weights, or nothing
    digest: str  # their SHA-256
    settings: dict[str, Any]  # further arguments of `PictureClassifier`
    classes: list[Any]  # the labels
    names: list[str]  # of the pictures
    report: dict[str, Any]  # as `validation.report_of` gives it
    origin: dict[str, str]  # of the report: as `metalearn.reporting.provenance.made_with` gives it
    features: Tensor  # of the pictures, float32 [n, width]
    labels: Tensor  # their places in `classes`, int64 [n]
    shown: Mapping[str, Tensor]  # small pictures of the page, uint8 [h, w, 3], by name

    def write(self, folder: Path, *, replace: bool, weights: Weights | None, command: str) -> None:
        """Writes the folder: a reader, also after a kill, finds the classifier before or this one. Raises ConfigError
        if there is something else there, or it cannot be written.

        Args:
            replace: the folder may hold a classifier, which this one was made of.
            weights: of the network, if the folder is to have them.
            command: that has made it so, empty if that was none.
        """
        old = replace and kind_of(folder) == CLASSIFIER.name
        with form.replacing("path", folder, CLASSIFIER) if replace else whole_folder("path", folder) as temporary:
            before = form.load_meta(folder, CLASSIFIER)["commands"] if old else []
            commands = [*before, *([command] if command else [])]
            self.fill(temporary, weights, commands, folder.resolve().name)

    def fill(
        self, folder: Path, weights: Weights | None, commands: Sequence[str] | None = None, name: str = ""
    ) -> None:
        """As `write`, into an empty folder: `commands` are all that have made it, and its page has the `name`. Without
        commands, which name folders of this machine, it has no page and no pictures."""
        content = {field: value for field, value in vars(self).items() if not isinstance(value, Tensor)}
        tensors = {"features": self.features, "labels": self.labels}
        shown = content.pop("shown")
        if weights is not None:
            whole = {key: value.contiguous() for key, value in weights.state.items()}
            save_file(whole, folder / WEIGHTS, {NAMED: self.weights, LICENCE: weights.licence or ""})
        if commands is not None:
            threshold = self.settings["threshold"]
            text = classifier_page(name, self.report, self.classes, self.backbone, shown, commands, threshold)
            (folder / REPORT).write_text(text, encoding="ascii")
            tensors |= {f"{_SHOWN}{self.names.index(name)}": value for name, value in shown.items()}
        form.fill(folder, CLASSIFIER, tensors, content | {"commands": [*(commands or ())]})

    @classmethod
    def read(cls, folder: Path, key: str) -> tuple["Saved", Path | None]:
        """What a folder holds, and the file of its network's weights, if it has one. Raises ConfigError if it is
        damaged, or not one that `write` has written."""
        replaced = replaced_by(folder.resolve())
        if not is_folder(folder) and not replaced.exists():
            raise ConfigError(f"{key}={folder}: there is no such folder; type one that metalearn fit has made")
        try:
            try:
                tensors, meta, place = form.load(folder, CLASSIFIER)
            except ValueError:  # another process may just be replacing it, or was killed while it did
                killed = replaced.exists() and not folder.exists()
                tensors, meta, place = form.load(replaced if killed else folder, CLASSIFIER)
            one_of("head", meta["report"]["head"], tuple(HEADS))
            shown = _named(meta["names"], tensors)
        except ValueError as error:
            raise ConfigError(
                f"{key}={folder}: is no classifier that can be used: {error}; make it again by metalearn fit"
            ) from error
        content, weights = meta | tensors | {"shown": shown}, place / WEIGHTS
        return cls(**{item.name: content[item.name] for item in fields(cls)}), weights if weights.exists() else None


def _named(names: Sequence[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the small pictures out of the tensors, where they have the places of their names. Raises ValueError if one
    is no picture, or has no name."""
    shown = {}
    for key in [key for key in tensors if key.startswith(_SHOWN)]:
        place, value = key.removeprefix(_SHOWN), tensors.pop(key)
        if not (
            place.isdecimal() and int(place) < len(names) and value.dtype == torch.uint8 and value.shape[2:] == (3,)
        ):
            raise ValueError(f"{key}: is no small picture of the {len(names)} that it has learned from")
        shown[names[int(place)]] = value
    return shown


MOST_CLASSES = 40  # the most classes of a page that have a picture
MOST_SHOWN = 48  # the most pictures of a page that were taken for another class
_LARGEST_MATRIX = 40  # the confusion matrix of more classes is a list of its largest entries
_MOST_CONFUSED = 30


def classifier_page(
    name: str, report: Mapping[str, Any], classes: Sequence[Any], backbone: str, shown: Mapping[str, Tensor],
    commands: Sequence[str], threshold: float | str | None = "auto",
) -> str:  # fmt: skip
    """report.html: what the cross-validation has found, on one page that needs nothing else.

    Args:
        backbone: what gives the features, in words.
        shown: small pictures uint8 [h, w, 3] by name, as far as they are known.
        commands: what makes it again, in order; none if it was made in Python.
        threshold: as of the classifier.
    """
    values = {"title": name, "report": report, "made": made_with() | {"features": backbone}, "commands": commands}
    if report["accuracy"] is None:
        return page("classifier.html", **values, unknown=report["unknown"])
    names = list(map(str, classes))
    about = {
        "head": report["head"],
        "learned from": f"{report['learned_from']} pictures of {report['classes']} classes",
        "“none of these”": strangers_in_words(report["strangers"], threshold),
        "calibration": f"probabilities are off by {report['calibration_error']:.1%} (expected calibration error)",
    }
    heads = sorted(report["by_head"].items(), key=lambda pair: -pair[1])
    twice = twice_in_words(report).capitalize()
    shots = chart(
        "With fewer pictures of each class",
        [Line("mean of random draws", [(int(k), value) for k, value in report["by_shots"].items()], (), "dots")],
        x="pictures a class", y="accuracy (%)", percent=True, whole=True, note=twice and f"{twice}.",
    )  # fmt: skip
    rest = [(100 * share, value) for share, value in report.get("by_refused", ())]
    refused = chart(
        "With the least similar pictures refused", [Line("accuracy of the others", rest, (), "dots")],
        x="refused (%)", y="accuracy (%)", percent=True, note=f"“none of these” is {about['“none of these”']}.",
    )  # fmt: skip
    confused = [
        (names[label], names[answer], count)
        for label, row in enumerate(report["confusion"])
        for answer, count in enumerate(row)
        if label != answer and count
    ]
    tiles, unseen = [], []
    for entry in report["wrong"][:MOST_SHOWN]:
        words = f"{entry['label']}, taken for {entry['answer']} ({entry['picture']})"
        if "nearest" in entry:
            words += f"; the nearest known picture is of {entry['nearest_label']} ({entry['nearest']})"
        pair = [shown[entry[key]].numpy() for key in ("picture", "nearest") if entry.get(key) in shown]
        if entry["picture"] in shown:
            tiles.append(Tile(side_by_side(pair), words, words, right=False))
        else:
            unseen.append(words)
    return page(
        "classifier.html", **values, about=about,
        heads=[(head + " (chosen)" * (head == report["head"]), f"{value:.1%}") for head, value in heads],
        charts=[each for each in (shots, refused) if each.lines],
        typical={label: shown[name].numpy() for label, name in report.get("typical", {}).items() if name in shown},
        classes=names, confused=sorted(confused, key=lambda pair: (-pair[2], *pair[:2])),
        as_list=len(names) > _LARGEST_MATRIX, most_confused=_MOST_CONFUSED, wrong=tiles, unseen=unseen,
        most_shown=MOST_SHOWN,
    )  # fmt: skip
