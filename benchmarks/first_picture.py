"""Draws the first picture of README.md from runs.

    python train.py experiment=maml_sinusoid                         first: three minutes on one core
    python benchmarks/first_picture.py --sinusoid outputs/maml_sinusoid/seed0

Left: the validations of the main job, from results/maml_5w1s_seed*.json, which `scripts/reproduce.py --only maml_5w1s`
writes. Right: a test task of the sine-wave run before and after adaptation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402 (the path comes first, here and below)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from metalearn.app.job import script, to_job  # noqa: E402
from metalearn.app.parts import assemble  # noqa: E402
from metalearn.config.saved import changed_config  # noqa: E402
from metalearn.runs.checkpoint import read  # noqa: E402

PAPER = 0.987
"""MAML, 5-way 1-shot: Finn et al. 2017 (arXiv 1703.03400), table 1."""

INK, COLORS = "#333333", ("#0b6e99", "#e3b23c")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sinusoid", type=Path, default=Path("outputs/maml_sinusoid/seed0"), help="a run folder")
    parser.add_argument("--task", type=int, default=0, help="number of the test task")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/first.png")
    options = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.9), layout="constrained", width_ratios=(1.15, 1))
    draw_learning(left, [json.loads(path.read_text()) for path in sorted(ROOT.glob("results/maml_5w1s_seed*.json"))])
    draw_adaptation(right, options.sinusoid, options.task)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(options.output, dpi=120)
    print(options.output)
    return 0


def draw_learning(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Validation accuracy against minutes; the axis is logarithmic in the distance from 100%."""
    ticks = (0.94, 0.96, 0.97, 0.98, 0.985, 0.99)
    for color, result in zip(COLORS, results, strict=False):
        curve = result["validation"]
        minutes = [seconds / 60 for seconds in curve["seconds"]]
        label = f"seed {result['seed']}: test {result['accuracy']:.2%} ± {result['ci95']:.2%}"
        axes.plot(minutes, [1 - value for value in curve["values"]], marker="o", markersize=4, color=color, label=label)
    axes.axhline(1 - PAPER, color=INK, linestyle="--", linewidth=1, label=f"the paper's test: {PAPER:.1%}")
    axes.set_yscale("log")
    axes.set_yticks([1 - tick for tick in ticks], [f"{tick:.1%}" for tick in ticks])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.set_xlabel("minutes of training on two CPU cores")
    axes.set_ylabel("validation accuracy")
    axes.set_title("MAML on Omniglot, 5-way 1-shot", fontsize=11)
    axes.legend(frameon=False, loc="lower right")


def draw_adaptation(axes: Axes, run_dir: Path, task: int) -> None:
    """A sine wave, the points that are seen of it, and the network's curve before and after inner steps on them."""
    saved = read(run_dir / "checkpoints/best")
    config = changed_config(saved.meta["config"], [], {})
    parts = assemble(to_job(config, run_dir, "evaluate", None, script(Path(__file__)), []))
    support, query = parts.source.episodes("test", torch.tensor([task]))
    order = query.x[0, :, 0].argsort()
    x = query.x[:, order]
    axes.plot(x[0, :, 0], query.y[0, order, 0], color=INK, linewidth=1, label="the wave")
    for steps, style, color in ((0, ":", "#999999"), (1, "--", COLORS[1]), (10, "-", COLORS[0])):
        predicted = parts.algorithm.adapt(saved.params, support, steps)(x)
        label = "before" if steps == 0 else f"after {steps} inner step{'s' if steps > 1 else ''}"
        axes.plot(x[0, :, 0], predicted[0, :, 0], linestyle=style, color=color, linewidth=2, label=label)
    axes.scatter(support.x[0, :, 0], support.y[0, :, 0], color=INK, marker="^", zorder=3, label="support points")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.set_title("a new sine wave, learned from ten points", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


if __name__ == "__main__":
    sys.exit(main())
