"""The text of a page of results, from the rows of the tables and their results alone."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.reproduce import BY_POSITION, LAST, PAGES, Result, ResultRow, ResultTable
from metalearn.errors import ConfigError
from metalearn.reporting.page import Line, chart, svg_file

Results = Mapping[str, Sequence[Result]]
"""The results of every row by its name: one of each seed, or none."""

MOST_MINUTES = 120
"""Minutes of one core that the training of a table's best row may take: an hour on two."""

SHOWN_STEPS = ("0", "1", "2", "3", "4", "5", "10", "20", "50", "100", "200", "400", "600")
"""The inner steps whose accuracies a page shows."""


class Picture(NamedTuple):
    """A picture of accuracies against the inner steps of the test, up to the step `most`."""

    path: str
    title: str
    x: str
    most: int


PICTURES = {
    "drawn": Picture(
        "docs/pictures/drawn_adaptation.svg", "Accuracy after each inner step of the test", "inner step of the test", 10
    ),
    "stream": Picture("docs/pictures/stream.svg", "Accuracy over the classes so far", "classes learned", 600),
}
"""By the page."""

_HOW_TO_READ = """
*Ours* is the test result of each seed; ± is its 95% interval over the test tasks, 1.96 · σ / √tasks. The word behind
the paper's figure compares it with the mean of our seeds: *within* means that they differ by at most √(a² + b² + c²),
where a is the mean interval of our seeds, b that of the paper (0 if it gives none), and c that of the mean over seeds,
t · s / √seeds for their standard deviation s and Student's t (12.7 for two seeds, 4.3 for three); *above* that ours is
better, *below* that ours is worse. *One seed* tells nothing of c, and so nothing of another run. **Bold** is the best
of ours where several rows have the same test tasks, as chosen by this test itself, among transductive and among
inductive tests, within 120 minutes of one core. In one table, rows with the same numbers of shots and queries have the
same test tasks. *Split* is the division of the characters ([Data and models](docs/how-to/data.md)). A *transductive*
evaluation normalises, or predicts, all queries of a task together; an inductive one normalises them by the statistics
of the support set. *Minutes* are those of training and validation, with one core for each worker; a mean of several
networks has those of all of them. Many runs had other work beside them, or were paused in between, so minutes say
little about the speeds of two rows: see [Performance](docs/explanation/performance.md). [Choose
settings](docs/how-to/recipes.md) says how the settings were chosen. `metalearn reproduce --only ROW --output FOLDER`
runs a row again, in that folder. The command, date, commit and machine of a figure are in the files of `results/`;
`metalearn reproduce --render` draws this page from them."""


_HOW_TO_READ_DOCUMENTS = """
Bits of a symbol, less is better, of networks that learn while they read a document ([Learn while
reading](docs/how-to/sequences.md)) and of others. *Bits* is the mean over the test documents, of each seed; ± is its
95% interval, 1.96 · σ / √documents. The other columns have the mean from that position to the next, over the seeds.
*Best prediction* knows the distribution that the chains are drawn from, and counts in all symbols before; *by counts
in the window* does so in those that the network's attention reaches. In one table all rows have the same test
documents. *Minutes* are those of training and validation on one core, with other work beside; a row that begins with
another's network counts from there. `metalearn reproduce --only ROW --output FOLDER` runs a row again; command, date,
commit and machine of a figure are in `results/`.

What may be claimed: a network that was meta-trained to learn while it reads is 1.05 bits below a static one of as
many steps on chains, on Python's library (of Python 3.11.7) 0.40 bits below, and 0.11 below dynamic evaluation of
that network. Its second derivatives are worth 0.02 to 0.03 bits on the library, in each of three seeds, and nothing
on chains. What may not: that static networks cannot do it. They had as many steps and documents as short, no more;
attention to all before was trained on 1,024 symbols, and loses on 8,192 bytes. Two blocks that learn were trained by
the settings of one."""


