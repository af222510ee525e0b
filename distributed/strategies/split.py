"""Splits a network into consecutive shards, each on its own worker behind an RRef.

Micro-batches go from shard to shard, several at once, so that all workers have work. Distributed autograd takes the
backward pass the same way back, and torch's DistributedOptimizer steps every shard on its worker. Rank zero holds the
first shard, calls the others, and fetches the parameters for a checkpoint.

Every micro-batch has its own leaf copies of the parameters. So its gradients are separate and are added in one order,
by `distributed.reduce`, and training gives the same bits as in one process.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.optim import DistributedOptimizer

from distributed import autograd
from distributed.calls import rpc
from distributed.calls.session import POLL_SECONDS, Pinger, current, missing_workers, stop_rpc, use_own_gpu
from distributed.calls.worker import fetched
from distributed.errors import says_timeout, worker_error
from distributed.info import check_timeout
from distributed.reduce import Combine, Subtree, Tensors, combine, partials
from distributed.strategies.common.chunks import current_work, start_session
from distributed.strategies.common.work import (
    ChunkStrategy,
    Connect,
    Evaluator,
    Pieces,
    Windows,
    Work,
    WorkerCost,
    WorkPlan,
    advised,
    as_metrics,
    to_cpu,
    watch,
)


def split(*, plan: WorkPlan, timeout: float, cuts: Sequence[str] | str = "auto", micro_batches: int = 4) -> Connect:
    """Deals the network's stages out to the workers. conf/strategy/split.yaml explains the keys.

    Raises ValueError if the network cannot be cut at all, or not at these stages; the reducer needs whole gradients, or
    the loop whole parameters; or a key has a value that is not allowed.
    """
    check_timeout(timeout)
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or not 1 <= micro_batches <= 8:
        raise ValueError(
            f"micro_batches={micro_batches!r}: must be a whole number from 1 to 8; type strategy.micro_batches=4"
        )
    pieces = plan.work.pieces
    if pieces is None:
        raise ValueError(
            "strategy=split: only a network that is a sequence of stages, learning from plain samples, can be cut; "
            "type algorithm=supervised and model=conv4, for example, or another strategy"
        )
    if not plan.only_adds:
        raise ValueError("strategy=split: no worker sees a whole gradient; type reducer=mean or reducer=sum")
    if plan.averages:
        raise ValueError(
            "strategy=split: workers update their parameters, and no average is kept; type trainer.ema_decay=null"
        )
    if plan.by_norm:
        raise ValueError(
            "strategy=split: no worker sees the norm of the whole gradient; type optimizer.clip_norm=null, or "
            "optimizer.clip_value=LIMIT, which limits each number"
        )
    ends = shard_ends(pieces, plan.workers, cuts)
    return lambda: Pipeline(plan.work, pieces, ends, plan.reduce, micro_batches, timeout)


def shard_ends(pieces: Pieces, workers: int, cuts: Sequence[str] | str = "auto") -> list[int]:
    """For each worker's shard, the number of the stage after its last one. Raises ValueError if the cuts leave a shard
    empty, or do not fit the network or the number of workers."""
    names = [stage.name for stage in pieces.stages]
    if workers > len(names):
        raise ValueError(
            f"workers={workers}: the network has {len(names)} stages ({', '.join(names)}), and a shard needs one; "
            f"type workers={len(names)} or fewer"
        )
    if isinstance(cuts, str):
        if cuts != "auto":
            raise ValueError(f"cuts={cuts!r}: must be auto or a list of stages; type strategy.cuts=[{names[-1]}]")
        return _even_ends(pieces, workers)
    for name in cuts:
        if name not in names:
            raise ValueError(f"cuts={list(cuts)}: there is no stage {name!r}; the stages are {', '.join(names)}")
    positions = [names.index(name) for name in cuts]
    if len(positions) != workers - 1:
        raise ValueError(
            f"cuts={list(cuts)}: make {len(positions) + 1} shards for {workers} workers; "
            f"type {workers - 1} of {', '.join(names[1:])}, or cuts=auto"
        )
    if any(before >= after for before, after in pairwise([0, *positions])):
        raise ValueError(f"cuts={list(cuts)}: leave a shard empty; the stages in order are {', '.join(names[1:])}")
    return [*positions, len(names)]


def _even_ends(pieces: Pieces, workers: int) -> list[int]:
    """The ends for which the largest shard has the fewest parameters."""
    sizes = [0, *accumulate(stage.size for stage in pieces.stages)]
    count = len(sizes) - 1
    # best[i]: of the first i stages in `shards` shards, the size of the largest shard and the ends of all
    best: list[tuple[int, list[int]]] = [(sizes[i], [i]) for i in range(count + 1)]
    for shards in range(2, workers + 1):
        longer = []
        for i in range(count + 1):
            options = [(max(best[j][0], sizes[i] - sizes[j]), [*best[j][1], i]) for j in range(shards - 1, i)]
            longer.append(min(options, default=best[i]))
        best = longer
    return best[count][1]


@contextmanager
def _naming_missing_workers() -> Iterator[None]:
    """Around a method of `Pipeline`: errors name the workers that do not answer, and advise on the time limit. Those of
    torch name none, or the last shard, which waits for the others."""
    try:
        yield
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        names, are_dead = missing_workers()
        timeout = current().timeout
        if are_dead and not (isinstance(error, ConnectionError) and str(error).startswith(f"{names} d")):
            raise ConnectionError(f"{names} does not answer: {error}") from error
        if names and not are_dead:
            raise advised(TimeoutError(f"{names} did not answer within {timeout:g} s"), timeout) from error
        if isinstance(error, TimeoutError):
            raise advised(error, timeout) from error
        raise


class Pipeline(ChunkStrategy):
    """All shards, as rank zero uses them; the other workers hold theirs until it ends the session. It is its own
    updater: gradients stay where the shards are, so there is no `map`, and each worker updates the parameters of its
    shard."""

    every = 1  # the host reads the figures of each step

    def __init__(
        self, work: Work, pieces: Pieces, ends: Sequence[int], reduce: Combine, micro_batches: int, timeout: float
    ) -> None:
        self._result, self._faults, self._reduce = work.result, pieces.faults, reduce
        self._micro_batches, self._timeout = micro_batches, timeout
        self._bounds = list(pairwise([0, *ends]))
        self._param_names = [
            [name for stage in pieces.stages[first:last] for name in stage.params] for first, last in self._bounds
        ]
        self._shards: list[Any] = []
        self._optimizer: Any = None
        self.drives = start_session(work, timeout)
        self._workers = current().workers

    @_naming_missing_workers()
    def updater(self, here: Any, params: Tensors, optimizer: Any) -> Any:
        """Sends each shard its part of the parameters, and of the state of their optimiser."""
        self._here = params, optimizer
        whole = State.of(params, optimizer.state_dict())
        self._shards = []
        for worker, names, (first, last) in zip(self._workers, self._param_names, self._bounds, strict=True):
            per_param = {name: whole.per_param[name] for name in names if name in whole.per_param}
            state = State({name: whole.params[name] for name in names}, per_param, whole.group)
            args = (self._reduce, first, last, state, self._timeout)
            self._shards.append(rpc.remote(worker, _make_shard, args, timeout=self._timeout))
        refs = [ref for shard in self._shards for ref in shard.rpc_sync(timeout=self._timeout).param_refs()]
        # It warns of optimisers that are not TorchScript.
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
        self._optimizer = DistributedOptimizer(_optimizer_here, refs)
        return self

    def settle(self) -> None:
        """Each step waits for its figures."""

    @_naming_missing_workers()
    def fetch(self) -> None:
        """Copies the shards' parameters and the state of their optimisers to those that the updater began with."""
        here, optimizer = self._here
        states: list[State] = self._all("state")
        params = {name: value for state in states for name, value in state.params.items()}
        per_param = {name: value for state in states for name, value in state.per_param.items()}
        with torch.no_grad():
            for name, param in here.items():
                param.copy_(params[name])
        optimizer.load_state_dict(State(params, per_param, states[0].group).optimizer())

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every shard; returns their values."""
        futures = [getattr(shard.rpc_async(timeout=self._timeout), method)(*args) for shard in self._shards]
        return [self._wait(rank, future) for rank, future in enumerate(futures)]

    def _wait(self, rank: int, future: Any) -> Any:
        """The value of a worker's answer. The loss of another is noticed meanwhile: a worker may wait for an RRef of
        one that is dead until its time limit."""
        came = threading.Event()
        future.add_done_callback(lambda _: came.set())
        watch = Pinger(self._timeout)
        while not came.wait(POLL_SECONDS):
            lost = watch.lost(self._workers[1:])
            if lost is not None:
                raise lost
        try:
            value = future.wait()
            if isinstance(value, Missed):
                raise RuntimeError(value.reason)
        except RuntimeError as error:
            raise worker_error(self._workers[rank], error, self._timeout) from error
        return value

    @_naming_missing_workers()
    def advance(self, chunks: Sequence[Tensor], step: int, rate: float) -> tuple[list[Any], dict[str, float]]:
        """Trains for one step; returns the chunks' results without their gradients, and the seconds that this process
        took to update parameters: none. Raises FloatingPointError if a gradient is not finite; the step is not applied
        then. Raises ConnectionError or TimeoutError if a worker does not answer."""
        began = time.perf_counter()
        counts = [len(chunk) for chunk in chunks]
        rests: list[Any] = []
        for group_start in range(0, len(chunks), self._micro_batches):
            group = list(enumerate(chunks))[group_start : group_start + self._micro_batches]
            with autograd.context() as ctx:
                losses, group_rests = zip(*self._through("train", group, None), strict=True)
                rests += group_rests
                autograd.backward(ctx, losses)
                self._all("collect", ctx, len(chunks))
                if group_start + self._micro_batches >= len(chunks):
                    for name in self._all("prepare", counts, rate):
                        if name is not None:
                            raise FloatingPointError(f"the gradient of {name} is not finite")
                    self._optimizer.step(ctx)
        costs = self._all("cost")
        sent_forward = [following.sent for following in costs[1:]] + [0]  # as many bytes as come back
        self._cost = as_metrics(
            time.perf_counter() - began,
            [WorkerCost(cost.compute, cost.sent + sent) for cost, sent in zip(costs, sent_forward, strict=True)],
        )
        return [self._result({}, rest) for rest in rests], {"update_seconds": 0.0}

    def _through(self, split: str, group: Iterable[tuple[int, Tensor]], params: Sequence[Tensors] | None) -> list[Any]:
        """Sends micro-batches through all shards, and returns the outcomes of the last shard."""
        futures, last = [], len(self._shards) - 1
        for number, chunk in group:
            before: list[Any] = []
            for position, shard in enumerate(self._shards):
                remote = (shard.rpc_async if position == last else shard.remote)(timeout=self._timeout)
                before = [remote.run(before, split, chunk, number, None if params is None else params[position])]
            futures += before
        return [self._wait(last, future) for future in futures]

    def evaluator(self, params: Tensors, split: str) -> Evaluator:
        parts = [{name: params[name].detach() for name in names} for names in self._param_names]

        @_naming_missing_workers()
        def through_all(group: Sequence[Tensor]) -> list[Tensors]:
            return self._through(split, enumerate(group), parts)

        return self._micro_batches, through_all

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        """The fault of each sample, by `Pieces.faults`. The worker is the last one, where all samples end."""
        faults = self._faults(self.evaluate(params, "train", chunks))
        return faults | {"worker": torch.full_like(next(iter(faults.values())), len(self._shards) - 1)}

    def close(self, failure: BaseException | None = None) -> None:
        self._shards, self._optimizer = [], None
        stop_rpc(failure)


class Missed(NamedTuple):
    """In place of outputs: the reason why those of an earlier shard did not come in time. As an exception, torch would
    print it on every worker that it passes, with its traceback."""

    reason: str


class State(NamedTuple):
    """Parameters by name; the optimiser's state of each, by name; the settings of its one parameter group."""

    params: Tensors
    per_param: dict[str, dict[str, Any]]
    group: dict[str, Any]

    @classmethod
    def of(cls, params: Tensors, optimizer: dict[str, Any]) -> "State":
        """Of parameters, and the `state_dict` of their optimiser, which numbers them by sorted names."""
        saved, (group,) = optimizer["state"], optimizer["param_groups"]
        per_param = {name: saved[i] for i, name in enumerate(sorted(params)) if i in saved}
        values = {name: value.detach() for name, value in params.items()}
        return cls(values, per_param, {key: value for key, value in group.items() if key != "params"})

    def optimizer(self) -> dict[str, Any]:
        """The `state_dict` of the optimiser."""
        numbered = {i: self.per_param[name] for i, name in enumerate(sorted(self.params)) if name in self.per_param}
        return {"state": numbered, "param_groups": [self.group | {"params": list(range(len(self.params)))}]}


