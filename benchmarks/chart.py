"""The chart of bench.py: how many times as fast as the loop every way is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"ours": "#0b6e99", "vmap": "#b8c4ca", "TorchOpt": "#e3b23c", "JAX": "#a05195"}
LABELS = {"vmap": "vmap of grad over F.conv2d", "TorchOpt": "TorchOpt's MetaSGD", "JAX": "JAX, jit"}
INK = "#333333"


def chart(measurements: Sequence[dict[str, Any]], path: Path, note: str) -> Path:
    """Draws a panel for each number of threads, with bars by recipe: medians and quartiles of the ratio to the loop.

    The note stands below.
    """
    count = max(len(measured["recipes"]) for measured in measurements)
    wide = count > 7
    size = (max(7.0, 3.0 + 1.15 * count), (0.6 if wide else 1.2) + 3.4 * len(measurements))
    figure, panels = plt.subplots(len(measurements), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, measured in zip(panels[:, 0], measurements, strict=True):
        panel(axes, measured)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels) if wide else 2, frameon=False)
    figure.supxlabel(note, fontsize=10, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def panel(axes: Axes, measured: dict[str, Any]) -> None:
    recipes = measured["recipes"]
    ways = [way for way in COLORS if way in recipes[0]["by_way"]]
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        rows = [recipe["by_way"][way] for recipe in recipes]
        middle = [row["ratio"] for row in rows]
        ends = [row["ratio_quartiles"] for row in rows]
        spread = [[max(0.0, m - low) for m, (low, _) in zip(middle, ends, strict=True)],
                  [max(0.0, high - m) for m, (_, high) in zip(middle, ends, strict=True)]]  # fmt: skip
        places = [at + (i - (len(ways) - 1) / 2) * width for at in range(len(recipes))]
        axes.bar(
            places, middle, width * 0.92, yerr=spread, color=COLORS[way], label=LABELS.get(way, way),
            error_kw={"elinewidth": 1, "ecolor": INK, "capsize": 2},
        )  # fmt: skip
        if way == "ours":
            tops = [m + up for m, up in zip(middle, spread[1], strict=True)]
            for at, top, m in zip(places, tops, middle, strict=True):
                axes.annotate(
                    f"{m:.2f}×", (at, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9,
                    fontweight="bold", color=COLORS["ours"],
                )  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1, linestyle="--", label="per-task loop of torch.autograd.grad = 1")
    dress(axes, measured)


def dress(axes: Axes, measured: dict[str, Any]) -> None:
    """Sets titles, labels and margins."""
    recipes, threads = measured["recipes"], measured["threads"]
    where = measured["device"] if measured["device"] != "cpu" else f"{threads} thread{'s' * (threads > 1)}"
    axes.set_title(where, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xticks(range(len(recipes)), [name_of(recipe) for recipe in recipes], fontsize=9)
    axes.set_ylabel("times as fast as the loop")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.25)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    middle, half = (len(recipes) - 1) / 2, max(len(recipes) + 0.1, 3) / 2
    axes.set_xlim(middle - half, middle + half)


def name_of(recipe: dict[str, Any]) -> str:
    """The name of a recipe, in short lines."""
    if recipe["kind"] == "sinusoid":
        return "sinusoid\nMLP " + ", ".join(map(str, recipe["widths"]))
    if recipe["kind"] == "resnet12":
        return f"ResNet-12\n{recipe['image_size']}×{recipe['image_size']}"
    lines = [f"{recipe['ways']}-way, {recipe['shots']}-shot"]
    for number, what in ((recipe["inner_steps"], "inner step"), (recipe["queries"], "query")):
        plural = {"query": "queries"}.get(what, what + "s") if number > 1 else what
        lines.append(f"{number} {plural}")
    return "\n".join(lines)
