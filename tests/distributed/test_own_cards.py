"""What a rank does before it starts NCCL, which has no GPU here; and where it gets the numbers of its tasks."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.info import WorldInfo
from distributed.launch import meeting, process_group
from distributed.launch.process_group import check_own_cards, start_process_group
from distributed.strategies import ddp
from distributed.strategies.common.work import Work

PATIENCE = timedelta(seconds=20)


WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def checked(cards: list[str], models: str = "AAA") -> list[str]:
    """What every rank is told; nothing where all is right."""
    store = dist.HashStore()

    def told(rank: int) -> str:
        try:
            check_own_cards(store, rank, len(cards), cards[rank], models[rank], PATIENCE)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(cards)) as ranks:
        return list(ranks.map(told, range(len(cards))))


def test_every_rank_is_told_who_shares_a_card() -> None:
    assert checked(["GPU-a", "GPU-b", "GPU-c"]) == ["", "", ""]
    said = checked(["GPU-a", "GPU-b", "GPU-a"])
    assert len(set(said)) == 1 and "rank 0 and rank 2 have the same GPU, GPU-a" in said[0]
    with pytest.raises(RuntimeError, match=r"(?i)timeout|wait"):  # the other rank does not come
        check_own_cards(dist.HashStore(), 0, 2, "GPU-a", "A", timedelta(seconds=0.2))


def test_gpus_of_several_models_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ["GPU-a", "GPU-b", "GPU-c"]
    said = checked(cards, "AAB")
    assert len(set(said)) == 1 and "rank 0 an A, rank 2 an B" in said[0]
    monkeypatch.setattr(meeting, "_mixed", True)
    assert checked(cards, "AAB") == ["", "", ""]


def test_nccl_that_cannot_start_is_named(nccl: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(value: object) -> None:
        raise dist.DistBackendError("ncclSystemError: no interface\nmore")

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(ValueError, match="NCCL cannot start: ncclSystemError: no interface; type strategy=rpc"):
        start_process_group(timeout=10, backend="nccl")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A world of one rank with a card that is not there; what is started in it."""
    started: list[Any] = []
    card, zeros = SimpleNamespace(uuid="GPU-a", name="A"), torch.zeros
    monkeypatch.delenv(WAIT, raising=False)
    monkeypatch.setattr(process_group, "get_world_info", lambda: WorldInfo(0, 1, 0, 1))  # whatever world there is
    monkeypatch.setattr(process_group, "_store", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(process_group, "meet", lambda patience: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: started.append((backend, os.environ[WAIT])))
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(dist, "all_reduce", lambda value: started.append("first sum"))
    yield started
    os.environ.pop(WAIT, None)


def test_an_operation_of_nccl_that_takes_too_long_raises(nccl: list[Any]) -> None:
    assert start_process_group(timeout=10, backend="nccl") == "nccl"
    assert nccl == [("nccl", "1"), "first sum"]


class Ddp:
    """As torch's class of this name, without a process group: `device_ids` say where the inputs of a pass go."""

    def __init__(self, module: nn.Module, *, device_ids: list[torch.device] | None = None, **_: object) -> None:
        self.module, self.goes_to = module, device_ids

    def register_comm_hook(self, *_: object) -> None: ...

    def __call__(self, chunk: Tensor, step: int) -> Any:
        return self.module(chunk.to("meta") if self.goes_to else chunk, step)


def test_a_source_gets_the_numbers_of_a_chunk_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is moved to the card, which is not here."""
    devices = []

    def loss(params: dict[str, Tensor], chunk: Tensor, step: int) -> tuple[Tensor, None]:
        devices.append(chunk.device.type)
        return params["weight"].sum(), None

    monkeypatch.setattr(ddp, "DistributedDataParallel", Ddp)
    work = Work(*[lambda *_: None] * 3, loss, lambda *_: None, torch.device("cuda", 0))  # type: ignore[arg-type]
    params = {"weight": torch.ones(2)}
    with monkeypatch.context() as placed:
        placed.setattr(Tensor, "to", lambda self, device: self)
        module = ddp.Overlapped(params, work, 25.0, torch.arange(3), 1)
    module._ddp(torch.arange(3), 1)
    assert devices == ["cpu", "cpu"]
