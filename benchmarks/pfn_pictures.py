"""Draws what prior-fitted networks answer: posterior bands beside the exact ones, decision surfaces beside a forest's.

    pip install 'metalearn-train[tables]'
    python -m benchmarks.pfn_pictures --gp outputs/pfn_gp/seed0 --tables outputs/pfn_tables/seed0 --out pictures

pfn_posterior.png: three functions of the Gaussian process, of 3, 8 and 20 known points. pfn_surfaces.png: two data sets
of scikit-learn with 60 known rows, which no network was trained on; the grey of a place is the probability of a class.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from metalearn.api.load import load
from metalearn.errors import ConfigError
from metalearn.tasks.priors.gp import posterior
from metalearn.types import Batch

POINTS, ROWS = (3, 8, 20), 60
OURS, EXACT = "#0b6e99", "#e3b23c"


def posteriors(run: str, path: Path) -> None:
    """The band of two standard deviations of a run of experiment=pfn_gp, and the exact one."""
    learner = load(run)
    reads, dataset = learner.taught.model.in_context, learner.taught.config.dataset
    if reads is None or reads.predictive is None or not isinstance(dataset.get("kernel"), str):
        raise ConfigError(f"--gp={run}: is no run of experiment=pfn_gp; type another one")
    places = np.linspace(0, 1, 200)[:, None]
    figure, panels = plt.subplots(1, len(POINTS), figsize=(11, 3), sharey=True, layout="constrained")
    for number, (axes, known) in enumerate(zip(panels, POINTS, strict=True)):
        batch = learner.taught.source.episodes("test", torch.tensor([1000 * number])).query
        x, y = batch.x[:, :known], batch.y[:, :known]
        with torch.no_grad(), learner.computing():
            asked = torch.from_numpy(places).float()[None]
            outputs = reads.outputs(learner.params, Batch(x, y), asked).double()
        mean, ends = reads.predictive.mean(outputs), reads.predictive.quantiles(outputs, torch.tensor([0.0228, 0.9772]))
        exact, sd = posterior(
            x[0].double().numpy(), y[0, :, 0].double().numpy(), places, kernel=dataset.kernel, length=dataset.length,
            noise=dataset.noise,
        )  # fmt: skip
        line = places[:, 0]
        axes.fill_between(line, exact - 2 * sd, exact + 2 * sd, color=EXACT, alpha=0.35, lw=0, label="exact, ± 2 sd")
        axes.plot(line, exact, color=EXACT)
        axes.plot(line, mean[0, :, 0], color=OURS, label="network, mean")
        axes.plot(line, ends[0], color=OURS, lw=1, ls="--", label="network, ± 2 sd")
        axes.plot(x[0, :, 0], y[0, :, 0], "o", color="#333333", ms=4)
        axes.set_title(f"{known} known points", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def surfaces(run: str, path: Path) -> None:
    """The probability of a class over two features, by a run of experiment=pfn_tables and by a random forest."""
    from sklearn.datasets import make_circles, make_moons
    from sklearn.ensemble import RandomForestClassifier

    from metalearn import PFNClassifier

    learners = {"prior-fitted network": PFNClassifier(run), "random forest": RandomForestClassifier(random_state=0)}
    sets = (make_moons(ROWS, noise=0.25, random_state=0), make_circles(ROWS, noise=0.15, factor=0.4, random_state=0))
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
    for place, (x, y) in enumerate(sets):
        low, high = x.min(axis=0) - 0.5, x.max(axis=0) + 0.5
        across, up = np.meshgrid(*(np.linspace(a, b, 80) for a, b in zip(low, high, strict=True)))
        for axes, (name, learner) in zip(panels[2 * place : 2 * place + 2], learners.items(), strict=True):
            votes = learner.fit(x, y).predict_proba(np.column_stack([across.ravel(), up.ravel()]))[:, 1]
            axes.contourf(across, up, votes.reshape(across.shape), levels=np.linspace(0, 1, 21), cmap="Greys")
            for label, color in enumerate((OURS, EXACT)):
                axes.plot(*x[y == label].T, "o", color=color, ms=4)
            axes.set_title(name, fontsize=10)
            axes.set_xticks([])
            axes.set_yticks([])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gp", help="the folder of a run of experiment=pfn_gp")
    parser.add_argument("--tables", help="the folder of a run of experiment=pfn_tables")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gp:
        posteriors(options.gp, options.out / "pfn_posterior.png")
    if options.tables:
        surfaces(options.tables, options.out / "pfn_surfaces.png")


if __name__ == "__main__":
    main()
