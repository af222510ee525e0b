"""The chart of bench.py: how many times as fast as the loop every way is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"ours": "#0b6e99", "vmap": "#b8c4ca", "TorchOpt": "#e3b23c"}
LABELS = {"vmap": "vmap of grad over F.conv2d", "TorchOpt": "TorchOpt's MetaSGD"}


def chart(measurements: Sequence[dict[str, Any]], path: Path, note: str) -> Path:
    """Draws a row for each number of threads, with bars by recipe: medians and quartiles of the ratio to the loop. The
    note stands below."""
    count = max(len(measured["recipes"]) for measured in measurements)
    size = max(7.0, 3.0 + 1.15 * count), 1.2 + 3.4 * len(measurements)
    figure, rows = plt.subplots(len(measurements), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, measured in zip(rows[:, 0], measurements, strict=True):
        recipes, threads = measured["recipes"], measured["threads"]
        ways = [way for way in COLORS if way in recipes[0]["by_way"]]
        width = 0.8 / len(ways)
        for i, way in enumerate(ways):
            found = [recipe["by_way"][way] for recipe in recipes]
            middle = [row["ratio"] for row in found]
            low, high = zip(*(row["ratio_quartiles"] for row in found), strict=True)
            spread = [[max(0.0, m - a) for m, a in zip(middle, low, strict=True)],
                      [max(0.0, b - m) for m, b in zip(middle, high, strict=True)]]  # fmt: skip
            places = [at + (i - (len(ways) - 1) / 2) * width for at in range(len(recipes))]
            bars = axes.bar(places, middle, width * 0.92, yerr=spread, color=COLORS[way], label=LABELS.get(way, way))
            if way == "ours":
                axes.bar_label(bars, [f"{m:.2f}×" for m in middle], padding=3, fontsize=9, fontweight="bold")
        axes.axhline(1, color="#333333", linewidth=1, linestyle="--", label="per-task loop of torch.autograd.grad = 1")
        axes.set_title(f"{measured['device']}, {threads} thread{'s' * (threads > 1)}", loc="left", fontsize=11)
        axes.set_xticks(range(len(recipes)), [recipe["name"].replace("-", "\n") for recipe in recipes], fontsize=9)
        axes.set_ylabel("times as fast as the loop")
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(note, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
