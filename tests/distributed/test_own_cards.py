"""Ranks that have the same GPU are told so before NCCL waits for ever."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from distributed.cluster.process_group import check_own_cards

PATIENCE = timedelta(seconds=20)


def checked(cards: list[str]) -> list[str]:
    """What every rank is told; nothing where all is right."""
    store = dist.HashStore()

    def told(rank: int) -> str:
        try:
            check_own_cards(store, rank, len(cards), cards[rank], PATIENCE)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(cards)) as ranks:
        return list(ranks.map(told, range(len(cards))))


def test_ranks_with_cards_of_their_own_go_on() -> None:
    assert checked(["GPU-a", "GPU-b", "GPU-c"]) == ["", "", ""]


def test_every_rank_is_told_who_shares_a_card() -> None:
    said = checked(["GPU-a", "GPU-b", "GPU-a"])
    assert len(set(said)) == 1 and "rank 0 and rank 2 have the same GPU, GPU-a" in said[0]
    assert "type strategy=rpc" in said[0] and "docker run --gpus device=0" in said[0]


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_is_allowed() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)timeout|wait"):
        check_own_cards(dist.HashStore(), 0, 2, "GPU-a", timedelta(seconds=0.2))
