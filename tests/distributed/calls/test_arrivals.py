"""Results one by one, and items of lost workers that others compute."""

import pytest
import torch
from torch import nn

import distributed as todist
from distributed.calls import session, worker
from distributed.traffic import traffic
from tests.distributed import call_functions as functions
from tests.distributed import remote_functions
from tests.distributed.worlds import WORLD, comes_true

pytestmark = pytest.mark.usefixtures("workers")

EACH = todist.dim_partitioner(0, exclusive=True, keepdim=False)
FREE = todist.dynamic_partitioner(keepdim=False)


def nothing_is_left() -> bool:
    """Whether this process holds no queue, no stream and no slot of a call."""
    slots = session.current().slots.values()
    return not worker._queues and not worker.receivers and all(slot._free == slot.size for slot in slots)


# as_completed


@pytest.mark.parametrize("partitioner", [EACH, FREE], ids=["dealt", "free"])
def test_results_come_as_soon_as_they_are_there(partitioner: todist.PartitionFunction) -> None:
    everywhere = [(rank, (f"{partitioner}",), None) for rank in range(WORLD)]
    arrived = {}
    for number, is_told in todist.as_completed(
        functions.waits_for_word, args=(torch.arange(9), f"{partitioner}"), partitioner=partitioner
    ):
        arrived[number] = is_told
        if number == 0:  # all other items wait for this, also on the same worker
            todist.remote_sync_call(functions.give_word, partitioner=lambda: everywhere)
    assert arrived == dict.fromkeys(range(9), True)


def test_what_all_items_share_still_travels_once_a_worker() -> None:
    before = traffic()
    weights = todist.whole(torch.ones(50_000))
    partitioner = todist.dim_partitioner(0, exclusive=True, workers=[1])
    arrived = todist.as_completed(
        remote_functions.with_weights, args=(weights, torch.arange(20)), partitioner=partitioner
    )
    assert [(number, result.item()) for number, result in arrived] == [(i, 50_000 + i) for i in range(20)]
    spent = traffic().since(before)
    assert 200_000 <= spent.sent < 210_000 and 0 < spent.received[1] < 10_000


@pytest.mark.parametrize("partitioner", [EACH, FREE], ids=["dealt", "free"])
def test_leaving_the_loop_early_gives_the_rest_up(partitioner: todist.PartitionFunction) -> None:
    name = f"left early {partitioner}"
    for _ in range(session.MAX_WINDOW + 1):
        for _ in todist.as_completed(
            functions.slow_and_counted, args=(torch.arange(300), name), partitioner=partitioner
        ):
            break
    assert comes_true(nothing_is_left)
    each = [(rank, (name,), None) for rank in range(WORLD)]
    computed = todist.remote_sync_call(functions.counted, partitioner=lambda: each)
    assert 0 < sum(computed) < 1000  # of 2,700
    assert todist.remote_sync_call(functions.counted, partitioner=lambda: each) == computed


def test_the_first_failure_is_raised_at_once_and_named() -> None:
    arrived = []
    with pytest.raises(LookupError, match="no three today") as caught:
        for number, _ in todist.as_completed(
            functions.fails_at_three, args=(torch.arange(90),), partitioner=todist.dim_partitioner(0, exclusive=True)
        ):
            arrived.append(number)
    assert caught.value.__notes__[0].startswith("raised on worker0 by item 3") and 0 in arrived
    with pytest.raises(TypeError, match="the result of item 0 cannot be sent: cannot pickle"):
        list(todist.as_completed(remote_functions.lock, partitioner=1))
    with pytest.raises(TimeoutError, match=r"worker1 did not answer within 0\.3 s"):
        list(todist.as_completed(remote_functions.loop, args=(3.0,), partitioner=1, timeout=0.3))
    assert comes_true(nothing_is_left)


def test_streamed_results_keep_their_graphs_in_a_context() -> None:
    net, x = nn.Linear(3, 2), torch.randn(8, 3)
    for partitioner in (EACH, FREE):
        with todist.autograd.context() as ctx:
            losses = dict(todist.as_completed(functions.scaled, args=(net, x), partitioner=partitioner))
            unused = dict(todist.as_completed(functions.scaled, args=(net, x), partitioner=partitioner))
            assert losses.keys() == unused.keys()
            grads = todist.autograd.grad(ctx, torch.stack([losses[i] for i in range(8)]).sum(), [*net.parameters()])
        expected = torch.autograd.grad(net(x).square().sum(), [*net.parameters()])
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    with todist.autograd.context() as ctx:
        loss = next(todist.as_completed(functions.scaled, args=(net, x), partitioner=EACH))[1]
        with pytest.raises(RuntimeError, match="was given up before its answer came"):
            todist.autograd.backward(ctx, loss)
