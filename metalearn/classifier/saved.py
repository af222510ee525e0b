"""The saved form of a classifier: what it has learned in meta.json, the features of its pictures among the tensors, the
weights of its network in `backbone.safetensors`, unless a package or code brings them, and the page `report.html`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metalearn.classifier.heads import HEADS
from metalearn.classifier.validation import strangers_in_words, twice_in_words
from metalearn.errors import ConfigError, one_of
from metalearn.reporting.page import Line, Tile, chart, page, side_by_side
from metalearn.reporting.provenance import made_with
from metalearn.saved import form
from metalearn.saved.form import Kind, replaced_by
from metalearn.storage.files import is_folder

CLASSIFIER = Kind("classifier", 2, {
    "backbone": str, "weights": str, "digest": str, "classes": list, "names": [str], "origin": dict, "commands": [str],
    "settings": {"head": str, "folds": int, "seed": int, "threshold": float | str | None},
    "report": {"head": str, "accuracy": float | None, "sharpness": float, "threshold": float | None},
}, ("features", "labels"))  # fmt: skip

WEIGHTS, REPORT = "backbone.safetensors", "report.html"
SHOWN = "shown."  # begins the names of small pictures among the tensors; their ends are places in `names`


def read(folder: Path, key: str) -> tuple[dict[str, Any], Path | None]:
    """What `PictureClassifier.save` has written: the fields of meta.json, the tensors, and the small pictures by their
    names as `shown`; and the file of its network's weights, if it has one. Raises ConfigError if it is damaged, or not
    one that was saved so."""
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
        names, shown = meta["names"], dict[str, Tensor]()
        for name in [name for name in tensors if name.startswith(SHOWN)]:
            number, value = name.removeprefix(SHOWN), tensors.pop(name)
            is_place = number.isdecimal() and int(number) < len(names)
            if not is_place or value.dtype != torch.uint8 or value.shape[2:] != (3,):
                raise ValueError(f"{name}: is no small picture of the {len(names)} that it has learned from")
            shown[names[int(number)]] = value
    except ValueError as error:
        raise ConfigError(
            f"{key}={folder}: is no classifier that can be used: {error}; make it again by metalearn fit"
        ) from error
    weights = place / WEIGHTS
    return meta | tensors | {"shown": shown}, weights if weights.exists() else None


MOST_CLASSES = 40  # the most classes of a page that have a picture
MOST_SHOWN = 48  # the most pictures of a page that were taken for another class
_LARGEST_MATRIX = 40  # the confusion matrix of more classes is a list of its largest entries
_MOST_CONFUSED = 30


def classifier_page(
    name: str, report: Mapping[str, Any], classes: Sequence[Any], backbone: str, shown: Mapping[str, Tensor],
    commands: Sequence[str], threshold: float | str | None,
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
