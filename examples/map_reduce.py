"""Map-reduce by remote calls, without the trainer: π by counting random points in a circle, on all workers.

torchrun --nproc_per_node=2 examples/map_reduce.py [PARTS]
"""

import sys

import torch
from torch import Generator, Tensor

import distributed as todist

POINTS = 100_000


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),  # a call for each seed, dealt out in turn
    reducer=todist.sum_reducer,
)
def points_inside(seed: Tensor) -> Tensor:
    """Of POINTS random points of the unit square, how many lie in the quarter of the unit circle."""
    points = torch.rand(POINTS, 2, generator=Generator().manual_seed(int(seed)))
    return (points.square().sum(dim=1) < 1).sum()


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(parts: int = 40) -> None:
    """Rank zero asks all workers, itself included; the others only compute."""
    inside = points_inside(torch.arange(parts))
    print(f"{todist.get_world_size()} workers: π ≈ {4 * inside.item() / (parts * POINTS):.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
