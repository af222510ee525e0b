"""Hyperparameters by gradient: one weight decay for each input, Lorraine et al. 2020 (arXiv 1911.02590), section 5:
python examples/learned_decay.py [STEPS]

Of 60 inputs, five matter. 60 samples are too few to see which, but their weight decays are learned on 60 others: by the
implicit gradient of the validation error at the minimum of the training error. One decay for all inputs, the best of
13 on the same samples, stands beside.
"""

import sys

import torch
from torch import Tensor

from metalearn.bilevel import implicit

INPUTS, USEFUL = 60, 5


def drawn(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, INPUTS)
    return x, x[:, :USEFUL].sum(dim=1) + torch.randn(count)


def minimum(x: Tensor, y: Tensor, log_decay: Tensor) -> Tensor:
    """The weights that ridge regression has in closed form: any other way to them would do."""
    w: Tensor = torch.linalg.solve(x.T @ x / len(x) + torch.diag(log_decay.exp().expand(INPUTS)), x.T @ y / len(x))
    return w


def error(w: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    return (data[0] @ w - data[1]).square().mean()


def main(steps: int) -> None:
    torch.manual_seed(0)
    train, validation, test = drawn(60), drawn(60), drawn(10_000)

    def inner(w: Tensor, log_decay: Tensor, step: int) -> Tensor:
        return error(w, train) / 2 + (log_decay.exp() * w.square()).sum() / 2

    log_decay = torch.zeros(INPUTS)
    optimizer = torch.optim.Adam([log_decay], lr=0.1)
    for _ in range(steps):
        w = minimum(*train, log_decay)
        log_decay.grad = implicit(inner, lambda w, log_decay: error(w, validation), w, log_decay, steps=INPUTS)
        optimizer.step()
    learned = minimum(*train, log_decay)
    grid = [minimum(*train, torch.tensor(float(log))) for log in range(-6, 7)]
    shared = min(grid, key=lambda w: float(error(w, validation)))
    print(
        f"squared error on new samples (1 is noise): {error(shared, test):.3f} with one decay, the best of {len(grid)};"
    )
    print(f"{error(learned, test):.3f} with {INPUTS} learned ones", end=", ")
    print(f"{log_decay[:USEFUL].exp().mean():.2f} on average for the useful inputs", end=", ")
    print(f"{log_decay[USEFUL:].exp().mean():.2f} for the others")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["200"])[0]))
