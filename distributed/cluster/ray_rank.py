"""The actor that runs one rank of `on_ray`. Ray sends this file's code to the hosts, which may lack this package. So it
imports nothing of ours, and no torch."""

import fcntl
import os
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACE_REQUEST = "16s24x"  # struct ifreq: name, address

Event = tuple[str, bytes | int]
"""("out" or "err", bytes) of the rank's output, ("sign", 0) when it has met the others, and from
then on as a sign of life, ("end", exit code)."""


class Rank:
    """One rank: a process of the program, which ends with this actor."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def place(self, arguments: Sequence[str], folder: str) -> tuple[str, str, str, str]:
        """The node of the cluster, its address, the network interface that has this address, and what the node lacks
        to run Python with these arguments in a folder: the path, or an empty string."""
        import ray  # is optional

        address = str(ray.util.get_node_ip_address())
        return ray.get_runtime_context().get_node_id(), address, _interface_of(address), _missing(arguments, folder)

    def listen(self, address: str) -> int:
        """Opens the listening socket of the world's store; returns its port."""
        self._listener = socket.create_server((address, 0))
        return int(self._listener.getsockname()[1])

    def run(self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> Iterator[Event]:
        """Runs Python with these arguments in a folder, with environment variables besides the host's own; yields its
        events. In the variables, the values `{store}`, `{met}` and `{pid}` stand for the numbers of the store's
        descriptor, of the pipe's descriptor and of this process."""
        met, note = os.pipe()
        store = -1 if self._listener is None else self._listener.fileno()
        places = {"{store}": str(store), "{met}": str(note), "{pid}": str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, pass_fds=[fd for fd in (store, note) if fd >= 0],
            env=os.environ | {name: places.get(value, value) for name, value in variables.items()},
        )  # fmt: skip
        os.close(note)  # else the pipe would stay open when the rank ends without having met the others
        if self._listener is not None:
            self._listener.close()  # the rank has its own copy
        yield from _events(self._process, met)
        yield "end", self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def _missing(arguments: Sequence[str], folder: str) -> str:
    if not Path(folder).is_dir():
        return folder
    program = arguments[0]
    return program if program.startswith("/") and not Path(program).exists() else ""


def _events(process: "subprocess.Popen[bytes]", met: int) -> Iterator[Event]:
    """The events of a process until it closes its output: the output, and its signs of life."""
    assert process.stdout is not None and process.stderr is not None
    kinds = {process.stdout.fileno(): "out", process.stderr.fileno(): "err", met: "sign"}
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr, os.fdopen(met, "rb"):
        for descriptor in kinds:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map().keys() - {met}:
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                if data:
                    yield (kinds[key.fd], 0 if key.fd == met else data)
                else:
                    selector.unregister(key.fd)


def _interface_of(address: str) -> str:
    """The name of this host's network interface with an IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack(_INTERFACE_REQUEST, name.encode())
            try:
                answer = fcntl.ioctl(control, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
