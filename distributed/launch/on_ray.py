"""Starts the ranks on the hosts of a Ray cluster: one that runs already, or one of this host alone.

Each worker is an actor, which runs our program as one host of several with one rank. The agents there start the ranks,
and start them again (`elastic`); here actors are started, their output is printed, and signals are passed on.
"""

import fcntl
import math
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from distributed.launch.elastic import handling
from distributed.launch.meeting import TOKEN
from distributed.launch.processes import FINAL, die_with

LEAVE_SECONDS, _POLL_SECONDS = 10.0, 0.1


class LackingHostError(OSError):
    """A host lacks what the workers need; the message says what."""


class BusyError(OSError):
    """The workers did not get what they need within the time to wait."""


class Cluster(NamedTuple):
    """A Ray cluster and what each worker reserves there, as in conf/launch/ray.yaml. `address` None: a cluster of this
    host alone; `gpus` None: one for each worker if there are as many."""

    address: str | None
    cpus: float
    gpus: float | None
    spread: bool
    wait: float
    grows: bool

    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def room(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """The number of workers that these nodes can hold, if nothing else runs there."""
        # 1e-9: in floating point, 0.3 / 0.1 is below 3.
        return sum(
            min(int(node["Resources"].get(name, 0) / part + 1e-9) for name, part in self.resources().items())
            for node in nodes
        )


class Host:
    """The actor of one rank. Ray sends its code to the hosts, which may lack this package."""

    process: Any = None

    def place(self, program: Sequence[str], folder: str) -> tuple[str, str, int, str]:
        """This host's address, the network interface that has it, a free port there, and what the host lacks."""
        import ray  # is optional

        address, interface = str(ray.util.get_node_ip_address()), ""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control, socket.create_server((address, 0)) as free:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has no address
                    # 0x8915: SIOCGIFADDR of linux/sockios.h
                    request = fcntl.ioctl(control, 0x8915, struct.pack("16s24x", name.encode()))
                    if socket.inet_ntoa(request[20:24]) == address:
                        interface = name
            port = free.getsockname()[1]
        lacks = [path for path in (folder, program[0]) if path.startswith("/") and not Path(path).exists()]
        return address, interface, port, " and no ".join(lacks)

    def run(self, program: Sequence[str], folder: str, variables: Mapping[str, str]) -> Iterator[Any]:
        """Runs Python with these arguments; yields its output, ("out" or "err", bytes), then its exit code."""
        actor = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's threads block SIGINT, and a child would too
            die_with(actor)

        self.process = subprocess.Popen(
            [sys.executable, *program], cwd=folder, env=os.environ | dict(variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=prepare,
        )  # fmt: skip
        with self.process as process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "out")
            selector.register(process.stderr, selectors.EVENT_READ, "err")
            while selector.get_map():
                for key, _ in selector.select():
                    if data := os.read(key.fd, 65536):
                        yield key.data, data
                    else:
                        selector.unregister(key.fileobj)
        yield process.returncode

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


def launch(
    program: Sequence[str], variables: Mapping[str, str], cluster: Cluster, workers: int, *, max_restarts: int,
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """Runs Python with the arguments `program` for each worker, in this folder of every host, with these environment
    variables besides the host's own; returns the exit code of rank zero. This process must be connected to the cluster,
    and is not afterwards. Raises LackingHostError if a host lacks the program or the folder, and BusyError if the
    workers do not start within `cluster.wait`."""
    import ray

    folder, variables = os.getcwd(), {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(), **variables}  # noqa: PTH109
    ray.cloudpickle.register_pickle_by_value(sys.modules["distributed"])
    host = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_concurrency=2)(Host)
    # Rank zero writes the run folder, which the user looks for on this host: it is here if there is room.
    here = ray.get_runtime_context().get_node_id()
    first = {"ray.io/node-id": here} if cluster.room([n for n in ray.nodes() if n["NodeID"] == here]) else {}

    def actor(number: int) -> Any:
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
        return host.options(scheduling_strategy=place).remote()

    def start(number: int) -> None:
        interface = [f"launch.interface={places[number][1]}"] if places[number][1] else []
        arguments = [*program, *common, f"launch.node_rank={number}", *interface]
        output = actors[number].run.options(num_returns="streaming").remote(arguments, folder, variables)
        outputs[output] = number

    try:
        group = ray.util.placement_group(
            [cluster.resources()] * workers, strategy="SPREAD" if cluster.spread else "PACK",
            bundle_label_selector=[first] + [{}] * (workers - 1),
        )  # fmt: skip
        actors = [actor(number) for number in range(workers)]
        try:
            places = ray.get([each.place.remote(program, folder) for each in actors], timeout=cluster.wait)
        except ray.exceptions.GetTimeoutError as error:
            needs = f"what {workers} workers need is in use, or the cluster has not started them"
            raise BusyError(f"{needs}, for more than {cluster.wait:g} s") from error
        for address, _, _, lacks in places:
            if lacks:
                needs = "every host needs the program, and a folder that all share"
                raise LackingHostError(f"{address}: this host has no {lacks}; {needs}")
        address, _, port, _ = places[0]
        common = [f"launch.master_addr={address}", f"launch.master_port={port}"]
        common += ["launch.ray=null", f"launch.nnodes={workers}", f"workers={workers}"]
        outputs, signals = dict[Any, int](), list[int]()
        for number in range(workers):
            start(number)
        code, restarts, deadline = 1, 0, math.inf
        with handling(lambda number, _: signals.append(number)):
            while outputs and time.monotonic() < deadline:
                ready, _ = ray.wait([*outputs], timeout=_POLL_SECONDS)
                while signals:
                    actors[0].signal.remote(signals.pop(0))
                    max_restarts = restarts  # from now on a worker that ends is not lost
                for output in ready:
                    number = outputs[output]
                    try:
                        value = ray.get(next(output))
                    except ray.exceptions.RayError as error:  # the actor has died, or its host
                        say(f"worker{number}: {str(error).splitlines()[0]}")
                        value = -signal.SIGKILL
                    if isinstance(value, tuple):
                        stream = sys.stdout if value[0] == "out" else sys.stderr
                        stream.buffer.write(value[1])
                        stream.flush()
                        continue
                    del outputs[output]
                    if number == 0:
                        code, deadline, max_restarts = value, time.monotonic() + LEAVE_SECONDS, restarts
                    elif value and value not in FINAL and restarts < max_restarts:
                        restarts += 1
                        say(f"worker{number} is lost; restart {restarts} of {max_restarts}")
                        actors[number] = actor(number)
                        start(number)
        return code if code >= 0 else 1
    finally:
        ray.shutdown()  # ends the actors, and gives back what they have reserved
