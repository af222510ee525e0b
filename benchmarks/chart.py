"""The chart of bench.py: how many times as fast as the loop every way is, and where our own time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"ours": "#0b6e99", "vmap": "#b8c4ca", "TorchOpt": "#e3b23c", "JAX": "#a05195"}
LABELS = {"vmap": "vmap of grad over F.conv2d", "TorchOpt": "TorchOpt's MetaSGD", "JAX": "JAX, jit"}
SHARES = {"kernels": "#0b6e99", "between": "#e3b23c", "outside": "#b8c4ca"}
SHARE_LABELS = {"kernels": "in the kernels", "between": "between them", "outside": "outside the gradient"}
INK = "#333333"
BUDGET_WIDTH = 5.5
"""Inches."""


def chart(measurements: Sequence[dict[str, Any]], path: Path, note: str) -> Path:
    """Draws a row for each number of threads, with bars by recipe: medians and quartiles of the ratio to the loop; and
    beside them, if it was measured, the budget of a step.

    The note stands below.
    """
    count = max(len(measured["recipes"]) for measured in measurements)
    wide = count > 7
    width, height = max(7.0, 3.0 + 1.15 * count), (0.6 if wide else 1.2) + 3.4 * len(measurements)
    has_budget = any(recipe["budget_ms"] is not None for measured in measurements for recipe in measured["recipes"])
    widths = [width, BUDGET_WIDTH] if has_budget else [width]
    figure, panels = plt.subplots(
        len(measurements), len(widths), figsize=(sum(widths), height), squeeze=False, layout="constrained",
        width_ratios=widths,
    )  # fmt: skip
    for row, measured in zip(panels, measurements, strict=True):
        panel(row[0], measured)
        if has_budget:
            budget_panel(row[1], measured["recipes"])
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


def budget_panel(axes: Axes, recipes: Sequence[dict[str, Any]]) -> None:
    """The shares of a step's parts, one bar for each recipe, with the milliseconds of the step."""
    known = [(recipe["name"], recipe["budget_ms"]) for recipe in recipes if recipe["budget_ms"] is not None]
    done = [0.0] * len(known)
    for part, color in SHARES.items():
        shares = [parts[part] / sum(parts.values()) for _, parts in known]
        axes.barh(range(len(known)), shares, 0.7, left=done, color=color, label=SHARE_LABELS[part])
        for at, (left, share) in enumerate(zip(done, shares, strict=True)):
            if share > 0.08:
                axes.text(left + share / 2, at, f"{share:.0%}", ha="center", va="center", fontsize=8,
                          color="white" if part == "kernels" else INK)  # fmt: skip
        done = [left + share for left, share in zip(done, shares, strict=True)]
    for at, (_, parts) in enumerate(known):
        whole = sum(parts.values())
        axes.text(
            1.01, at, f"{whole:.0f} ms" if whole >= 100 else f"{whole:.3g} ms", va="center", fontsize=8, color=INK
        )
    axes.set_yticks(range(len(known)), [name for name, _ in known], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xticks([])
    axes.set_title("our step, by where its time goes", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.01), ncols=3, frameon=False, fontsize=8)


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
