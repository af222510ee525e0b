"""The papers' formulas, task by task, in plain torch, for comparison with the algorithms. Only the types are those of
the program.

`params` are the meta-parameters, which require gradients. A task is (support x, support y, query x, query y). Each
function gives the meta-loss of a task, or the value that replaces its gradient.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.types import Episode, Params

Task = tuple[Tensor, Tensor, Tensor, Tensor]
HEAD = ("head.weight", "head.bias")


def tasks_of(episode: Episode) -> Iterator[Task]:
    (support, query) = episode
    return zip(support.x, support.y, query.x, query.y, strict=True)


def features(params: Params, x: Tensor, measured: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Conv4 with stride 2 up to its head, from torch's convolution and the definition of batch norm."""
    for block in range(1, 5):
        x, measured = (F.conv2d(value, params[f"conv{block}.weight"], stride=2, padding=1) for value in (x, measured))
        mean = measured.mean(dim=(0, 2, 3), keepdim=True)
        variance = ((measured - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
        scale, shift = (params[f"norm{block}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
        x, measured = (activation((v - mean) / (variance + 1e-5).sqrt() * scale + shift) for v in (x, measured))
    return x.mean(dim=(2, 3))


def conv4(params: Params, x: Tensor, measured: Tensor, activation: Callable[[Tensor], Tensor] = F.softplus) -> Tensor:
    """Logits; normalised by the statistics of `measured`."""
    return F.linear(features(params, x, measured, activation), params["head.weight"], params["head.bias"])


def adapted_losses(
    params: Params,
    task: Task,
    *,
    steps: int,
    rate: Callable[[str, int], Tensor | float],
    names: Sequence[str],
    order: int = 2,
    at_step: Callable[[int], Params] = lambda step: {},
    transductive: bool = True,
) -> list[Tensor]:
    """The query loss after each inner step of gradient descent on the parameters `names`."""
    (sx, sy, qx, qy) = task
    weights = dict(params)
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(conv4(weights | at_step(step), sx, sx), sy)
        grads = torch.autograd.grad(loss, [weights[name] for name in names], create_graph=order == 2)
        for name, grad in zip(names, grads, strict=True):
            weights[name] = weights[name] - rate(name, step) * grad
        losses.append(F.cross_entropy(conv4(weights | at_step(step), qx, qx if transductive else sx), qy))
    return losses


def gradient(loss: Callable[[Params, Task], Tensor]) -> Callable[[Params, Episode], Params]:
    """The gradient of the sum over the tasks."""

    def grads(params: Params, episode: Episode) -> Params:
        theta = {name: value.clone().requires_grad_() for name, value in params.items()}
        total = torch.stack([loss(theta, task) for task in tasks_of(episode)]).sum()
        values = torch.autograd.grad(total, list(theta.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(theta, values, strict=True))

    return grads


def maml(*, lr: float, steps: int, order: int = 2, adapts: str = "all") -> Callable[[Params, Task], Tensor]:
    """The loss of MAML, or of ANIL (`adapts="head"`) or BOIL (`adapts="body"`)."""

    def loss(params: Params, task: Task) -> Tensor:
        chosen = [name for name in params if adapts == "all" or (name in HEAD) == (adapts == "head")]
        return adapted_losses(params, task, steps=steps, rate=lambda name, step: lr, names=chosen, order=order)[-1]

    return loss


def meta_sgd(*, steps: int) -> Callable[[Params, Task], Tensor]:
    def loss(params: Params, task: Task) -> Tensor:
        names = [name for name in params if not name.startswith("inner_lr.")]
        rates = {name: params[f"inner_lr.{name}"] for name in names}
        weights = {name: params[name] for name in names}
        return adapted_losses(weights, task, steps=steps, rate=lambda name, step: rates[name], names=names)[-1]

    return loss


def maml_pp(*, steps: int, weights: Sequence[float]) -> Callable[[Params, Task], Tensor]:
    """With rates [steps] for every tensor, norms [steps, channels], and the weighted losses after all steps."""

    def loss(params: Params, task: Task) -> Tensor:
        norms = [name for name in params if name.startswith("norm")]
        names = [name for name in params if not name.startswith(("inner_lr.", "norm"))]
        losses = adapted_losses(
            {name: params[name] for name in names},
            task,
            steps=steps,
            rate=lambda name, step: params[f"inner_lr.{name}"][step],
            names=names,
            at_step=lambda step: {name: params[name][step] for name in norms},
        )
        return torch.stack([weight * value for weight, value in zip(weights, losses, strict=True)]).sum()

    return loss


def cavia(*, lr: float, steps: int, norm: int) -> Callable[[Params, Task], Tensor]:
    """With FiLM layers behind norm `norm`, and φ by gradient descent from 0."""

    def logits(params: Params, phi: Tensor, x: Tensor) -> Tensor:
        for block in range(1, 5):
            x = F.conv2d(x, params[f"conv{block}.weight"], stride=2, padding=1)
            x = (x - x.mean(dim=(0, 2, 3), keepdim=True)) / (
                x.var(dim=(0, 2, 3), keepdim=True, correction=0) + 1e-5
            ).sqrt()
            scale, shift = (params[f"norm{block}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
            x = x * scale + shift
            if block == norm:
                gamma, beta = 1 + params["context.scale"] @ phi, params["context.shift"] @ phi
                x = gamma.view(1, -1, 1, 1) * x + beta.view(1, -1, 1, 1)
            x = F.softplus(x)
        return F.linear(x.mean(dim=(2, 3)), params["head.weight"], params["head.bias"])

    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        phi = sx.new_zeros(params["context.scale"].shape[1], requires_grad=True)
        for _ in range(steps):
            of_support = F.cross_entropy(logits(params, phi, sx), sy)
            phi = phi - lr * torch.autograd.grad(of_support, phi, create_graph=True)[0]
        return F.cross_entropy(logits(params, phi, qx), qy)

    return loss


def meta_curvature(*, lr: float, steps: int) -> Callable[[Params, Task], Tensor]:
    """With the Kronecker product of a weight's matrices written out: (M_o ⊗ M_i ⊗ M_f) vec G."""

    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        weights = {name: value for name, value in params.items() if not name.startswith("curvature.")}
        matrices = {}
        for name, value in weights.items():
            modes = [params.get(f"curvature.{name}.{mode}") for mode in ("outputs", "inputs", "pixels")]
            if value.dim() == 1:
                matrices[name] = torch.diag(params[f"curvature.{name}.entries"])
            else:
                matrices[name] = functools.reduce(torch.kron, [mode for mode in modes if mode is not None])
        for _ in range(steps):
            of_support = F.cross_entropy(conv4(weights, sx, sx), sy)
            grads = torch.autograd.grad(of_support, list(weights.values()), create_graph=True)
            weights = {
                name: value - lr * (matrices[name] @ grad.flatten()).view(value.shape)
                for (name, value), grad in zip(weights.items(), grads, strict=True)
            }
        return F.cross_entropy(conv4(weights, qx, qx), qy)

    return loss


def protonet(params: Params, task: Task) -> Tensor:
    (sx, sy, qx, qy) = task
    support, queries = features(params, sx, sx, F.softplus), features(params, qx, qx, F.softplus)
    centres = [support[sy == label].mean(dim=0) for label in range(int(sy.max()) + 1)]
    logits = [torch.stack([-((query - centre) ** 2).sum() for centre in centres]) for query in queries]
    return torch.stack([torch.logsumexp(row, 0) - row[label] for row, label in zip(logits, qy, strict=True)]).mean()


def brownian_covariance(picture: Tensor, scale: Tensor, channels: int) -> Tensor:
    """The upper triangle of one picture's matrix, which is centred by a product of matrices."""
    maps = picture.view(channels, -1)
    distances = torch.stack([torch.stack([((a - b) ** 2).sum() for b in maps]) for a in maps])
    centring = torch.eye(channels, dtype=maps.dtype) - 1 / channels
    matrix = centring @ (scale * distances + 1e-5).sqrt() @ centring
    return torch.cat([matrix[row, row:] for row in range(channels)])


def deepbdc(*, channels: int) -> Callable[[Params, Task], Tensor]:
    """Of more shots than one: by distances."""

    def covariances(params: Params, x: Tensor) -> Tensor:
        scale = params["bdc.log_scale"].exp()
        return torch.stack([brownian_covariance(one, scale, channels) for one in features(params, x, x, F.softplus)])

    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        support, queries = covariances(params, sx), covariances(params, qx)
        centres = torch.stack([support[sy == label].mean(dim=0) for label in range(int(sy.max()) + 1)])
        return F.cross_entropy(-(torch.cdist(queries, centres) ** 2), qy)

    return loss


def feat(*, temperature: float) -> Callable[[Params, Task], Tensor]:
    """With torch's own multi-head attention, of one head."""

    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        support, queries = features(params, sx, sx, F.softplus), features(params, qx, qx, F.softplus)
        centres = torch.stack([support[sy == label].mean(dim=0) for label in range(int(sy.max()) + 1)])
        mixed, _ = F.multi_head_attention_forward(
            *[centres] * 3, centres.shape[1], 1, params["set.in"], None, None, None, False, 0.0,
            params["set.out.weight"], params["set.out.bias"],
        )  # fmt: skip
        norm = params["set.norm.weight"], params["set.norm.bias"]
        adapted = F.layer_norm(centres + mixed, centres.shape[1:], *norm)
        return F.cross_entropy(-(torch.cdist(queries, adapted) ** 2) / temperature, qy)

    return loss


def protomaml(*, lr: float, steps: int) -> Callable[[Params, Task], Tensor]:
    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, _, _) = task
        support = features(params, sx, sx, F.softplus)
        centres = torch.stack([support[sy == label].mean(dim=0) for label in range(int(sy.max()) + 1)])
        # Clones: an inner gradient takes the head as a parameter, and no inner step goes through its start.
        weights = {name: value.clone() for name, value in params.items()}
        weights |= {"head.weight": 2 * centres, "head.bias": -(centres**2).sum(dim=1)}
        return adapted_losses(weights, task, steps=steps, rate=lambda name, step: lr, names=list(weights))[-1]

    return loss


def matching(*, scale: float) -> Callable[[Params, Task], Tensor]:
    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        support, queries = features(params, sx, sx, F.softplus), features(params, qx, qx, F.softplus)
        losses = []
        for query, label in zip(queries, qy, strict=True):
            weights = [torch.exp(scale * F.cosine_similarity(query, one, dim=0)) for one in support]
            own = [weight for weight, y in zip(weights, sy, strict=True) if y == label]
            losses.append(-torch.log(sum(own) / sum(weights)))
        return torch.stack(losses).mean()

    return loss


def r2d2(params: Params, task: Task) -> Tensor:
    """By the normal equations (Xᵀ X + λ I) W = Xᵀ Y, not by Woodbury's form."""
    (sx, sy, qx, qy) = task

    def with_ones(x: Tensor) -> Tensor:
        values = features(params, x, x, F.softplus)
        return torch.cat([values, values.new_ones(len(values), 1)], dim=1)

    x, y = with_ones(sx), F.one_hot(sy).to(sx.dtype)
    strength = params["ridge.log_strength"].exp()
    weights = torch.linalg.inv(x.T @ x + strength * torch.eye(x.shape[1], dtype=x.dtype)) @ x.T @ y
    return F.cross_entropy(params["ridge.scale"] * (with_ones(qx) @ weights), qy)


def in_context(*, heads: int, layers: int) -> Callable[[Params, Task], Tensor]:
    """One query after the other, each alone with the support set; torch's own attention, under a mask."""

    def block(params: Params, name: str, h: Tensor, mask: Tensor) -> Tensor:
        def norm(number: int, h: Tensor) -> Tensor:
            return F.layer_norm(
                h, h.shape[1:], params[f"{name}norm{number}.weight"], params[f"{name}norm{number}.bias"]
            )

        q, k, v = (norm(1, h) @ weight.T for weight in params[f"{name}attention.in"].chunk(3))
        size = h.shape[1] // heads
        by_head = [
            F.scaled_dot_product_attention(*(part[None, None, :, first : first + size] for part in (q, k, v)), mask)
            for first in range(0, h.shape[1], size)
        ]
        h = h + torch.cat(by_head, dim=3)[0, 0] @ params[f"{name}attention.out"].T
        inner = F.gelu(norm(2, h) @ params[f"{name}mlp.in.weight"].T + params[f"{name}mlp.in.bias"])
        return h + inner @ params[f"{name}mlp.out.weight"].T + params[f"{name}mlp.out.bias"]

    def loss(params: Params, task: Task) -> Tensor:
        (sx, sy, qx, qy) = task
        known, queries = features(params, sx, sx, F.softplus), features(params, qx, qx, F.softplus)
        ways = int(sy.max()) + 1
        labels = torch.cat([F.one_hot(sy, ways), torch.zeros(1, ways, dtype=sy.dtype)])
        labels = torch.cat([labels, torch.tensor([[0]] * len(sy) + [[1]])], dim=1).to(sx.dtype)
        mask = torch.ones(len(sy) + 1, len(sy) + 1, dtype=torch.bool)
        mask[:-1, -1] = False
        losses = []
        for query, label in zip(queries, qy, strict=True):
            h = torch.cat([torch.cat([known, query[None]]), labels], dim=1)
            h = F.linear(h, params["set.token.weight"], params["set.token.bias"])
            for number in range(layers):
                h = block(params, f"set.block{number}.", h, mask)
            h = F.layer_norm(h[-1:], h.shape[1:], params["set.norm.weight"], params["set.norm.bias"])
            logits = F.linear(h, params["set.head.weight"], params["set.head.bias"])
            losses.append(F.cross_entropy(logits, label[None]))
        return torch.stack(losses).mean()

    return loss


def reptile(*, lr: float, steps: int, size: int) -> Callable[[Params, Episode], Params]:
    """Σ (θ − φ), φ by torch's own SGD on mini-batches: the first drawing of each class, then the second, …"""

    def grads(params: Params, episode: Episode) -> Params:
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        for sx, sy, qx, qy in tasks_of(episode):
            by_class = [
                [image for x, y in ((sx, sy), (qx, qy)) for image in x[y == label]]
                for label in range(int(sy.max()) + 1)
            ]
            x = torch.stack([image for turn in zip(*by_class, strict=True) for image in turn])
            y = torch.arange(len(by_class)).repeat(len(x) // len(by_class))
            phi = {name: value.clone().requires_grad_() for name, value in params.items()}
            optimizer = torch.optim.SGD(phi.values(), lr=lr)
            parts = [slice(first, first + size) for first in range(0, len(x), size)]
            for step in range(steps):
                part = parts[step % len(parts)]
                optimizer.zero_grad()
                F.cross_entropy(conv4(phi, x[part], x[part]), y[part]).backward()
                optimizer.step()
            for name in total:
                total[name] += params[name] - phi[name].detach()
        return total

    return grads


def conv4_with(params: Params, adam: torch.optim.Adam, x: Tensor, y: Tensor, steps: int) -> Iterator[None]:
    """Yields after each step of torch's Adam, whose parameters these are."""
    for _ in range(steps):
        adam.zero_grad()
        F.cross_entropy(conv4(params, x, x), y).backward()
        adam.step()
        yield


def reptile_with_one_adam(
    params: Params, episode: Episode, *, steps: int, rate: float, adam: Callable[[list[Tensor]], torch.optim.Adam]
) -> tuple[Params, Params, torch.optim.Adam]:
    """θ ← θ + rate (φ − θ) for one task after the other, with one Adam of torch's for all tasks, as in the authors'
    code: θ, and φ with its Adam, after the last task."""
    theta = {name: value.clone() for name, value in params.items()}
    phi = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = adam(list(phi.values()))
    for sx, sy, qx, qy in tasks_of(episode):
        with torch.no_grad():
            for name, value in phi.items():
                value.copy_(theta[name])
        for _ in conv4_with(phi, optimizer, torch.cat([sx, qx]), torch.cat([sy, qy]), steps):
            pass
        theta = {name: value + rate * (phi[name].detach() - value) for name, value in theta.items()}
    return theta, phi, optimizer


def imaml(
    *, lr: float, steps: int, strength: float, damping: float = 0.0, cg_strength: float | None = None,
    spring: str = "every_step",
) -> Callable[[Params, Episode], Params]:  # fmt: skip
    """Σ ((1 + c) I + H/μ)⁻¹ ∇L_query(φ) with the whole Hessian. The `steps` steps are on the loss and the spring; with
    `after` they are on the loss, and one more is on the spring."""

    def grads(params: Params, episode: Episode) -> Params:
        sizes = [value.numel() for value in params.values()]

        def unflat(flat: Tensor) -> Params:
            parts = zip(params.items(), flat.split(sizes), strict=True)
            return {name: part.view(value.shape) for (name, value), part in parts}

        theta = torch.cat([value.flatten() for value in params.values()])
        total = torch.zeros_like(theta)
        for sx, sy, qx, qy in tasks_of(episode):

            def support_loss(flat: Tensor, sx: Tensor = sx, sy: Tensor = sy) -> Tensor:
                return F.cross_entropy(conv4(unflat(flat), sx, sx), sy)

            phi = theta.clone()
            both = [(1.0, strength)] * steps if spring == "every_step" else [(1.0, 0.0)] * steps + [(0.0, strength)]
            for of_loss, of_spring in both:
                phi.requires_grad_()
                loss = of_loss * support_loss(phi) + of_spring / 2 * ((phi - theta) ** 2).sum()
                phi = (phi - lr * torch.autograd.grad(loss, phi)[0]).detach()
            phi.requires_grad_()
            query_gradient = torch.autograd.grad(F.cross_entropy(conv4(unflat(phi), qx, qx), qy), phi)[0]
            hessian = torch.autograd.functional.hessian(support_loss, phi.detach(), vectorize=True)
            matrix = (1 + damping) * torch.eye(len(theta), dtype=theta.dtype) + hessian / (cg_strength or strength)
            total += torch.linalg.solve(matrix, query_gradient)
        return unflat(total)

    return grads


def softmax_regression(x: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray, lr: float, steps: int):
    """Weights and bias after gradient descent on the mean cross-entropy, by the textbook gradient."""
    for _ in range(steps):
        scores = np.exp(x @ weight.T + bias)
        wrong = scores / scores.sum(axis=1, keepdims=True) - np.eye(len(bias))[y]
        weight, bias = weight - lr * wrong.T @ x / len(x), bias - lr * wrong.mean(axis=0)
    return weight, bias
