"""Learns to reweight noisy labels, Ren et al. 2018 (arXiv 1803.09050): python examples/reweight_labels.py [STEPS]

Of 1000 training labels, 45% of one class are wrong; 20 labels are clean. At each step every sample of a batch gets a
weight: how much a step on this sample would lower the loss of the clean ones, and 0 if it would raise it.
"""

import sys

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from metalearn.bilevel import descent

RATE = 0.5


def drawn(count: int, wrong: float) -> tuple[Tensor, Tensor]:
    """Points on either side of a curve. Of those above it, a part is labelled wrongly."""
    x = torch.rand(count, 2) * 4 - 2
    y = (x[:, 1] > torch.sin(2 * x[:, 0])).long()
    return x, torch.where((y == 1) & (torch.rand(count) < wrong), 0, y)


def trained(steps: int, reweighted: bool) -> float:
    """The accuracy on new points with right labels."""
    torch.manual_seed(0)
    (x, y), (clean_x, clean_y), (test_x, test_y) = drawn(1000, 0.45), drawn(20, 0.0), drawn(5000, 0.0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    w = {name: value.detach() for name, value in net.named_parameters()}
    for _ in range(steps):
        batch = torch.randint(len(x), (100,))

        def loss(w: dict[str, Tensor], weights: Tensor, step: int, batch: Tensor = batch) -> Tensor:
            return (weights * cross_entropy(functional_call(net, w, (x[batch],)), y[batch], reduction="none")).sum()

        weights = torch.full((100,), 0.01)
        if reweighted:
            zero = torch.zeros(100, requires_grad=True)
            ahead = descent(loss, w, zero, steps=1, rate=RATE)
            (slope,) = torch.autograd.grad(cross_entropy(functional_call(net, ahead, (clean_x,)), clean_y), zero)
            weights = (-slope).clamp(min=0)
            weights = weights / weights.sum().clamp(min=1e-8)
        w = descent(loss, w, weights, steps=1, rate=RATE)
    right = functional_call(net, w, (test_x,)).argmax(dim=1) == test_y
    return int(right.sum()) / len(right)


if __name__ == "__main__":
    plain, reweighted = (trained(int((sys.argv[1:] or ["500"])[0]), learned) for learned in (False, True))
    print(f"accuracy: {plain:.3f} with equal weights, {reweighted:.3f} with learned ones")
