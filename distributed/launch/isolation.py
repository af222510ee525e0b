"""A network of its own for the ranks of one host (Linux), so that no other user of the host can connect to them.

TensorPipe executes what it is sent and asks for no password: a user who reaches a rank's port can run code there. In a
network namespace (network_namespaces(7)) only the ranks are on the loopback interface, and there is no other one.
Files and processes stay as they are.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from distributed.info import is_loopback, listening, on_one_host
from distributed.launch.processes import LAUNCHER, STOPS

# Environment variable of a rank that our launcher has started: why it is not isolated; empty if it is.
NOT_ISOLATED = "DISTRIBUTED_NOT_ISOLATED"

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_INTERFACE_REQUEST = "16sh22x"  # struct ifreq: name, flags
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h


class CannotIsolateError(OSError):
    """The ranks cannot have a network of their own; the message is the cause."""


def enter_network(network: Sequence[int]) -> None:
    """Moves this process into a network of `new_network`, and closes its descriptors. The process must have one thread
    only, as after a fork. Raises OSError if the kernel refuses."""
    for namespace in network:
        _call("setns", namespace, 0)
        os.close(namespace)
    if len(network) > 1:  # a user namespace, whose capabilities would open read-only files for writing
        _call("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))


def exposure() -> str:
    """A line for the log: who can connect to the ranks of this world."""
    obstacle = os.environ.get(NOT_ISOLATED, "no launcher of workers=N has started it")
    if not obstacle:
        return "listening: in a network of this run's own: no other user can connect"
    if on_one_host() or is_loopback(os.environ.get("MASTER_ADDR", "")):
        line = (
            "listening: on loopback. Every user of this host can connect there and run code here, since this run has "
            f"no network of its own ({obstacle})"
        )
    else:
        line = "listening: open to other hosts: anyone who connects, and every user of this host, can run code here"
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ:
        line += ". torchrun's own store is open to other hosts; "
        line += "workers=N without torchrun keeps a run on one host closed"
    return line


def new_network(address: str, port: int) -> tuple[list[int], socket.socket]:
    """Makes a network, and in it a socket that listens on `address`:`port`; returns descriptors of the network, in the
    order to enter its namespaces. It exists as long as a process is in it, or has one of its sockets or descriptors.
    This process stays where it is. Raises CannotIsolateError if the kernel refuses, or this system has none."""
    if not sys.platform.startswith("linux"):
        raise CannotIsolateError(f"{sys.platform} has no network namespaces")
    parent, child = socket.socketpair()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with parent, child:
        pid = os.fork()  # a process with several threads could not unshare its user namespace
        if pid == 0:
            _make_network(child, address, port)
        child.close()
        message, descriptors, _, _ = socket.recv_fds(parent, 4096, 3, socket.MSG_CMSG_CLOEXEC)
        os.waitpid(pid, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if not descriptors:
        raise CannotIsolateError(message.decode() or "the process that makes the network has failed")
    listener, *network = descriptors
    return network, socket.socket(fileno=listener)


def _make_network(parent: socket.socket, address: str, port: int) -> NoReturn:
    """Runs in a fork: makes the network; sends the descriptors of a listening socket and of the namespaces."""
    try:
        namespaces = _unshare()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_INTERFACE_REQUEST, b"lo", _IFF_UP))
        listener = listening(address, port)
        _call("setns", namespaces[-1], 0)  # changes nothing here, but a filter of system calls may forbid it
        socket.send_fds(parent, [b"made"], [listener.fileno(), *namespaces])
    except OSError as error:
        parent.send(str(error).encode())
    finally:
        os._exit(0)


def _unshare() -> list[int]:
    """Leaves the host's network; returns descriptors of the new namespaces, in the order to enter them."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNET)
        names = ["net"]
    except PermissionError:
        if user == 0:  # in a user namespace root could not read the files of other users
            raise
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
        # User and group are mapped to themselves, so files and their owners are as before.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="utf-8")
        names = ["user", "net"]
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def _call(name: str, *arguments: int | bytes) -> None:
    """Calls a function of the C library that returns 0. Raises OSError if it returns something else."""
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
