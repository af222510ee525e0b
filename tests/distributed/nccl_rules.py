"""A stand-in for torch.distributed in one process, with a thread for each rank, that obeys NCCL's rules.

Each rank has one stream. An operation starts when all earlier ones of its rank are done. A send is done only together
with the receive of its peer, and a collective only when every rank has come to it. If every rank waits for an operation
that cannot be done, that is a deadlock; it is reported at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Deadlock(Exception):  # noqa: N818
    """Every rank waits for an operation that cannot be done."""


class Operation:
    """An operation in a rank's stream. `tensors` are those to send and those to receive, one for each peer."""

    def __init__(
        self, world: "NcclRules", kind: str, peer: int | None, sent: Sequence[Tensor], received: Sequence[Tensor]
    ) -> None:
        self.kind, self.peer, self.sent, self.received, self.done = kind, peer, sent, received, False
        self._world = world

    def wait(self) -> None:
        self._world.wait_for(self)


class NcclRules:
    """The functions of torch.distributed that sums use. `collectives` counts those that were done.

    `backend` is what `get_backend` returns; the rules are the same.
    """

    def __init__(self, size: int, backend: str = "nccl") -> None:
        self.size, self.backend, self.collectives, self.deadlock = size, backend, 0, False
        self._own = threading.local()
        self._changed = threading.Condition()
        self._streams: list[deque[Operation]] = [deque() for _ in range(size)]
        self._waits_for: dict[int, Operation | None] = dict.fromkeys(range(size))

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Runs the program on every rank; returns the results, or raises the first error."""
        results: list[Any] = [None] * self.size

        def rank_program(rank: int) -> None:
            self._own.rank = rank
            try:
                results[rank] = program()
            except Exception as error:
                results[rank] = error
            with self._changed:
                del self._waits_for[rank]
                self._look_for_deadlock()

        threads = [threading.Thread(target=rank_program, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self) -> int:
        return self.size

    def isend(self, tensor: Tensor, dst: int) -> Operation:
        return self._post(Operation(self, "send", dst, [tensor], []))

    def irecv(self, tensor: Tensor, src: int) -> Operation:
        return self._post(Operation(self, "receive", src, [], [tensor]))

    def get_backend(self) -> str:
        return self.backend

    def all_to_all_single(self, output: Tensor, values: Tensor, output_splits: Any = 1, input_splits: Any = 1) -> None:
        received, sent = output.split(output_splits), values.split(input_splits)
        self._post(Operation(self, "all_to_all", None, sent, received)).wait()

    def all_gather(self, outputs: Sequence[Tensor], values: Tensor) -> None:
        self._post(Operation(self, "all_gather", None, [values] * self.size, outputs)).wait()

    def wait_for(self, operation: Operation) -> None:
        rank = self.get_rank()
        with self._changed:
            self._waits_for[rank] = operation
            self._look_for_deadlock()
            self._changed.wait_for(lambda: operation.done or self.deadlock)
            self._waits_for[rank] = None
            if not operation.done:
                raise Deadlock(f"rank {rank} waits for its {operation.kind}")

    def _look_for_deadlock(self) -> None:
        if all(operation is not None and not operation.done for operation in self._waits_for.values()):
            self.deadlock = True
            self._changed.notify_all()

    def _post(self, operation: Operation) -> Operation:
        with self._changed:
            self._streams[self.get_rank()].append(operation)
            while self._step():
                self._changed.notify_all()
        return operation

    def _step(self) -> bool:
        """Does the operations at the heads of streams that can be done now; returns whether there were any."""
        heads = {rank: stream[0] for rank, stream in enumerate(self._streams) if stream}
        kinds = {operation.kind for operation in heads.values()}
        if len(heads) == self.size and len(kinds) == 1 and kinds <= {"all_to_all", "all_gather"}:
            for rank, operation in heads.items():
                for peer, received in enumerate(operation.received):
                    received.copy_(heads[peer].sent[rank])  # fails if the sizes differ
            self.collectives += 1
            return self._finish(*heads)
        for rank, send in heads.items():
            peer = heads.get(send.peer) if send.kind == "send" and send.peer is not None else None
            if peer is not None and peer.kind == "receive" and peer.peer == rank:
                peer.received[0].copy_(send.sent[0])
                return self._finish(rank, int(send.peer or 0))
        return False

    def _finish(self, *ranks: int) -> bool:
        for rank in ranks:
            self._streams[rank].popleft().done = True
        return True