_HOW_TO_READ_STREAMS = """
A learner sees 600 characters of Omniglot that are in no training, one after the other: 15 drawings of each, each once,
in 9,000 steps of descent (Beaulieu et al. 2020, arXiv 2002.09571; `dataset.test=stream`). *Ours* is its accuracy over
the other five drawings of all of them at the end, of each seed; ± is the 95% interval over ten such streams,
1.96 · σ / √10, and tells little of other characters, since two streams share nine tenths of theirs. The figures of
others are beside ours at several places of the stream; [Results](../results.md) explains the word behind them. Training
has 864 characters of the background set, and validation the other 100. *Minutes* are those of training and validation
on one core, with other work beside. `metalearn reproduce --only ROW --output FOLDER` runs a row again; command, date,
commit and machine of a figure are in `results/`.

A step of descent on one drawing changes what was learned of all others. [OML](../reference/algorithms/oml.md) learns
features in which it does little harm: untrained ones have 5% at the end, and trained ones 69% after five minutes of a
core. The rate matters as much. The one that was learned on streams of 300 drawings is too high for 9,000, and has 42%.
The low one of the test keeps the classifier near its start, where it is close to a sum of each class's features.
That descent itself gains anything is not shown: a prototypical network that keeps the mean of each class, and sees all
drawings for its statistics, has 87%."""


_PICTURES_FIRST = " (pictures are fetched or drawn first, see [Data and models](docs/how-to/data.md))"

_WORDS = {
    "results": ("Results", _HOW_TO_READ, _PICTURES_FIRST),
    "drawn": ("Results on drawn pictures", _HOW_TO_READ, _PICTURES_FIRST),
    "sequences": ("Results on documents", _HOW_TO_READ_DOCUMENTS, ""),
    "stream": ("Results on a long stream", _HOW_TO_READ_STREAMS, ""),
}
"""Of each page: the title, how to read it, and what the rows that have not run need first."""


def page(tables: Sequence[ResultTable], results: Results) -> str:
    """The tables of a page: the rows that have results; then the other rows, and the sources of the papers' figures."""
    name = tables[0].page
    rows = [row for table in tables for row in table.rows]
    sources = sorted({row.source for row in rows if row.source})
    title, how_to_read, needs = _WORDS[name]
    lines = [f"# {title}", "", "\n\n".join(" ".join(part.split()) for part in how_to_read.split("\n\n"))]
    for table in tables:
        if shown := [row for row in table.rows if results[row.name]]:
            body = _by_position if shown[0].metric == "bits" else _by_shots if table.by_shots else _by_row
            lines += ["", f"## {table.title}", "", *body(shown, results, sources)]
    if name in PICTURES and (curves := curves_of(tables, results)):
        lines += ["", f"## {PICTURES[name].title}", "", *_curves(PICTURES[name], curves)]
    if missing := [row for row in rows if not results[row.name]]:
        named = [f"`{row.name}` ({row.method}, {', '.join(_papers(row, sources))})" for row in missing]
        lines += [
            "",
            f"Not run yet{needs}: {'; '.join(named)}.",
        ]
    numbered = [f"[{number}] {source}" for number, source in enumerate(sources, start=1)]
    lines += ["", f"Figures of the papers: {'; '.join(numbered)}."] if sources else []
    text = "\n".join(lines) + "\n"
    return text.replace("](docs/", "](../") if PAGES[name].startswith("docs/") else text


def _by_row(rows: Sequence[ResultRow], results: Results, sources: Sequence[str]) -> Iterator[str]:
    """A line for each figure that is compared with a paper's."""
    unit = "" if rows[0].metric == "accuracy" else ", mean squared error"
    facts = "split | queries | tasks | transductive | steps | minutes | workers"
    yield f"| row | method | ours{unit} | paper | | {facts} | note |"
    yield "| --- " * 13 + "|"
    best = _best(rows, results)
    for row in rows:
        first = results[row.name][0]
        for after, ours, paper, word in _figures(row, results, sources, best):
            yield _line(
                f"`{row.name}`", row.method + (after and f", {after}") + _seen(first), ours, paper, word,
                first["split"] or "–", first["queries"], first["tasks"], "yes" if first["transductive"] else "no",
                first["steps"], _minutes(results[row.name]), first["workers"], row.note,
            )  # fmt: skip


Curves = Mapping[str, Mapping[str, float]]
"""By the names of rows whose learners adapt by steps: the accuracy after each step of the test, mean of the seeds."""


def curves_of(tables: Sequence[ResultTable], results: Results) -> Curves:
    """The curves of the rows that have results."""
    by_row = {row.name: results[row.name] for table in tables for row in table.rows if results[row.name]}
    return {
        name: {step: statistics.fmean(one["by_step"][step] for one in several) for step in several[0]["by_step"]}
        for name, several in by_row.items()
        if len(several[0]["by_step"]) > 1
    }


