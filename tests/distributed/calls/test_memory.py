"""Memory does not multiply over the RPC threads, and graphs that nobody can use do not stay."""

import ast
import sys

import pytest
import torch

import distributed as todist
from tests.distributed import remote_functions as functions
from tests.distributed.worlds import WORLD, run_ranks
from tests.runs import ROOT, slow


@slow
@pytest.mark.usefixtures("workers")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="arenas are glibc's")
def test_all_rpc_threads_share_an_arena() -> None:
    for worker in range(1, WORLD):
        for call in [todist.remote_async_call(functions.sleep, args=(0.1,), partitioner=worker) for _ in range(6)]:
            call.wait()
        assert todist.remote_sync_call(functions.arenas, partitioner=worker) == [1]


@pytest.mark.usefixtures("workers")
def test_outside_a_context_an_items_graph_ends_with_the_item() -> None:
    each = todist.dim_partitioner(0, exclusive=True)
    results = todist.remote_sync_call(functions.graphs_so_far, args=(torch.ones(4 * WORLD),), partitioner=each)
    assert [count for _, _, count in results] == [1] * 4 * WORLD
    assert all(not y.requires_grad and not more["twice"][0].requires_grad for y, more, _ in results)


@pytest.mark.slow
def test_many_tasks_of_one_call_stay_small() -> None:
    """A task's graph needs about 60 MB. In a context the 16 of a worker stay; outside, one at a time."""
    program = str(ROOT / "tests/distributed/programs/maml_conv.py")
    ranks = run_ranks(["-m", "distributed.as_torchopt", program, "10"], 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    peaks = ast.literal_eval(ranks[0][1].partition("peaks ")[2])
    assert max(peaks) < 2000, peaks
