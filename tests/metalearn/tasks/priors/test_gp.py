"""Functions of a Gaussian process against its covariance and its posterior, in closed form."""

from typing import Any

import numpy as np
import pytest
import torch

from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors.gp import KERNELS, draw_settings, gp_prior, posterior

SETTINGS: dict[str, Any] = {
    "kernel": "rbf", "length": 0.3, "noise": 0.2, "features": 2, "rows": 5, "known": 2, "group": 64,
    "seeds": Seeds(0, 1),
}  # fmt: skip


def covariance_by_hand(kernel: str, a: float) -> float:
    """As the textbook has it (Rasmussen and Williams, equations 4.9 and 4.17), for a distance in length scales."""
    root3, root5 = 3**0.5 * a, 5**0.5 * a
    return {
        "rbf": np.exp(-a * a / 2), "matern12": np.exp(-a), "matern32": (1 + root3) * np.exp(-root3),
        "matern52": (1 + root5 + 5 * a * a / 3) * np.exp(-root5),
    }[kernel]  # fmt: skip


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "periodic"])
def test_whitened_draws_are_standard_normal(kernel: str) -> None:
    """y whitened by the covariance of its own inputs, computed by hand, has mean 0, variance 1 and no correlation."""
    made = gp_prior(**SETTINGS | {"kernel": kernel, "group": 640})
    episode = made.episodes("train", torch.arange(640))
    x = torch.cat([batch.x for batch in episode], dim=1).double().numpy()
    y = torch.cat([batch.y for batch in episode], dim=1).double().numpy()
    white = []
    for points, values in zip(x, y[..., 0], strict=True):
        gaps = [[covariance_by_hand(kernel, float(np.linalg.norm(a - b)) / 0.3) for b in points] for a in points]
        white.append(np.linalg.solve(np.linalg.cholesky(np.array(gaps) + 0.04 * np.eye(5)), values))
    found = np.array(white)
    assert found.shape == (640, 5)
    assert np.abs(found.mean(axis=0)).max() < 0.15 and np.abs(np.cov(found.T) - np.eye(5)).max() < 0.2


def test_the_posterior_is_the_conditional_normal() -> None:
    """By the precision matrix of known values and one asked value, in place of solving with the known ones."""
    rng = np.random.default_rng(0)
    x, asked, y = rng.uniform(size=(6, 2)), rng.uniform(size=(3, 2)), rng.normal(size=6)
    mean, deviation = posterior(x, y, asked, kernel="matern32", length=0.4, noise=0.3)
    for number, point in enumerate(asked):
        points = [*x, point]
        joint = [[covariance_by_hand("matern32", float(np.linalg.norm(a - b)) / 0.4) for b in points] for a in points]
        precision = np.linalg.inv(np.array(joint) + 0.09 * np.eye(7))
        assert deviation[number] == pytest.approx(precision[6, 6] ** -0.5)
        assert mean[number] == pytest.approx(-precision[6, :6] @ y / precision[6, 6])


def test_tasks_draw_their_own_kernel_length_and_noise() -> None:
    """A task alone has the bits of a chunk, also where its kernel is another one than its neighbours'."""
    several = SETTINGS | {"kernel": ["rbf", "matern12"], "length": [0.1, 1], "noise": [0.01, 0.5], "features": [1, 3]}
    together = gp_prior(**several).episodes("val", torch.arange(16))
    for number in range(16):
        alone = gp_prior(**several).episodes("val", torch.tensor([number]))
        for batch, own in zip(together, alone, strict=True):
            assert torch.equal(batch.x[number], own.x[0]) and torch.equal(batch.y[number], own.y[0])


@pytest.mark.parametrize("kernel", ["rbf", "periodic"])
def test_what_a_task_draws_explains_its_values(kernel: str) -> None:
    """y whitened by the covariance that its generator draws first is standard normal, and lies in the range of x. The
    periodic kernel by Rasmussen and Williams, equation 4.31."""
    ranges: dict[str, Any] = {
        "kernel": kernel, "length": [0.1, 0.6], "noise": 0.05, "scale": [0.1, 1], "period": [0.5, 3], "uniform": True
    }  # fmt: skip
    seeds = Seeds(0, 1)
    shapes = {"features": 1, "rows": 5, "known": 2, "group": 640, "seeds": seeds, "inputs": [-2, 2]}
    episode = gp_prior(**ranges, **shapes).episodes("val", torch.arange(640))
    x, y = (torch.cat([batch[part] for batch in episode], dim=1).double().numpy()[..., 0] for part in (0, 1))
    white, drawn = [], [draw_settings(seeds.generator("val", number), **ranges) for number in range(640)]
    for task, points, values in zip(drawn, x, y, strict=True):
        apart = points[:, None] - points
        power = apart**2 / 2 if kernel == "rbf" else 2 * np.sin(np.pi * apart / task.period) ** 2
        matrix = task.scale**2 * np.exp(-power / task.length**2) + 0.0025 * np.eye(5)
        white.append(np.linalg.solve(np.linalg.cholesky(matrix), values))
    assert np.abs(np.mean(white, axis=0)).max() < 0.15 and np.abs(np.cov(np.array(white).T) - np.eye(5)).max() < 0.2
    assert -2 < x.min() < -1.9 and 1.9 < x.max() < 2
    for values, (low, high) in (([t.length for t in drawn], (0.1, 0.6)), ([t.scale for t in drawn], (0.1, 1))):
        assert np.mean(values) == pytest.approx((low + high) / 2, abs=0.04)  # evenly: in the logarithm it is 0.28, 0.39


def test_asked_points_are_drawn_after_known_ones() -> None:
    """All pairs of 3 to 5 known points and 2 or more asked ones, of 8 points at most, and no other."""
    source = gp_prior(**SETTINGS | {"known": [3, 5], "rows": 8, "asked": 2, "group": 1})
    shapes = {(source.shape("train", number).known, source.shape("train", number).rows) for number in range(200)}
    assert shapes == {(known, rows) for known in (3, 4, 5) for rows in range(known + 2, 9)}
