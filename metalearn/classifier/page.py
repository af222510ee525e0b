"""report.html of a classifier: what its cross-validation has found, on one page that needs nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from metalearn.classifier.validation import compared, strangers_in_words, twice_in_words, why_unknown
from metalearn.reporting import episode_pictures
from metalearn.reporting.page import card, facts, grid, note, page, provenance, section, table, text, tile
from metalearn.reporting.provenance import made_with
from metalearn.reporting.svg import Line, chart

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
    parts = [f"<h1>{text(name)}</h1>", *_result(report)]
    if report["accuracy"] is not None:
        parts += [
            section("What was compared", grid(_comparisons(report))),
            _by_class(report),
            _confusion(report["confusion"], list(map(str, classes))),
            _wrong(report, shown),
        ]
    return page(name, [*parts, provenance(made_with() | {"features": backbone}, commands)])


def _result(report: Mapping[str, Any]) -> Iterator[str]:
    if report["accuracy"] is None:
        yield note(f"The accuracy is not known: {why_unknown(report)}.")
        return
    low, high = report["interval95"]
    words = (
        f"of pictures not learned from (95% interval {low:.1%} to {high:.1%}, {report['pictures']} pictures); guessing "
        f"among {report['classes']} classes gives {1 / report['classes']:.1%}"
    )
    yield f'<p class="result"><b>{report["accuracy"]:.1%}</b>{text(words)}</p>'
    none = report["strangers"]
    found = "needs three classes or more"
    if none is not None:
        found = strangers_in_words(none)
    yield facts({
        "head": report["head"],
        **({"tuning": compared(report["tuning"])} if report.get("tuning") else {}),
        "learned from": f"{report['learned_from']} pictures of {report['classes']} classes",
        "“none of these”": found,
        "calibration": f"probabilities are off by {report['calibration_error']:.1%} (expected calibration error)",
    })  # fmt: skip


def _comparisons(report: Mapping[str, Any]) -> Iterator[str]:
    heads = sorted(report["by_head"].items(), key=lambda pair: -pair[1])
    lines = [[text(name) + (" (chosen)" if name == report["head"] else ""), _percent(value)] for name, value in heads]
    yield card("Heads", table(["head", "accuracy"], lines))
    if report["by_shots"]:
        points = [(float(shots), value) for shots, value in report["by_shots"].items()]
        drawn = chart(
            [Line("mean of random draws", points, (), "dots")], x="pictures a class", y="accuracy (%)", percent=True,
            whole=True,
        )  # fmt: skip
        words = twice_in_words(report)
        yield card("With fewer pictures of each class", drawn + (note(f"{words.capitalize()}.") if words else ""))


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _by_class(report: Mapping[str, Any]) -> str:
    right = sorted(report["by_class"].items(), key=lambda pair: pair[1])
    lines = [
        [text(name), _percent(value), f'<div class="bar"><i class="c3" style="width:{100 * value:.1f}%"></i></div>']
        for name, value in right
    ]
    return section("Each class, the hardest first", table(["class", "accuracy", ""], lines))


def _confusion(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    title = "Confusion matrix"
    if len(classes) > _LARGEST_MATRIX:
        pairs = [
            (count, classes[label], classes[answer])
            for label, row in enumerate(matrix) for answer, count in enumerate(row) if label != answer and count
        ]  # fmt: skip
        lines = [[text(label), text(answer), str(count)] for count, label, answer in sorted(pairs, reverse=True)]
        words = f"The {min(len(lines), _MOST_CONFUSED)} most frequent of {len(lines)} confusions."
        return section(title, note(words), table(["class", "taken for", "pictures"], lines[:_MOST_CONFUSED]))
    head = "".join(f"<th>{text(name)}</th>" for name in classes)
    rows = "".join(
        f"<tr><th>{text(name)}</th>{''.join(_cell(label == place, n, sum(row)) for place, n in enumerate(row))}</tr>"
        for (label, name), row in zip(enumerate(classes), matrix, strict=True)
    )
    matrix_table = f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
    words = "A row is a class, a column what its pictures were taken for; the numbers count pictures."
    return section(title, note(words), f'<div class="scroll">{matrix_table}</div>')


def _cell(hit: bool, count: int, of: int) -> str:
    style = f' class="{"hit" if hit else "miss"}" style="--share:{60 * count / max(of, 1):.0f}%"' if count else ""
    return f"<td{style}>{count or ''}</td>"


def _wrong(report: Mapping[str, Any], shown: Mapping[str, Tensor]) -> str:
    """The pictures that were taken for another class: with the picture where it is known, else by name."""
    wrong = report["wrong"]
    title = f"Taken for another class: {len(wrong)} of {report['pictures']} pictures"
    tiles, named = [], []
    for entry in wrong[:MOST_SHOWN]:
        words = f"{entry['label']}, taken for {entry['answer']} ({entry['picture']})"
        picture = shown.get(entry["picture"])
        if picture is None:
            named.append(f"<li>{text(words)}</li>")
        else:
            png = episode_pictures.png_of(episode_pictures.picture_of(picture.permute(2, 0, 1) / 255))
            tiles.append(tile(png, words, right=False, answer=words))
    parts = [
        f'<div class="tiles wide">{"".join(tiles)}</div>' if tiles else "",
        f"<ul>{''.join(named)}</ul>" if named else "",
    ]
    if len(wrong) > MOST_SHOWN:
        parts.append(note(f"These are the first {MOST_SHOWN}; classifier.json names all."))
    return section(title, *parts)
