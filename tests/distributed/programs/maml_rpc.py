"""A program written for torchopt.distributed: second-order MAML on sine waves, 32 tasks, any number of processes.

Writes rank zero's gradients to the file that is its argument; the tests compare them with those of one process.
"""

import sys

import torch
import torchopt.distributed as todist
from torch import nn
from torchopt import module_clone


def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def build_tasks(count):
    generator = torch.Generator().manual_seed(5)
    amplitude, phase = torch.rand(2, count, 1, 1, generator=generator, dtype=torch.float64)
    x = 10 * torch.rand(count, 10, 1, generator=generator, dtype=torch.float64) - 5
    return [(x[i], (amplitude[i] + 0.1) * torch.sin(x[i] + phase[i])) for i in range(count)]


def inner_loop(reference, number, x, y):
    """Adapts by two differentiable steps; returns the outer loss and how far it is from where it began."""
    net = reference.to_here()
    first, second = net[0], net[2]
    (w1, b1), (w2, b2), (w3, b3) = [(layer.weight, layer.bias) for layer in (first, second, net[4])]

    def forward(p, inputs):
        h = torch.tanh(inputs @ p[0].T + p[1])
        h = torch.tanh(h @ p[2].T + p[3])
        return h @ p[4].T + p[5]

    theta = [w1, b1, w2, b2, w3, b3]
    start = loss = (forward(theta, x[:5]) - y[:5]).square().mean()
    for _ in range(2):
        grads = torch.autograd.grad(loss, theta, create_graph=True)
        theta = [p - 0.05 * g for p, g in zip(theta, grads, strict=True)]
        loss = (forward(theta, x[:5]) - y[:5]).square().mean()
    outer = (forward(theta, x[5:]) - y[5:]).square().mean()
    return outer, (start - loss).detach(), number


def mean_of_tuples(results):
    outers, gains, numbers = zip(*results, strict=True)
    assert sorted(numbers) == list(range(len(numbers)))
    return torch.stack(outers).mean(), torch.stack(gains).mean()


def deal_out(reference, tasks):
    """One task a call, the workers in turn; there are no keyword arguments."""
    size = todist.get_world_size()
    return [(i % size, (reference, i, *task), None) for i, task in enumerate(tasks)]


@todist.parallelize(partitioner=deal_out, reducer=mean_of_tuples)
def parallel_inner_loop(reference, number, x, y):
    return inner_loop(reference, number, x, y)


@todist.rank_zero_only
def train(path, count):
    net, tasks = build_model(), build_tasks(count)
    with todist.autograd.context() as context_id:
        reference = todist.rpc.RRef(module_clone(net, by="copy"))
        loss, gain = parallel_inner_loop(reference, tasks)
        todist.autograd.backward(context_id, loss)
    torch.save({"loss": loss.detach(), "gain": gain, "grads": [p.grad for p in net.parameters()]}, path)
    print(f"loss {loss.item():.6f} on {todist.get_world_size()} processes")


def worker_init_fn():
    torch.manual_seed(todist.get_rank())


@todist.auto_init_rpc(worker_init_fn)
def main():
    todist.barrier()
    train(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
