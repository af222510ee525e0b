"""Which worker computes an item again after its worker was lost."""

from collections import defaultdict
from collections.abc import Collection, Sequence


class Spares:
    """The workers of one call that are not lost.

    Args:
        names: of all workers, by rank.
        used: the ranks that the call is dealt to. They come first.
        retries: how often an item may be sent again.
        lost: the ranks that are lost already.
    """

    def __init__(self, names: Sequence[str], used: Sequence[int], retries: int, lost: Collection[int]) -> None:
        self.retries = retries
        self._names = names
        self._used = used
        self._lost = set(lost)
        self._tried: defaultdict[int, list[str]] = defaultdict(list)

    def lose(self, rank: int) -> None:
        """Notes that a worker is lost to this call. It gets no more items."""
        self._lost.add(rank)

    def next_for(self, number: int, rank: int, cause: Exception) -> int:
        """The rank that shall compute item `number`, which worker `rank` has lost.

        Raises:
            Exception: of the type of `cause`: there is no such worker, or the item was sent too often.
        """
        tried = self._tried[number]
        tried.append(self._names[rank])
        live = [r for r in self._used if r not in self._lost]
        live = live or [r for r in range(len(self._names)) if r not in self._lost]
        if len(tried) > self.retries or not live:
            raise type(cause)(
                f"{cause}; item {number} was lost by every worker that has tried it: {', '.join(tried)} "
                f"(retries={self.retries})"
            ) from cause
        return live[number % len(live)]
