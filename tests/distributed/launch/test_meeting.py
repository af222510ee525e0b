"""How the ranks of a world meet on its store, and what listens where: one process each time."""

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from distributed.info import INTERFACE_VARIABLES, is_here, listening, loopback_interface, stay_on_loopback
from distributed.launch import meeting
from tests.listeners import listeners


def asking(shared: dist.Store, rank: int, likeness: dict[str, str], answers: dict[int, object]) -> threading.Thread:
    """A rank that asks rank zero to let it in."""

    def ask() -> None:
        try:
            answers[rank] = meeting._request_place(rank, timedelta(seconds=20), time.monotonic() + 20, likeness)
        except meeting.UnlikeWorkerError as error:
            answers[rank] = str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_that_differ_are_refused_unless_they_may(
    mixed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has what an earlier start has left there."""
    shared = dist.HashStore()
    shared.set("call", "of an earlier start")
    monkeypatch.setattr(meeting, "_store", shared)
    monkeypatch.setattr(meeting, "_mixed", mixed)
    ours = {"code": "ours", "data": "the same"}
    others = {1: ours, 2: ours | {"code": "theirs"}, 3: {"code": "ours"}, 4: ours | {"torch": "new"}}
    answers: dict[int, object] = {}
    threads = [asking(shared, rank, likeness, answers) for rank, likeness in others.items()]
    differences = [
        f"rank {rank} on {socket.gethostname()} differs from rank 0: {what}"
        for rank, what in ((2, "code=theirs instead of ours"), (3, "data=nothing instead of the same"),
                           (4, "torch=new instead of nothing"))
    ]  # fmt: skip
    if mixed:
        store = meeting._call_ranks(shared, {1, 2, 3, 4}, time.monotonic() + 20, ours)
        store.set("x", "1")
    else:
        with pytest.raises(meeting.UnlikeWorkerError) as refused:
            meeting._call_ranks(shared, {1, 2, 3, 4}, time.monotonic() + 20, ours)
        assert sorted(str(refused.value).split("; ")) == differences
    for thread in threads:
        thread.join(20)
    if mixed:
        assert sorted(record.getMessage().partition(";")[0] for record in caplog.records) == differences
        assert all(place.get("x") == b"1" for place in answers.values()), "they share an empty store"
    else:
        assert set(answers.values()) == {str(refused.value)}


def test_a_rank_without_the_token_is_ignored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a request count that was signed for another call."""
    monkeypatch.setenv(meeting.TOKEN, "ours")
    signature = meeting._signature("call", "{}")
    assert meeting._opened("call", f"{signature} {{}}".encode()) == {}
    for call, token in (("call", "theirs"), ("another call", "ours")):
        monkeypatch.setenv(meeting.TOKEN, token)
        with pytest.raises(ValueError, match="wrong signature"):
            meeting._opened(call, f"{signature} {{}}".encode())

    class Stranger(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key == "call":
                super().set(f"{value}/request/1", f"{signature} {{}}")

    with pytest.raises(ConnectionError, match="rank 1 of 2 did not come"):
        meeting._call_ranks(Stranger(), {1}, time.monotonic() + 0.3, {})
    assert "rank 1 does not have the token of this run" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_world_from_variables_has_its_store_on_loopback(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)  # of the world that other tests share
    opened = meeting._open(0, 2, timedelta(seconds=5))
    assert [listener.address for listener in listeners(os.getpid()) if listener.port == port] == ["127.0.0.1"]
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    opened.set("x", "1")
    assert client.get("x") == b"1"


def test_a_host_name_is_loopback_if_all_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
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
    stay_on_loopback()
    assert not any(variable in os.environ for variable in INTERFACE_VARIABLES)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    stay_on_loopback()
    assert {os.environ.pop(variable) for variable in INTERFACE_VARIABLES} == {loopback_interface()}


def test_a_socket_listens_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with listening("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"
