"""Two hosts on this machine: network namespaces (network_namespaces(7)) that a veth pair joins."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.runs import Program

INTERFACE = "link0"
"""The name of the link on both hosts."""

_HOLD = ("sh", "-c", "echo ready && exec cat")
"""Keeps a namespace until its standard input is closed."""


class Hosts:
    """The two hosts, while this is open. The first one is in a user namespace of its own, in which this user may make
    networks; the second one is in the same.

    Raises:
        OSError: the kernel does not permit it, or a tool is missing.
    """

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._hold("unshare", "--user", "--map-root-user", "--net")
            self._hold(*self.entering(0), "unshare", "--net")
            self._run(0, f"link add {INTERFACE} type veth peer name {INTERFACE} netns {self._holders[1].pid}")
            for node in (0, 1):
                self._run(node, f"addr add {self.address(node)}/24 dev {INTERFACE}")
                for name in ("lo", INTERFACE):
                    self._run(node, f"link set {name} up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def address(self, node: int) -> str:
        return f"10.98.0.{node + 1}"

    def entering(self, node: int) -> list[str]:
        """What a command begins with that runs on a host."""
        pid = self._holders[node].pid
        return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]

    def start(self, node: int, command: Sequence[str], folder: Path) -> Program:
        """Starts a program on a host."""
        folder.mkdir(exist_ok=True)
        return Program([*self.entering(node), *command], folder)

    def cut(self) -> None:
        """Cuts the link; nobody is notified."""
        self._run(1, f"link set {INTERFACE} down")

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()

    def _hold(self, *into: str) -> None:
        holder = subprocess.Popen(
            [*into, *_HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError(holder.stderr.read().strip())

    def _run(self, node: int, arguments: str) -> None:
        done = subprocess.run([*self.entering(node), "ip", *arguments.split()], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {arguments}: {done.stderr.strip()}")
