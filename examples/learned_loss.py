"""Learns a loss, as ML³, Bechtle et al. 2021 (arXiv 1906.05374): python examples/learned_loss.py [STEPS]

A network sees an input, a prediction and its target, and says what counts as their loss. It is trained through five
steps of descent on it, so that after them the squared error is small. On new tasks, these five steps then reach a
smaller squared error than on the squared error itself, whose rate is the best of six on other tasks.
"""

import sys

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import mse_loss, softplus

from metalearn.bilevel import Tree, descent

RATE, STEPS = 0.1, 5
torch.manual_seed(0)
learner = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
critic = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def drawn(tasks: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sine waves [t, 20, 1], and a start for the learner of each."""
    x = torch.rand(tasks, 20, 1) * 6 - 3
    y = (0.5 + torch.rand(tasks, 1, 1)) * torch.sin(x + torch.rand(tasks, 1, 1) * 3.14)
    start = {name: torch.randn(tasks, *value.shape) * 0.5 for name, value in learner.named_parameters()}
    return x, y, start


def errors(tasks: tuple[Tensor, Tensor, Tree], learned: Tree | None, steps: int, rate: float) -> Tensor:
    """The squared error [t] after descent on the learned loss, or on the squared error itself."""

    def error(x: Tensor, y: Tensor, start: Tree) -> Tensor:
        def loss(w: Tree, learned: Tree | None, step: int) -> Tensor:
            answers = functional_call(learner, w, (x,))
            if learned is None:
                return mse_loss(answers, y)
            return softplus(functional_call(critic, learned, (torch.cat([x, answers, y], dim=1),))).mean()

        return mse_loss(functional_call(learner, descent(loss, start, learned, steps=steps, rate=rate), (x,)), y)

    return vmap(error)(*tasks)


def main(meta_steps: int) -> None:
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.002)
    for _ in range(meta_steps):
        optimizer.zero_grad()
        errors(drawn(16), dict(critic.named_parameters()), STEPS, RATE).mean().backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        optimizer.step()
    learned = {name: value.detach() for name, value in critic.named_parameters()}
    others, new = drawn(200), drawn(200)
    for steps in (1, STEPS, 4 * STEPS):
        error_at = {rate: errors(others, None, steps, rate).mean() for rate in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)}
        best = min(error_at, key=lambda rate: float(error_at[rate]))
        plain, meta = errors(new, None, steps, best).mean(), errors(new, learned, steps, RATE).mean()
        print(f"squared error after {steps} steps: {plain:.3f} on itself (rate {best}), {meta:.3f} on the learned loss")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["1000"])[0]))
