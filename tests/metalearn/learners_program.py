"""A program for every rank of a world: each algorithm, by remote calls, must give the same bits as in one process."""

import torch

from distributed import partition, reduce
from distributed.cluster.info import get_world_size
from distributed.strategies.common.work import Work, WorkPlan
from distributed.strategies.local import local
from distributed.strategies.rpc import rpc
from distributed.tree_sum import tree_sum
from metalearn.training.chunks import chunk_functions
from tests.metalearn.learners import FLOAT64, LEARNERS, Tasks, network, start_of


def main() -> None:
    cpu = torch.device("cpu")
    for name, make in LEARNERS.items():
        learner = make(network())
        plain = learner.trained_on == "samples"
        functions = chunk_functions(learner, Tasks(learner), cpu, FLOAT64, tree_sum)
        work = Work(**functions._asdict(), device=cpu, plain=plain)
        plan = WorkPlan(work, get_world_size(), partition.batch_partitioner, reduce.mean())
        strategy = rpc(plan=plan, timeout=30)()
        if strategy.drives:
            alone = local(plan=plan._replace(workers=1), timeout=30)()
            params, chunks = start_of(learner), list(torch.arange(8).split(3))
            for ours, theirs in zip(strategy.map(params, chunks, 3), alone.map(params, chunks, 3), strict=True):
                assert ours.count == theirs.count and ours.grads.keys() == theirs.grads.keys()
                assert all(torch.equal(ours.grads[key], theirs.grads[key]) for key in params)
                assert all(torch.equal(ours.metrics[key], theirs.metrics[key]) for key in ("loss", "accuracy"))
            ours, theirs = strategy.evaluate(params, "test", chunks), alone.evaluate(params, "test", chunks)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
            print(name, "ok")
        strategy.close()


if __name__ == "__main__":
    main()
