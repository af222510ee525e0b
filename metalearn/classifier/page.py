"""report.html of a classifier: what its cross-validation has found, on one page that needs nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from metalearn.classifier.validation import compared, strangers_in_words, twice_in_words
from metalearn.reporting.charts import Line, chart
from metalearn.reporting.episode_pictures import picture_of
from metalearn.reporting.page import Tile, page
from metalearn.reporting.provenance import made_with

REPORT = "report.html"

MOST_SHOWN = 48
"""The page shows so many of the pictures that were taken for another class."""
_LARGEST_MATRIX = 40
"""The confusion matrix of more classes is a list of its largest entries."""
_MOST_CONFUSED = 30


def classifier_page(
    name: str, report: Mapping[str, Any], classes: Sequence[Any], backbone: str, shown: Mapping[str, Tensor],
    commands: Sequence[str],
) -> str:  # fmt: skip
    """The page.

    Args:
        name: of the classifier.
        report: as `validation.report_of` gives it.
        classes: the labels.
        backbone: what gives the features, in words.
        shown: pictures uint8 [h, w, 3] by name, of those that were taken for another class, as far as they are known.
        commands: what makes it again, in order; none if it was made in Python.
    """
    values = {"title": name, "report": report, "made": made_with() | {"features": backbone}, "commands": commands}
    if report["accuracy"] is None:
        return page("classifier.html", **values, unknown=report["unknown"])
    strangers, names = report["strangers"], list(map(str, classes))
    about = {
        "head": report["head"],
        **({"tuning": compared(report["tuning"])} if report.get("tuning") else {}),
        "learned from": f"{report['learned_from']} pictures of {report['classes']} classes",
        "“none of these”": "needs three classes or more" if strangers is None else strangers_in_words(strangers),
        "calibration": f"probabilities are off by {report['calibration_error']:.1%} (expected calibration error)",
    }
    heads = sorted(report["by_head"].items(), key=lambda pair: -pair[1])
    twice = twice_in_words(report).capitalize()
    shots = chart(
        "With fewer pictures of each class",
        [Line("mean of random draws", [(int(k), value) for k, value in report["by_shots"].items()], (), "dots")],
        x="pictures a class", y="accuracy (%)", percent=True, whole=True, note=twice and f"{twice}.",
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
        if entry["picture"] in shown:
            tiles.append(Tile(picture_of(shown[entry["picture"]].permute(2, 0, 1) / 255), words, words, right=False))
        else:
            unseen.append(words)
    return page(
        "classifier.html",
        **values,
        about=about,
        heads=[(head + " (chosen)" * (head == report["head"]), f"{value:.1%}") for head, value in heads],
        shots=shots,
        classes=names,
        confused=sorted(confused, key=lambda pair: (-pair[2], *pair[:2])),
        as_list=len(names) > _LARGEST_MATRIX,
        most_confused=_MOST_CONFUSED,
        wrong=tiles,
        unseen=unseen,
        most_shown=MOST_SHOWN,
    )