def curves_picture(picture: Picture, curves: Curves) -> str:
    """The curves as an SVG file."""
    lines = [
        Line(
            name,
            [(float(at), y) for at, y in curve.items() if int(at) <= picture.most],
            style="dots" if place < 5 else "dashes",
        )
        for place, (name, curve) in enumerate(curves.items())
    ]
    return svg_file(chart("", lines, x=picture.x, y="accuracy (%)", percent=True, whole=True))


BESIDE_PAPERS = {
    "Omniglot, Lake's challenge, 20 runs within one alphabet": "docs/pictures/lake.svg",
    "Omniglot without labels, 5-way": "docs/pictures/no_labels.svg",
}
"""By the title of a table, the path of its picture."""


def rows_picture(rows: Sequence[ResultRow], results: Results) -> str:
    """The accuracy of each seed of the rows, with its interval, beside the figures of papers, as an SVG file."""
    shown = [row for row in rows if results[row.name]]
    lines = [
        Line(
            f"{place}: {row.name}",
            [(place + 0.15 * number, result["accuracy"]) for number, result in enumerate(results[row.name])],
            [result["ci95"] for result in results[row.name]],
            "points",
        )
        for place, row in enumerate(shown, start=1)
    ]
    papers = [(place - 0.15, row.papers.get(LAST)) for place, row in enumerate(shown, start=1)]
    others = Line("figures of others", [(x, y) for x, y in papers if y is not None], style="points", colour="#7a7a7a")
    return svg_file(chart("", [*lines, others], x="row of the table", y="accuracy (%)", percent=True, whole=True))


def _curves(picture: Picture, curves: Curves) -> Iterator[str]:
    """The table of the curves, and their picture."""
    yield f"![{picture.title}]({picture.path})"
    yield ""
    steps = [step for step in SHOWN_STEPS if any(step in curve for curve in curves.values())]
    yield _line("row", *steps)
    yield "| --- " * (len(steps) + 1) + "|"
    for name, curve in curves.items():
        yield _line(f"`{name}`", *(f"{curve[step]:.1%}" if step in curve else "" for step in steps))


def _by_shots(rows: Sequence[ResultRow], results: Results, sources: Sequence[str]) -> Iterator[str]:
    """A line for each training, whose checkpoints are tested with several numbers of shots."""
    shots = sorted({results[row.name][0]["shots"] for row in rows})
    yield f"| rows | algorithm | {' | '.join(_counted(k, 'shot') for k in shots)} | steps | minutes | note |"
    yield "| --- " * (len(shots) + 5) + "|"
    best = _best(rows, results)
    for name in dict.fromkeys(row.of or row.name for row in rows):
        group = {results[row.name][0]["shots"]: row for row in rows if name in (row.of, row.name)}
        cells = dict.fromkeys(shots, "")
        for k, row in group.items():
            figures = _figures(row, results, sources, best)
            cells[k] = "; ".join(
                ours + (after and f" after {after}") + (word and f", {word} {paper}")
                for after, ours, paper, word in figures
            )
        names = ", ".join(f"`{row.name.replace(name, '…') if row.of else name}`" for row in group.values())
        several = results[next(iter(group.values())).name]
        notes = " ".join(row.note for row in group.values() if row.note)
        yield _line(names, several[0]["algorithm"], *cells.values(), several[0]["steps"], _minutes(several), notes)


def _by_position(rows: Sequence[ResultRow], results: Results, sources: Sequence[str]) -> Iterator[str]:
    """A line for each row, and for each best prediction that is known."""
    ours, best, in_window = ([result.get(name) for row in rows for result in results[row.name]] for name in BY_POSITION)
    places = list(dict.fromkeys(place for curve in ours if curve for place in curve))
    yield _line("row", "method", "bits", *(f"from {place}" for place in places), "steps", "minutes", "note")
    yield "| --- " * (len(places) + 6) + "|"
    for row in rows:
        several = results[row.name]
        curves = [result[BY_POSITION[0]] for result in several]
        means = [f"{statistics.fmean(c[p] for c in curves):.3f}" if p in curves[0] else "" for p in places]
        bits = ", ".join(_with_interval("bits", result["bits"], result["ci95"]) for result in several)
        yield _line(f"`{row.name}`", row.method, bits, *means, several[0]["steps"], _minutes(several), row.note)
    for what, curves in (("best prediction", best), ("by counts in the window", in_window)):
        longest = max((curve for curve in curves if curve), key=len, default=None)
        if longest is not None:
            yield _line("", what, "", *(f"{longest[p]:.3f}" if p in longest else "" for p in places), "", "", "")


