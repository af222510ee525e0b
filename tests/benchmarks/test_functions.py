"""The best predictions of functions, against four Gaussian processes that are computed one by one."""

import numpy as np
import pytest
import torch

from benchmarks.functions import Grid
from metalearn.tasks.priors.gp import posterior


def joint(x: np.ndarray, y: np.ndarray, length: float, scale: float) -> float:
    """The log-likelihood of all points."""
    gaps = (x - x.T) / length
    matrix = torch.from_numpy(scale**2 * np.exp(-(gaps**2) / 2) + 0.01 * np.eye(len(x)))
    return float(
        torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), matrix).log_prob(
            torch.from_numpy(y)
        )
    )


def test_the_grid_is_a_mixture_by_prior_and_evidence() -> None:
    """Two lengths and two scales, evenly in their logarithm, so that the even prior weighs each by its value."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-2, 2, size=(9, 1)), rng.normal(size=9)
    lengths, scales = [0.1 * 9**0.25, 0.1 * 9**0.75], [0.2 * 4**0.25, 0.2 * 4**0.75]
    pairs = [(length, scale) for length in lengths for scale in scales]
    weights = np.array([length * scale * np.exp(joint(x[:6], y[:6], length, scale)) for length, scale in pairs])
    weights /= weights.sum()
    means, deviations = np.stack(
        [posterior(x[:6], y[:6], x[6:], kernel="rbf", length=a, noise=0.1, scale=b) for a, b in pairs], axis=1
    )
    densities = np.exp(-0.5 * ((y[6:] - means) / deviations) ** 2) / deviations / np.sqrt(2 * np.pi)
    mean = weights @ means
    variance = weights @ (deviations**2 + means**2) - mean**2
    normal = np.exp(-0.5 * (y[6:] - mean) ** 2 / variance) / np.sqrt(2 * np.pi * variance)
    prior = np.array([length * scale for length, scale in pairs])
    known, both = (prior @ np.exp([joint(x[:n], y[:n], a, b) for a, b in pairs]) for n in (6, 9))
    found = Grid("rbf", [0.1, 0.9], [0.2, 0.8], 0.1, 2).predicted(x, y, 6)
    assert found["Bayes"] == pytest.approx(np.log(weights @ densities).mean())
    assert found["Bayes, as normal"] == pytest.approx(np.log(normal).mean())
    assert found["Bayes, joint"] == pytest.approx(np.log(both / known) / 3)
