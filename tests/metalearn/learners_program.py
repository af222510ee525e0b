"""A program for every rank of a world: each algorithm, by remote calls, must give the same bits as in one process.
Its argument N leaves all but every Nth one out.

So must a network of one's own that draws random numbers and has a fixed parameter.
"""

import sys

import torch

from distributed import partition, reduce
from distributed.info import get_world_size
from distributed.reduce import tree_sum
from distributed.strategies.common.work import Work, WorkPlan
from distributed.strategies.local import local
from distributed.strategies.rpc import rpc
from distributed.strategies.rpc_autograd import rpc_autograd
from metalearn.algorithms.common.wrappers import with_fixed
from metalearn.models.common.adapter import model_of
from metalearn.nn.surroundings import of_reals
from metalearn.training.chunks import chunk_functions
from metalearn.types import FIXED, Algorithm
from tests.metalearn.learners import FLOAT64, LEARNERS, SIZE, Tasks, network, start_of
from tests.metalearn.own_network import Net

OWN = {f"{name}, own network": LEARNERS[name] for name in ("maml", "checkpointed", "supervised")}


def own_learner(name: str) -> Algorithm:
    model = model_of(
        lambda: Net(p=0.4, first="fixed"),
        name="Net",
        inputs=of_reals((1, SIZE, SIZE)),
        transductive=True,
        advice="",
        dropout=True,
    )
    return with_fixed(OWN[name](model), model)


def main(every: int) -> None:
    cpu = torch.device("cpu")
    rows = {name: (make(network()), rpc) for name, make in [*LEARNERS.items()][::every]}
    for name in OWN:
        rows |= {f"{name}, {how.__name__}": (own_learner(name), how) for how in (rpc, rpc_autograd)}
    for name, (learner, how) in rows.items():
        plain = learner.trained_on == "samples"
        functions = chunk_functions(learner, Tasks(learner), cpu, FLOAT64, tree_sum)
        work = Work(**functions._asdict(), device=cpu, plain=plain)
        plan = WorkPlan(work, get_world_size(), partition.batch_partitioner, reduce.mean())
        strategy = how(plan=plan, timeout=30)()
        if strategy.drives:
            alone = local(plan=plan._replace(workers=1), timeout=30)()
            params, chunks = start_of(learner), list(torch.arange(8).split(3))
            for ours, theirs in zip(strategy.map(params, chunks, 3), alone.map(params, chunks, 3), strict=True):
                assert ours.count == theirs.count and ours.grads.keys() >= theirs.grads.keys()
                assert all(torch.equal(ours.grads[key], theirs.grads[key]) for key in theirs.grads)
                assert theirs.grads.keys() == {key for key in params if not key.startswith(FIXED)}
                assert all(torch.equal(ours.metrics[key], theirs.metrics[key]) for key in ("loss", "accuracy"))
            ours, theirs = strategy.evaluate(params, "test", chunks), alone.evaluate(params, "test", chunks)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
            print(name, "ok")
        strategy.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
