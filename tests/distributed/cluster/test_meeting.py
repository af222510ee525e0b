"""How processes find a world, ask it for a seat or a farewell, and give up: one process each time."""

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import rpc

from distributed.cluster import meeting, store
from distributed.cluster.joining import UnreachableError, WorldAddress, WorldConnection
from distributed.cluster.listening import own_listeners
from distributed.cluster.meeting import Seat, ask_to_let_go
from distributed.rpc import session
from distributed.rpc.traffic import MessageSlots
from distributed.strategies.common import relay


@pytest.mark.parametrize("answered", ["before", "after"])
def test_a_request_to_leave_may_cross_a_new_session(answered: str) -> None:
    """Rank zero has read and answered it before the new session, or it has not seen it."""
    shared = dist.HashStore()
    desk = meeting._Desk(shared)
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(ask_to_let_go(shared, "worker1", 20)), daemon=True)
    asking.start()
    deadline = time.monotonic() + 20
    while not shared.add(f"{desk.call}/requests", 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if answered == "before":
        while not desk.farewells and time.monotonic() < deadline:
            desk.read()
        shared.set(f"{desk.call}/answer/{next(iter(desk.farewells))}", "answered")
    desk = meeting._Desk(shared)
    while asking.is_alive() and time.monotonic() < deadline:
        desk.read()
        for number in desk.farewells:
            shared.set(f"{desk.call}/answer/{number}", "answered later")
        time.sleep(0.01)
    assert found == ["answered" if answered == "before" else "answered later"]


def test_a_world_of_environment_variables_opens_its_store_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(store.STORE_FD, raising=False)  # of the world that other tests share
    opened = store._open(0, 2, timedelta(seconds=5))
    assert [listener.address for listener in own_listeners() if listener.port == port] == ["127.0.0.1"]
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    opened.set("x", "1")
    assert client.get("x") == b"1"


def test_the_limit_of_given_options_is_that_of_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[Any] = []
    monkeypatch.setattr(session, "_session", None)  # other tests may share one in this process
    monkeypatch.setattr(session, "_join", lambda *arguments: settings.append(arguments[0]))
    session.start_rpc(rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=4))
    assert settings[0].timeout == 4


def test_a_new_process_that_reaches_the_store_alone_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would begin a session with it again and again."""
    starts: list[int] = []

    def fail(*arguments: object) -> None:
        starts.append(1)
        raise RuntimeError("connect: refused")

    monkeypatch.setattr(session, "meet", lambda timeout: Seat(dist.HashStore(), 2.0))
    monkeypatch.setattr(session, "_start", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConnectionError, match=r"not its workers, in 3 starts: connect: refused; set TP_SOCKET_IFNAME"):
        session._join(session._Settings(None, 5.0, None, None, None), None)
    assert len(starts) == 3


def test_a_host_without_the_interface_of_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorldAddress("10.0.0.1", 1, "eth77", "", 2, "elsewhere", 1, 1)
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UnreachableError, match=r"interface eth77, which .* set TP_SOCKET_IFNAME to .* one of .*lo"):
        WorldConnection(place)
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    assert WorldConnection(place)._environment(0, 1)["GLOO_SOCKET_IFNAME"] == "lo"


def test_patience_for_a_place_does_not_begin_anew_when_others_give_up() -> None:
    slots = MessageSlots(1)
    assert slots.acquire(1)
    began = time.monotonic()
    waited: list[float] = []
    waiters = [
        threading.Thread(target=lambda: waited.append(time.monotonic() - began) if not slots.acquire(0.5) else None)
        for _ in range(12)
    ]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(20)
    assert len(waited) == 12 and max(waited) < 4, "twelve times the patience would be 6 s"


def test_a_caller_in_a_tree_waits_until_a_lost_part_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(relay, "remote_sync_call", lambda *call, timeout, **more: limits.append(timeout) or [])
    monkeypatch.setattr(relay, "joined", lambda answers, adds: answers)
    tree = relay.grow({rank: [rank] for rank in range(4)}, 0, 2)
    assert tree.height() == 2
    for retries in (0, 1):
        request = relay.RelayedCall(lambda: relay.PartResult({}, {}, {}), (), None, 10.0, retries)  # type: ignore[arg-type]
        relay.relay(tree._replace(numbers=()), dict.fromkeys(range(4)), request)  # type: ignore[arg-type]
    assert limits == [11.0, 21.0]
