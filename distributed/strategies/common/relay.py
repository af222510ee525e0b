"""A call along a tree of workers: rank zero sends to few of them, and they pass on what is for the others.

The workers are numbered in the order of their chunks, the caller first. With `fan_out` f, the worker whose number ends
with l zeros in base f stands for the f**l workers from its own number on. If the chunks are dealt out in runs, so many
workers hold a run of chunks too. The worker at their head adds up their results before it passes them on, as far as
`distributed.tree_sum` allows; if f is a power of two, that is one sum for all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distributed.api import remote_sync_call
from distributed.calls.session import MAX_DEPTH, current
from distributed.calls.traffic import traffic
from distributed.cluster.info import LONGEST_TIMEOUT, get_world_rank, on_one_host
from distributed.functions import pure
from distributed.partition import Args
from distributed.strategies.common.work import Flat, flatten, unflatten
from distributed.tree_sum import partials

GRACE_SECONDS = 1.0
"""For each level of the tree, so much longer does a worker wait than those to whom it has sent. So the error names the
worker that does not answer, not the one that waits for it."""

FAN_OUT = 4
"""The smallest fan-out that is chosen for a tree."""


class PartResult(NamedTuple):
    """The results of one or more workers.

    Attributes:
        results: by chunk number or by subtree; as flat buffers while they travel.
        seconds: of compute, by rank.
        sent: bytes that workers have sent to others than the caller, by rank.
        lost: the ranks that these workers have lost, in this call or before.
    """

    results: dict[Any, Any] | Flat
    seconds: Counter[int]
    sent: Counter[int]
    lost: frozenset[int] = frozenset()

    def flat(self) -> "PartResult":
        """The same with flat buffers, and without graphs."""
        return self._replace(results=flatten(self.results))

    def unpacked(self) -> dict[Any, Any]:
        """The results, whether they are flat or not."""
        values: dict[Any, Any] = unflatten(self.results) if isinstance(self.results, Flat) else self.results
        return values


PartFunction = Callable[..., PartResult]
"""Called with the numbers of a worker's chunks, the chunks, and further arguments."""


class RelayedCall(NamedTuple):
    """What all workers of a call compute.

    Attributes:
        func: what computes chunks.
        shared: the further arguments of `func`.
        adds: the number of all chunks if results are added up as far as possible; None if they are not.
        timeout: seconds that a worker may take for its own chunks.
        retries: how many workers may be lost; others compute their chunks.
    """

    func: PartFunction
    shared: Args
    adds: int | None
    timeout: float
    retries: int


class Branch(NamedTuple):
    """A worker's rank, the numbers of its chunks, and the branches that it passes on."""

    worker: int
    numbers: Sequence[int]
    branches: Sequence["Branch"] = ()

    def all_numbers(self) -> Iterator[int]:
        """The numbers of the chunks of all its workers."""
        yield from self.numbers
        for branch in self.branches:
            yield from branch.all_numbers()

    def height(self) -> int:
        return max((branch.height() + 1 for branch in self.branches), default=0)


def automatic_fan_out(workers: int) -> int:
    """`workers` on one host, where a tree saves nothing. Else the smallest fan-out, `FAN_OUT` or more, for which no
    message is nested as deep as calls may be."""
    if on_one_host():
        return max(2, workers)
    fan_out = FAN_OUT
    while fan_out ** (MAX_DEPTH - 1) < workers:
        fan_out += 1
    return fan_out


def check_fan_out(fan_out: int | str, workers: int) -> None:
    """Raises ValueError if the setting is neither `auto` nor a whole number that is large enough for the workers."""
    if fan_out == "auto":
        return
    if isinstance(fan_out, bool) or not isinstance(fan_out, int) or fan_out < 2:
        raise ValueError(f"fan_out={fan_out!r}: must be auto or a whole number, 2 or more; type strategy.fan_out=auto")
    if fan_out**MAX_DEPTH < workers:
        problem = f"{workers} workers would be more than {MAX_DEPTH} levels deep"
        raise ValueError(f"fan_out={fan_out}: {problem}; type strategy.fan_out=auto")


def fan_out_for(setting: int | str, workers: int) -> int:
    """The base of the tree for a setting; the automatic one where workers have come for which it is too small."""
    if isinstance(setting, int) and setting**MAX_DEPTH >= workers:
        return setting
    return automatic_fan_out(workers)


def grow(dealt: Mapping[int, Sequence[int]], caller: int, fan_out: int) -> Branch:
    """The tree whose root is the caller.

    Args:
        dealt: by worker's rank, the numbers of its chunks.
        caller: the rank of the root, with or without chunks.
        fan_out: the base, 2 or more; with as many as there are workers the caller sends to all others itself.
    """
    others = sorted((rank for rank in dealt if rank != caller), key=lambda rank: min(dealt[rank]))
    order = [caller, *others]
    span = 1
    while span < len(order):
        span *= fan_out

    def branch(number: int, span: int) -> Branch:
        branches = []
        while span > 1:
            span //= fan_out
            heads = range(number + span, min(number + span * fan_out, len(order)), span)
            branches += [branch(head, span) for head in heads]
        return Branch(order[number], dealt.get(order[number], ()), tuple(branches))

    return branch(0, span)


def relay(branch: Branch, chunks: Mapping[int, Tensor], request: RelayedCall) -> PartResult:
    """Computes a branch: its own chunks here, the branches that it passes on by remote calls.

    Args:
        branch: any worker can compute it.
        chunks: by their numbers, those of all workers of the branch.
        request: what to compute.
    """
    if not branch.branches:
        return request.func(branch.numbers, [chunks[number] for number in branch.numbers], *request.shared)
    own = [Branch(get_world_rank(), branch.numbers)] if branch.numbers else []
    parts = []
    for part in [*own, *branch.branches]:
        its_chunks = {number: chunks[number] for number in part.all_numbers()}
        parts.append((part.worker, (part, its_chunks, request), None))
    levels = branch.height()
    # Who loses a worker waits for it first, and then for the one that computes its chunks; at every level.
    waits = levels if request.retries else 1
    patience = min(request.timeout * waits + GRACE_SECONDS * (levels - 1), LONGEST_TIMEOUT)
    answers = remote_sync_call(_relay_on, partitioner=lambda: parts, timeout=patience, retries=request.retries)
    return joined(answers, request.adds)


@pure
def _relay_on(branch: Branch, chunks: Mapping[int, Tensor], request: RelayedCall) -> PartResult:
    """Runs on a worker: as `relay`, with the results as flat buffers."""
    before = traffic()
    result = relay(branch, chunks, request)
    if not branch.branches:
        return result
    spent = traffic().since(before)
    sent = result.sent + spent.received + Counter({get_world_rank(): spent.sent})
    return result._replace(sent=sent).flat()


def joined(answers: Sequence[PartResult], adds: int | None = None) -> PartResult:
    """The results of several workers as one, added up if `adds` is set, and the ranks that this process has lost."""
    items = [item for answer in answers for item in answer.unpacked().items()]
    seconds = sum((answer.seconds for answer in answers), Counter[int]())
    sent = sum((answer.sent for answer in answers), Counter[int]())
    lost = frozenset(current().losses).union(*(answer.lost for answer in answers))
    return PartResult(dict(items) if adds is None else partials(items, adds), seconds, sent, lost)
