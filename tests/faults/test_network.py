"""Who can connect to a run, and to whom it connects: nobody and nothing outside of this host."""

import contextlib
import os
import socket
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from distributed.cluster.listening import listeners
from tests.faults.endless import ENDLESS, started
from tests.runs import ROOT, Program, Start, ranks_of, slow

pytestmark = pytest.mark.thorough


def test_a_run_by_our_launcher_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, "workers=2")
    ranks = started(program, tmp_path)
    by_process = {pid: listeners(pid) for pid in [program.process.pid, *ranks]}
    assert all(by_process[rank] for rank in ranks), "RPC listens somewhere"
    assert all(listener.closed for addresses in by_process.values() for listener in addresses), by_process
    assert "listening: worker0 on 127.0.0.1" in program.said() and "(all loopback" in program.said()


@slow
def test_under_torchrun_only_its_own_store_is_open_and_the_log_names_it(start: Start, tmp_path: Path) -> None:
    program = start(*ENDLESS, torchrun=2)
    ranks = started(program, tmp_path)
    assert all(listener.closed for rank in ranks for listener in listeners(rank))
    open_ones = [listener for listener in listeners(program.process.pid) if not listener.closed]
    output = program.said()
    assert open_ones and "Open to other hosts: torchrun" in output and "python train.py workers=2" in output
    assert "and every user of this host, can run code here" in output


# In a network with a way out


INTO_A_NETWORK = """
import os, subprocess, sys
from tests.links import enter_link
enter_link(0, int(sys.argv[1]))
subprocess.run(["ip", "route", "add", "default", "dev", "link0"], check=True)
for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
    del os.environ[name]
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a program in a network of its own, with an interface beside loopback that the default route leads to."""

NAME_OF_LOOPBACK = b"\x011\x010\x010\x03127\x07in-addr\x04arpa"
"""The question to a name server for the name of 127.0.0.1."""


class Seen(NamedTuple):
    """The exit code of a program, the addresses that its sockets had, and the packets that left."""

    code: int
    addresses: set[str]
    packets: list[bytes]

    @property
    def outside(self) -> set[str]:
        """Addresses outside of loopback, and receivers of packets."""
        own = {address for address in self.addresses if not ip_address(address).is_loopback}
        return own | {str(ip_address(packet[16:20])) for packet in self.packets}


def seen(folder: Path, *command: str) -> Seen:
    """Runs a program in a network with a way out, and looks at it until it ends."""
    own, theirs = socket.socketpair()
    with own, theirs:
        program = Program(
            [sys.executable, "-c", INTO_A_NETWORK, str(theirs.fileno()), *command],
            folder, {"PYTHONPATH": str(ROOT)}, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        _, links, _, _ = socket.recv_fds(own, 16, 1)
    if not links:
        pytest.skip(f"no network of its own here: {program.wait().text.strip().splitlines()[-1]}")
    os.set_blocking(links[0], False)
    addresses: set[str] = set()
    packets: list[bytes] = []
    while program.process.poll() is None:
        with contextlib.suppress(OSError):  # a process has ended
            for pid in (program.process.pid, *ranks_of(program)):
                addresses |= addresses_of(pid)
        packets += packets_of(links[0])
        time.sleep(0.01)
    packets += packets_of(links[0])
    os.close(links[0])
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    return Seen(outcome.code, addresses, packets)


def addresses_of(pid: int) -> set[str]:
    """The local addresses of all sockets in the network of a process, but for those that ask a name server."""
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            own, other = line.split()[1:3]
            if not (table.startswith("udp") and other.endswith(":0035")):
                words = bytes.fromhex(own.partition(":")[0])
                address = ip_address(b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4)))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def packets_of(link: int) -> list[bytes]:
    """The packets of IPv4 that wait on an interface. Those of IPv6 are the kernel's, which looks for a router."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while packet := os.read(link, 65536):
            if packet[0] >> 4 == 4:
                found.append(packet)
    return found


def test_what_leaves_is_seen(tmp_path: Path) -> None:
    """The control of the next test."""
    code = """
import socket
server = socket.create_server(("0.0.0.0", 0))
socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))
client = socket.socket()
client.settimeout(1)
client.connect_ex(("192.0.2.2", 80))
"""
    assert {"0.0.0.0", "192.0.2.1", "192.0.2.2"} <= seen(tmp_path, sys.executable, "-c", code).outside


@slow
@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
@pytest.mark.parametrize("isolate", ["false", "auto"])
def test_two_workers_on_one_host_use_loopback_only(strategy: str, isolate: str, tmp_path: Path) -> None:
    """Without a network of its own, torch's store asks the name server for the name of 127.0.0.1, and nothing else."""
    overrides = (*ENDLESS, "trainer.steps=20", "trainer.test_tasks=4", f"strategy={strategy}", "workers=2")
    looked = seen(tmp_path, sys.executable, str(ROOT / "train.py"), *overrides, f"launch.isolate={isolate}")
    if isolate == "false":
        looked = looked._replace(packets=[packet for packet in looked.packets if NAME_OF_LOOPBACK not in packet])
    assert "127.0.0.1" in looked.addresses
    assert not looked.outside, looked