def _figures(
    row: ResultRow, results: Results, sources: Sequence[str], best: Collection[tuple[str, str]]
) -> Iterator[tuple[str, str, str, str]]:
    """For each figure of a row's papers: the inner steps if there is a choice, our figures, the paper's, and the word
    that compares them."""
    several = results[row.name]
    for (after, value), paper in zip(row.papers.items(), _papers(row, sources), strict=True):
        figures = [_at(result, row, after) for result in several]
        mark = "**" * ((row.name, after) in best)
        ours = mark + ", ".join(_with_interval(row.metric, *figure) for figure in figures) + mark
        word = "" if value is None else f"*{comparison_with_paper(row.metric, figures, (value, row.ci95 or 0.0))}*"
        yield "" if after == LAST else _counted(int(after), row.counts), ours, paper, word


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By the number of seeds: the 97.5% quantile of Student's t with one degree of freedom less."""


def comparison_with_paper(metric: str, seeds: Sequence[tuple[float, float]], paper: tuple[float, float]) -> str:
    """`above` if the mean of our seeds is better than the paper's figure, `below` if it is worse; `within` if they
    differ by no more than the intervals of tasks, seeds and paper allow. A figure is a value and its interval."""
    values, ci95 = [value for value, _ in seeds], statistics.fmean(ci for _, ci in seeds)
    count = len(values)
    spread = _STUDENT.get(count, 2.776) * statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0
    lead = (statistics.fmean(values) - paper[0]) * (1 if metric == "accuracy" else -1)
    word = "within" if abs(lead) <= math.hypot(ci95, paper[1], spread) else "above" if lead > 0 else "below"
    return word + (", one seed" if count == 1 else "")


def _best(rows: Sequence[ResultRow], results: Results) -> set[tuple[str, str]]:
    """The names and inner steps of the best figures of each list of test tasks and either kind of test, where several
    rows have one; of a stream those for each number of classes."""
    rivals: dict[tuple[object, ...], list[tuple[float, str, str]]] = {}
    for row in rows:
        several = results[row.name]
        if max(result["seconds"] / 60 * result["workers"] for result in several) <= MOST_MINUTES:
            for after in row.papers:
                mean = statistics.fmean(_at(result, row, after)[0] for result in several)
                place = "" if row.counts == "step" else after
                kind = several[0]["task_list"], several[0]["transductive"], place
                rivals.setdefault(kind, []).append((mean if row.metric == "accuracy" else -mean, row.name, after))
    return {max(figures)[1:] for figures in rivals.values() if len({name for _, name, _ in figures}) > 1}


def _at(result: Result, row: ResultRow, after: str) -> tuple[float, float]:
    """A result's figure after `after` inner steps, and its interval."""
    if after == LAST:
        return result[row.metric], result["ci95"]
    if after not in result["by_step"]:
        steps = ", ".join(result["by_step"])
        raise ConfigError(
            f"paper: the result of {row.name}, seed {result['seed']}, has inner steps {steps}, and not {after}; remove "
            "the result to run the row again"
        )
    return result["by_step"][after], result["ci95_by_step"][after]


def _papers(row: ResultRow, sources: Sequence[str]) -> list[str]:
    """The paper's figures with the number of their source."""
    number = f" [{sources.index(row.source) + 1}]" if row.source else ""
    return [_with_interval(row.metric, v, row.ci95) + number if v is not None else "–" for v in row.papers.values()]


def _with_interval(metric: str, value: float, ci95: float | None) -> str:
    # Where a task diverges, its error has no bound.
    form = "{:.2%}" if metric == "accuracy" else "{:.3f}" if value < 1000 else "{:.1e}"
    return form.format(value) + (f" ± {form.format(ci95)}" if ci95 is not None else "")


def _minutes(several: Sequence[Result]) -> str:
    return ", ".join(f"{result['seconds'] / 60:.1f}" for result in several)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def _seen(result: Result) -> str:
    """What follows the method if classes of the test may have been seen before it; see `seen_classes=report`."""
    counted = result.get("seen_classes") or {"complete": True}
    if seen := (counted.get("trained_on") or 0) + (counted.get("validated_on") or 0):
        least = "" if counted["complete"] else "at least "
        return f"; **trained or validated on {least}{seen} of {counted['classes']} test classes**"
    return "" if counted["complete"] else "; **not known which test classes it was trained on**"
