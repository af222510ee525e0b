"""Emulated links: every rank in a network of its own (Linux), joined by a switch with a given latency and rate.

A rank makes a network namespace (network_namespaces(7)) with a TUN interface, and hands the interface to the switch,
which reads and writes its packets. A packet leaves when the ones before it have left at the link's rate, travels for
the latency, and comes in at the rate of the receiver's link. Nothing is lost.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_INTERFACE = "link0"
_PACKET = 9_000
_RECEIVER = slice(16, 20)  # of an IPv4 header

_SETTINGS = {
    "tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 8388608 33554432", "tcp_wmem": "4096 8388608 33554432",
}  # fmt: skip
"""So that TCP itself neither waits nor holds back: the links are what is measured."""


def address_of(rank: int) -> str:
    return f"10.99.0.{rank + 1}"


def enter_link(rank: int, channel: int) -> None:
    """Moves this process into a network of its own, and hands its interface to the switch by a socket's descriptor.

    The process must have one thread only.

    Raises:
        OSError: the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare: this system does not permit networks of one's own")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="utf-8")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    for name, value in _SETTINGS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="utf-8")
    commands = (
        "link set lo up", f"link set {_INTERFACE} mtu {_PACKET} txqueuelen 10000 up",
        f"addr add {address_of(rank)}/32 dev {_INTERFACE}",
        f"route add 10.99.0.0/16 dev {_INTERFACE} initcwnd 1000 initrwnd 1000",
    )  # fmt: skip
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    os.environ |= {"TP_SOCKET_IFNAME": _INTERFACE, "GLOO_SOCKET_IFNAME": _INTERFACE}
    with socket.socket(fileno=channel) as handed:
        socket.send_fds(handed, [b"link"], [tun])
    os.close(tun)


class Switch:
    """Joins the ranks' links.

    Args:
        ranks: how many there are.
        latency: seconds, one way.
        rate: bytes a second, in each direction.

    Attributes:
        channels: by rank, the descriptor that `enter_link` needs.
    """

    def __init__(self, ranks: int, latency: float, rate: float) -> None:
        self._latency, self._rate = latency, rate
        pairs = [socket.socketpair() for _ in range(ranks)]
        self._own, self._theirs = [own for own, _ in pairs], [theirs for _, theirs in pairs]
        self.channels = [theirs.fileno() for theirs in self._theirs]
        self._stopping, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Switch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.close()
        self._thread.join()
        for end in (*self._own, *self._theirs, self._stopping):
            end.close()

    def _run(self) -> None:
        links: dict[int, int] = {}
        ranks: dict[bytes, int] = {}
        free_out = dict.fromkeys(range(len(self._own)), 0.0)
        free_in = dict(free_out)
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = count()
        ends: dict[Any, int] = {end: rank for rank, end in enumerate(self._own)}
        while True:
            now = time.perf_counter()
            while waiting and waiting[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(waiting)
                _write(links[receiver], packet)
            patience = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
            ready, _, _ = select.select([self._stopping, *ends, *links.values()], [], [], patience)
            if self._stopping in ready:
                break
            for end in ready:
                if end in ends:
                    rank = ends.pop(end)
                    _, (links[rank],), _, _ = socket.recv_fds(end, 16, 1)
                    ranks[socket.inet_aton(address_of(rank))] = rank
            for rank, link in links.items():
                if link in ready:
                    packet = os.read(link, _PACKET + 64)
                    receiver = ranks.get(packet[_RECEIVER], -1)
                    if receiver < 0:
                        continue
                    seconds, now = len(packet) / self._rate, time.perf_counter()
                    free_out[rank] = max(now, free_out[rank]) + seconds
                    free_in[receiver] = max(free_out[rank] + self._latency, free_in[receiver] + seconds)
                    heapq.heappush(waiting, (free_in[receiver], next(numbers), receiver, packet))
        for link in links.values():
            os.close(link)


def _write(link: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the rank has ended
        os.write(link, packet)
