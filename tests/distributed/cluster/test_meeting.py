"""How processes find a world, ask it for a seat or a farewell, and give up: one process each time."""

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from distributed.calls import session
from distributed.calls.traffic import MessageSlots
from distributed.cluster import meeting, store
from distributed.cluster.info import is_here, listening
from distributed.cluster.joining import UnreachableError, WorldAddress, WorldConnection
from distributed.cluster.listening import own_listeners
from distributed.cluster.meeting import ask_to_let_go
from distributed.cluster.store import INTERFACE_VARIABLES, loopback_interface


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


@pytest.mark.parametrize("mixed", [False, True])
def test_who_differs_from_rank_zero_gets_no_seat_unless_it_may_be_mixed(
    mixed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "_comparison", None)
    meeting.compare_workers(lambda: {"code": "ours", "data": "the same"}, mixed=mixed)
    shared = dist.HashStore()
    desk = meeting._Desk(shared)
    likenesses = {
        "equal": {"code": "ours", "data": "the same"},
        "other": {"code": "theirs", "data": "the same"},
        "less": {"code": "ours"},
        "more": {"code": "ours", "data": "the same", "torch": "new"},
        "nothing": None,
    }
    for name, likeness in likenesses.items():
        meeting._post(
            shared, desk.call, {"process": name, "number": name, "rank": None, "host": "h", "likeness": likeness}
        )
    desk.read()
    assert desk.requests.keys() == (likenesses.keys() if mixed else {"equal"})
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert said == [
        f"a new process on h differs from rank 0: {what}"
        for what in (
            "code=theirs instead of ours",
            "data=nothing instead of the same",
            "torch=new instead of nothing",
            "code=nothing instead of ours, data=nothing instead of the same",
        )
    ]
    refused = [name for name in likenesses if shared.check([f"{desk.call}/seat/{name}"])]
    assert refused == ([] if mixed else ["other", "less", "more", "nothing"])


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_world_of_environment_variables_opens_its_store_on_loopback(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(store.STORE_FD, raising=False)  # of the world that other tests share
    opened = store._open(0, 2, timedelta(seconds=5))
    assert [listener.address for listener in own_listeners() if listener.port == port] == ["127.0.0.1"]
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    opened.set("x", "1")
    assert client.get("x") == b"1"


def test_a_name_of_this_host_is_loopback_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, names = socket.getaddrinfo, {"here": ["127.0.1.1"], "both": ["127.0.0.1", "192.0.2.1"]}
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda host, port: [found for name in names.get(host, [host]) for found in lookup(name, port)],
    )  # fmt: skip
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert is_here("here") and is_here("::1") and is_here("::ffff:127.0.0.1") and is_here("localhost")
    assert not is_here("both") and not is_here("192.0.2.1") and not is_here("no such name")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # other hosts may reach it by this name
    assert not is_here("here") and is_here("127.0.0.1")


def test_a_world_at_a_loopback_address_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only RANK, WORLD_SIZE and the address say what the world is."""
    for variable in (*INTERFACE_VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "192.0.2.1")):
        monkeypatch.setenv(name, value)
    session.stay_on_loopback()
    assert not any(variable in os.environ for variable in INTERFACE_VARIABLES)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    session.stay_on_loopback()
    assert {os.environ.pop(variable) for variable in INTERFACE_VARIABLES} == {loopback_interface()}


def test_a_socket_listens_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with listening("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_a_host_without_the_interface_of_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorldAddress("10.0.0.1", 1, "eth77", "", 2, "elsewhere", 1, 1)
    for variable in INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UnreachableError, match=r"interface eth77, which .* set TP_SOCKET_IFNAME to .* one of .*lo"):
        WorldConnection(place)
    for variable in INTERFACE_VARIABLES:
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
