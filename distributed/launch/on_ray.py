"""Starts the ranks on the hosts of a Ray cluster: one that runs already, or one of this host alone.

Each worker is an actor, which runs our program as one host of several with one rank. The agents there start the ranks,
and start them again (`elastic`); here actors are started, and their output is printed.
"""

import ctypes
import fcntl
import importlib
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distributed.launch.elastic import SAME_REQUEST_SECONDS, handling
from distributed.launch.meeting import TOKEN
from distributed.launch.processes import FINAL, PREEMPTIONS

ANSWER_SECONDS, LEAVE_SECONDS, _POLL_SECONDS = 5.0, 10.0, 0.1
_STORE_BYTES = 100 * 2**20  # of a cluster of this host alone: only output goes through its object store


class RefusedError(OSError):
    """The cluster cannot run the workers; the message says why, and what to type."""


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

    def room(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        """The number of workers that these nodes can hold, if nothing else runs there."""
        parts = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        # 1e-9: in floating point, 0.3 / 0.1 is below 3.
        return sum(
            min(int(node["Resources"].get(name, 0) / part + 1e-9) for name, part in parts.items()) for node in nodes
        )


class Host:
    """The actor of one rank. Ray sends its code to the hosts, which may lack this package."""

    process: "subprocess.Popen[bytes] | None" = None

    def place(self, program: Sequence[str], folder: str) -> tuple[str, str, int, str]:
        """This host's address, the network interface that has it, a free port there, and what the host lacks."""
        import ray  # is optional

        address = str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control, socket.create_server((address, 0)) as free:
            for _, interface in socket.if_nameindex():
                try:  # 0x8915: SIOCGIFADDR of linux/sockios.h
                    packed_address = fcntl.ioctl(control, 0x8915, struct.pack("16s24x", interface.encode()))[20:24]
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(packed_address) == address:
                    break
            else:
                interface = ""
            lacks = [path for path in (folder, program[0]) if path.startswith("/") and not Path(path).exists()]
            return address, interface, free.getsockname()[1], " and no ".join(lacks)

    def run(
        self, program: Sequence[str], folder: str, variables: Mapping[str, str]
    ) -> Iterator[tuple[str, bytes] | int]:
        """Runs Python with these arguments; yields its output, ("out" or "err", bytes), then its exit code."""
        self.process = subprocess.Popen(
            [sys.executable, *program], cwd=folder, env=os.environ | dict(variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
        )  # fmt: skip
        with self.process as process, selectors.DefaultSelector() as selector:
            for pipe, name in ((process.stdout, "out"), (process.stderr, "err")):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, name)
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


def check(cluster: Cluster, workers: int) -> Cluster:
    """Connects this process to the cluster; returns what each worker reserves there. Raises RefusedError if there is no
    such cluster, or its hosts can never hold the workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unasked
    ray = importlib.import_module("ray")
    try:
        if not ray.is_initialized():
            host, _, port = (cluster.address or "").rpartition(":")
            if host:  # Ray itself would try for a minute
                socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
            # On one host nothing is shared out, so Ray must not refuse workers for want of CPUs.
            alone = {"address": "local", "num_cpus": max(os.cpu_count() or 1, int(cluster.cpus * workers + 0.999)),
                     "object_store_memory": _STORE_BYTES, "include_dashboard": False}  # fmt: skip
            where = alone if cluster.address is None else {"address": cluster.address}
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise RefusedError(
            f"no Ray cluster answers: {str(error).splitlines()[0]}; start one by ray start --head, and type "
            "launch.ray.address=HOST:6379; or leave launch.ray.address out for a cluster of this host alone"
        ) from error
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if cluster.gpus is None:
        with_gpus = cluster._replace(gpus=1)
        cluster = with_gpus if with_gpus.room(nodes) >= workers else cluster._replace(gpus=0)
    if cluster.room(nodes) < workers and not cluster.grows:
        ray.shutdown()
        has = (f"{n['NodeManagerAddress']} has {n['Resources'].get('CPU', 0):g} CPUs and "
               f"{n['Resources'].get('GPU', 0):g} GPUs" for n in nodes)  # fmt: skip
        raise RefusedError(
            f"the Ray cluster has room for {cluster.room(nodes)} of {workers} workers with {cluster.cpus:g} CPUs and "
            f"{cluster.gpus:g} GPUs each: {'; '.join(has)}; type fewer workers, less of launch.ray.cpus or "
            "launch.ray.gpus, or, for a cluster that starts hosts on demand, launch.ray.grows=true"
        )
    return cluster


def launch(
    program: Sequence[str], variables: Mapping[str, str], cluster: Cluster, workers: int, *, max_restarts: int,
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """Runs Python with the arguments `program` for each worker, in this folder of every host, with these environment
    variables besides the host's own; returns the exit code of rank zero.

    Raises:
        RefusedError: as `check`; or a host lacks the program or the folder.
        BusyError: the workers have no room within `cluster.wait`.
    """
    cluster = check(cluster, workers)
    variables = {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(), **variables}
    ray = importlib.import_module("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    resources = {"CPU": cluster.cpus} | ({"GPU": cluster.gpus} if cluster.gpus else {})
    folder, codes, signals = os.getcwd(), dict[int, int](), list[tuple[float, int]]()  # noqa: PTH109
    # Rank zero writes the run folder, which the user looks for on this host: it is here if there is room.
    here = ray.get_runtime_context().get_node_id()
    first = {"ray.io/node-id": here} if cluster.room([n for n in ray.nodes() if n["NodeID"] == here]) else {}

    def actor(number: int) -> Any:
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
        options = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "max_concurrency": 2}
        return ray.remote(Host).options(scheduling_strategy=place, **options).remote()

    def follow(number: int, actor: Any, arguments: Sequence[str]) -> None:
        code = -signal.SIGKILL  # of the actor, or of its host, if nothing better is known
        try:
            for reference in actor.run.options(num_returns="streaming").remote(arguments, folder, variables):
                value = ray.get(reference)
                if isinstance(value, int):
                    code = value
                else:
                    stream = sys.stdout if value[0] == "out" else sys.stderr
                    stream.buffer.write(value[1])
                    stream.flush()
        except ray.exceptions.RayError as error:
            say(f"worker{number}: {str(error).splitlines()[0]}")
        codes[number] = code

    def start(number: int) -> None:
        flags = [f"launch.node_rank={number}", *(f"launch.interface={name}" for name in [places[number][1]] if name)]
        threading.Thread(target=follow, args=(number, actors[number], [*program, *common, *flags]), daemon=True).start()

    try:
        group = ray.util.placement_group(
            [resources] * workers, strategy="SPREAD" if cluster.spread else "PACK",
            bundle_label_selector=[first] + [{}] * (workers - 1),
        )  # fmt: skip
        if not group.wait(cluster.wait):
            raise BusyError(f"others use what {workers} workers need, for more than {cluster.wait:g} s")
        actors = [actor(number) for number in range(workers)]
        try:
            places = ray.get([each.place.remote(program, folder) for each in actors], timeout=cluster.wait)
        except ray.exceptions.GetTimeoutError as error:
            raise BusyError(f"the cluster has not started all workers within {cluster.wait:g} s") from error
        for address, _, _, lacks in places:
            if lacks:
                needs = "every host needs the program, and a folder that all share"
                raise RefusedError(f"{address}: this host has no {lacks}; {needs}")
        address, _, port, _ = places[0]
        common = [f"launch.master_addr={address}", f"launch.master_port={port}"]
        common += ["launch.ray=null", f"launch.nnodes={workers}", f"workers={workers}"]
        with handling(lambda n, _: signals.append((time.monotonic(), signal.SIGTERM if n in PREEMPTIONS else n))):
            for number in range(workers):
                start(number)
            restarts = sent = 0
            while 0 not in codes:
                time.sleep(_POLL_SECONDS)
                for since, number in signals[sent:]:
                    sent += 1
                    if since - signals[0][0] > SAME_REQUEST_SECONDS:
                        return 128 + number  # the actors end below
                    actors[0].signal.remote(int(number))
                lost = next((number for number, code in codes.items() if number and code and code not in FINAL), None)
                if lost is not None and not signals and restarts < max_restarts:
                    restarts += 1
                    say(f"worker{lost} is lost; restart {restarts} of {max_restarts}")
                    del codes[lost]
                    actors[lost] = actor(lost)
                    start(lost)
            deadline = time.monotonic() + LEAVE_SECONDS
            while len(codes) < workers and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return codes[0] if codes[0] >= 0 else 1
    finally:
        ray.shutdown()  # ends the actors, and gives back what they have reserved