class Shard:
    """The part of the network on one worker: stages `first` to `last` (exclusive), with their parameters and optimiser.
    It computes its stages for any caller, and steps its own parameters.

    `reduce` makes the gradient of the micro-batches' summed gradients and numbers of samples. The shard computes on
    `device`, and sends tensors through the CPU. The previous shard may take `timeout` seconds to send.
    """

    def __init__(
        self, pieces: Pieces, reduce: Combine, first: int, last: int, state: State, *, device: torch.device,
        timeout: float,
    ) -> None:  # fmt: skip
        self._pieces, self._reduce, self._timeout = pieces, reduce, timeout
        self._stages = pieces.stages[first:last]
        self._ends = last == len(pieces.stages)
        self._device = device
        self._params = {
            name: value.to(device, copy=True).requires_grad_() for name, value in sorted(state.params.items())
        }
        self._optimizer = pieces.start(self._params)
        if state.per_param:
            self._optimizer.load_state_dict(state.optimizer())
        self._one_at_a_time = threading.Lock()
        self._copies: dict[int, Tensors] = {}
        self._sums: dict[Subtree, Tensors] = {}
        self._seconds = 0.0
        self._backward: Windows = {}  # by micro-batch
        self._sent_back = 0

    def param_refs(self) -> list["rpc.RRef[Tensor]"]:
        return [rpc.RRef(value) for value in self._params.values()]

    def step(self) -> None:
        """Called by torch's DistributedOptimizer when `prepare` has set the gradients."""
        self._optimizer.step()

    def run(self, before: list[Any], split: str, indices: Tensor, number: int, params: Tensors | None) -> Any:
        """Computes micro-batch `number`, which has the samples `indices` of a split.

        `before` has a reference to the previous shard's outputs, or nothing on the first shard. With `params` it
        evaluates by these; without, it trains this shard's own. Returns the inputs of the next shard; on the last
        shard, the value of `Pieces.outcome` or `Pieces.values`; or a `Missed`.
        """
        use_own_gpu()
        first = not before
        if first:
            h, support_size = self._pieces.inputs(split, indices)
        else:
            try:
                received = fetched(before, self._timeout)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if not says_timeout(reason):
                    raise
                return Missed(reason)
            if isinstance(received, Missed):
                return received
            h, support_size = received
        training = params is None
        with self._one_at_a_time, torch.set_grad_enabled(training):
            began = time.perf_counter()
            if params is None:
                params = self._copies[number] = {
                    name: value.detach().clone().requires_grad_() for name, value in self._params.items()
                }
                if not first:
                    self._sent_back += h.nbytes
            params = {name: value.to(self._device) for name, value in params.items()}
            outputs = h.to(self._device)
            for stage in self._stages:
                outputs = stage.apply(params, outputs, support_size)
            if training:
                watch(self._backward, number, [outputs, *params.values(), *([h] if h.requires_grad else [])])
            if self._ends:
                compute = self._pieces.outcome if training else self._pieces.values
                result: Any = to_cpu(compute(outputs[:, support_size:], split, indices))
            else:
                result = outputs.cpu(), support_size
            if training:
                self._seconds += time.perf_counter() - began
        return result

    def collect(self, ctx: int, count: int) -> None:
        """Takes the gradients of a backward pass from its context, and adds them to those of the step's `count`
        micro-batches as far as their order allows."""
        gradients = autograd.get_gradients(ctx)
        copies, self._copies = self._copies, {}
        for number in sorted(copies):
            values = {
                name: gradients[copy] if copy in gradients else torch.zeros_like(copy)
                for name, copy in copies[number].items()
            }
            self._sums = partials([*self._sums.items(), (Subtree(0, number), values)], count)

    def prepare(self, counts: Sequence[int], rate: float) -> str | None:
        """Sets the gradients and the learning rate of a step; returns a parameter whose gradient is not finite.
        `counts` are the micro-batches' numbers of samples."""
        sums, self._sums = self._sums, {}
        for name, gradient in self._reduce([combine(sums.items(), len(counts))], counts).items():
            if not torch.isfinite(gradient).all():
                return name
            self._params[name].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return None

    def cost(self) -> WorkerCost:
        """Since the last call: seconds of training, and bytes of gradients sent back to the previous shard."""
        covered, until = 0.0, 0.0
        for began, ended in sorted(self._backward.values()):  # passes of several micro-batches overlap
            covered += max(0.0, ended - max(began, until))
            until = max(until, ended)
        cost = WorkerCost(self._seconds + covered, self._sent_back)
        self._seconds, self._backward, self._sent_back = 0.0, {}, 0
        return cost

    def state(self) -> State:
        state: State = to_cpu(State.of(self._params, self._optimizer.state_dict()))
        return state


_shard: Shard | None = None  # this worker's shard


def _make_shard(reduce: Combine, first: int, last: int, state: State, timeout: float) -> Shard:
    global _shard
    work = current_work()
    assert work.pieces is not None
    _shard = Shard(work.pieces, reduce, first, last, state, device=work.device, timeout=timeout)
    return _shard


def _optimizer_here(params: Sequence[Tensor]) -> Shard:
    """The optimiser that DistributedOptimizer makes on each worker: the shard, which steps its own parameters."""
    assert _shard is not None
    return _shard
