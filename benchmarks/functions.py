"""How well runs of experiment=functions predict functions of other kernels, and how far they are from the best.

    python -m benchmarks.functions outputs/functions/seed0 outputs/functions/seed1 [--picture FILE.svg]

The protocol is that of Nguyen and Grover 2022 (arXiv 2207.04179): the log-likelihood of an asked point, the mean over
the asked points of a task, then over test tasks. Where a line has the first tasks alone, its log-likelihood is that of
`exact` on all, plus the difference on its tasks, which is far more certain. `exact` knows the kernel and what a task
has drawn. `Bayes` knows the kernel and the ranges: it integrates over length and scale on a grid, by the prior and the
likelihood of the known points. `rbf Bayes` does so for the kernel of the training, whatever that of the test. `as
normal` has the mean and variance of such a mixture: what a perfect training of model.head=gaussian would lead to.
`joint` predicts all asked points together, which no network here does.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metalearn.api.learner import load
from metalearn.app.prior_check import source_of
from metalearn.cli.arguments import whole
from metalearn.reporting.page import Line, chart, svg_file
from metalearn.reporting.provenance import made_with
from metalearn.storage.files import write_atomically
from metalearn.tasks.priors.gp import Array, covariance, draw_settings, posterior

KERNELS, HYPER = ("rbf", "matern52", "periodic"), ("kernel", "length", "noise", "scale", "period", "uniform")
POINTS = 32  # of a grid, for each range; with 192 a task of 20 known points had 0.0006 more
AT_MOST = (5, 10, 20, 30, 46)  # borders of the numbers of known points, in the picture


def log_normal(y: Array, mean: Array, variance: Array) -> Array:
    """The logarithm of the density."""
    return -0.5 * ((y - mean) ** 2 / variance + np.log(2 * np.pi * variance))


class Grid:
    """Gaussian processes of one kernel over ranges of length and scale, each drawn from evenly.

    K = scale² R + noise² has the eigenvectors of R, so that only lengths need a decomposition.
    """

    def __init__(self, kernel: str, length: Sequence[float], scale: Sequence[float], noise: float, size: int) -> None:
        self.kernel, self.noise = kernel, noise
        middles = (np.arange(size) + 0.5) / size
        # Evenly in the logarithm, where curves bend most; the prior's density per step is then the value itself.
        self.lengths, scales = (low * (high / low) ** middles for low, high in (length, scale))
        self.powers = scales[:, None] ** 2
        prior = np.log(self.lengths)[:, None] + np.log(scales)
        self.prior = prior - np.logaddexp.reduce(prior, axis=None)

    def predicted(self, x: Array, y: Array, context: int) -> dict[str, float]:
        """The mean log-likelihood of the points of a task that follow the known ones."""
        shapes = covariance(self.kernel, x, x, self.lengths[:, None, None])
        vectors, turned, spectrum, weights = self._weighed(shapes[:, :context, :context], y[:context])
        evidence = np.logaddexp.reduce(weights, axis=None)
        weights, joint = weights - evidence, np.logaddexp.reduce(self._weighed(shapes, y)[3], axis=None) - evidence
        across, asked = shapes[:, context:, :context] @ vectors, y[context:]
        mean = self.powers * np.einsum("lak,lsk->lsa", across, turned / spectrum)
        variance = self.powers + self.noise**2 - self.powers**2 * np.einsum("lak,lsk->lsa", across**2, 1 / spectrum)
        mixed = np.logaddexp.reduce(weights[..., None] + log_normal(asked, mean, variance), axis=(0, 1))
        share = np.exp(weights)[..., None]
        centre = (share * mean).sum(axis=(0, 1))
        spread = (share * (variance + (mean - centre) ** 2)).sum(axis=(0, 1))
        normal = log_normal(asked, centre, spread)
        return {"Bayes": mixed.mean(), "Bayes, as normal": normal.mean(), "Bayes, joint": joint / len(asked)}

    def _weighed(self, shapes: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """The eigenvectors [lengths, n, n], y by them [lengths, 1, n], the eigenvalues of K [lengths, scales, n], and
        the logarithms of prior times likelihood [lengths, scales]."""
        values, vectors = np.linalg.eigh(shapes)
        turned, spectrum = (y @ vectors)[:, None], self.powers * values[:, None].clip(0) + self.noise**2
        return vectors, turned, spectrum, self.prior + log_normal(turned, np.zeros(1), spectrum).sum(axis=-1)


def of_kernel(learners: Sequence[Any], kernel: str, count: int, gridded: int) -> dict[str, Array]:
    """By predictor the mean log-likelihood of each test task; and the number of its known points."""
    config = learners[0].taught.config.dataset
    keys = {key: value for key, value in config.items() if key != "_target_"} | {"kernel": kernel}
    source, hyper = source_of("gp", keys, []), {key: keys[key] for key in HYPER}
    ranges = list(config.length), list(config.scale), config.noise, POINTS
    grids = {"rbf ": Grid("rbf", *ranges)} | ({"": Grid(kernel, *ranges)} if kernel == "matern52" else {})
    of_tasks = defaultdict[str, list[float]](list)
    for first in range(0, count, config.group):
        numbers = range(first, first + config.group)
        support, query = source.episodes("test", torch.tensor(numbers))
        for place, learner in enumerate(learners):
            reads = learner.taught.model.in_context
            with torch.no_grad(), learner.computing():
                losses = reads.loss.of_tasks(reads.outputs(learner.params, support, query.x), query.y)["loss"]
            of_tasks[f"network {place}"] += (-losses).tolist()
        context = support.x.shape[1]
        x, y = (torch.cat([support[part], query[part]], dim=1).double().numpy() for part in (0, 1))
        for number, points, answers in zip(numbers, x, y[..., 0], strict=True):
            of_tasks["context"].append(context)
            drawn = draw_settings(source._seeds.generator("test", number), **hyper)._asdict()
            mean, deviation = posterior(points[:context], answers[:context], points[context:], **drawn)
            of_tasks["exact"].append(float(log_normal(answers[context:], mean, deviation**2).mean()))
            for name, grid in grids.items() if number < gridded else ():
                for what, value in grid.predicted(points, answers, context).items():
                    of_tasks[name + what].append(value)
    return {name: np.array(values) for name, values in of_tasks.items()}


def curves(shown: Mapping[str, Array], context: Array) -> str:
    """The picture: the mean of each predictor by the number of known points."""
    groups = [np.searchsorted(AT_MOST, context) == place for place in range(len(AT_MOST))]
    lines = [Line(name, [(context[g].mean(), v[g].mean()) for g in groups], style="dots") for name, v in shown.items()]
    return svg_file(chart("", lines, x="known points", y="log-likelihood of a point"))


def with_interval(values: Array, group: int) -> str:
    """The mean with its interval of 95%, over groups of tasks, which share the numbers of their points."""
    means = values.reshape(-1, group).mean(axis=1)
    return f"{values.mean():.3f} ± {1.96 * means.std(ddof=1) / np.sqrt(len(means)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--groups", type=whole(2), default=3000, help="groups of 16 test tasks (default: 3000)")
    parser.add_argument("--gridded", type=whole(2), default=100, help="the first, for Bayes too (default: 100)")
    parser.add_argument("--picture", type=Path, help="file for the curves of the first kernel over known points")
    options = parser.parse_args()
    torch.set_num_threads(1)
    learners = [load(run) for run in options.runs]
    group = learners[0].taught.config.dataset.group
    for kernel in KERNELS:
        of_tasks = of_kernel(learners, kernel, group * options.groups, group * options.gridded)
        context, exact = of_tasks.pop("context"), of_tasks["exact"]
        print(f"\n{kernel}: exact has {with_interval(exact, group)}\n")
        print(f"| predictor | tasks | log-likelihood | less the exact one's, same tasks |\n{'| --- ' * 4}|")
        for name, values in of_tasks.items():
            less = values - exact[: len(values)]
            print(f"| {name} | {len(values)} | {exact.mean() + less.mean():.3f} | {with_interval(less, group)} |")
        if kernel == "rbf" and options.picture:
            networks = np.mean([of_tasks[f"network {place}"] for place in range(len(learners))], axis=0)
            shown = {"exact": exact, "Bayes: length and scale unknown": of_tasks["rbf Bayes"], "networks": networks}
            first = {name: values[: group * options.gridded] for name, values in shown.items()}
            write_atomically(options.picture, curves(first, context[: group * options.gridded]))
    print(f"\n{made_with()}")


if __name__ == "__main__":
    main()
