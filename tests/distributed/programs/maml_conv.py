"""A program for torchopt.distributed with graphs as large as in practice: MAML of convolutions, one task an item.

Evaluates `rounds` times outside a context, takes one step inside, and prints each process's peak memory in MB.
"""

import resource
import sys

import torch
import torch.nn.functional as F
import torchopt.distributed as todist
from torch import nn
from torchopt import module_clone

TASKS, IMAGES = 32, 20


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(32 * 4, 5),
    )  # fmt: skip


def forward(params, x):
    w1, b1, w2, b2, w3, b3 = params
    h = F.max_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w2, b2)), 4)
    return F.linear(h.flatten(1), w3, b3)


@todist.parallelize(partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False), reducer=todist.mean_reducer)
def inner_loop(reference, x, y):
    params = [p for layer in reference.to_here() if hasattr(layer, "weight") for p in (layer.weight, layer.bias)]
    for _ in range(3):
        grads = torch.autograd.grad(F.cross_entropy(forward(params, x), y), params, create_graph=True)
        params = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    return F.cross_entropy(forward(params, x), y)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@todist.rank_zero_only
def train(rounds):
    net = build_model()
    x, y = torch.rand(TASKS, IMAGES, 1, 28, 28), torch.arange(IMAGES).remainder(5).expand(TASKS, IMAGES)
    reference = todist.rpc.RRef(net)
    for _ in range(rounds):
        inner_loop(reference, x, y)
    with todist.autograd.context() as context_id:
        reference = todist.rpc.RRef(module_clone(net, by="copy"))
        todist.autograd.backward(context_id, inner_loop(reference, x, y))
    assert all(p.grad.abs().max() > 0 for p in net.parameters())
    print("peaks", [todist.remote_sync_call(peak, partitioner=rank)[0] for rank in range(todist.get_world_size())])


@todist.auto_init_rpc()
def main():
    train(int(sys.argv[1]))


if __name__ == "__main__":
    main()
