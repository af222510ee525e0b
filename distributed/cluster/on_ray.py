"""Starts the ranks of a program on a Ray cluster: an actor for each, in a placement group with a bundle for each.

Ray places them, and says when one is lost; ranks, restarts and signals are the launcher's, as on one host.
"""

import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distributed.cluster import ray_rank
from distributed.cluster.isolation import NOT_ISOLATED
from distributed.cluster.launch import LAUNCHER, LaunchConfig, Launcher
from distributed.cluster.meeting import JOINS, TOKEN
from distributed.cluster.processes import Process
from distributed.cluster.store import INTERFACE_VARIABLES, MET_FD, STORE_FD, loopback_interface

ANSWER_SECONDS = 5.0
"""Time limit for the cluster's first host to accept a connection."""

_THREADS = 2
"""The threads of an actor: one follows the rank's process, one passes signals on."""

_STORE_BYTES = 100 * 2**20
"""The size of the object store of a cluster of this host alone. Only output goes through it."""

log = logging.getLogger(__name__)


class NoClusterError(OSError):
    """There is no Ray cluster at the address."""


class NoRoomError(OSError):
    """The hosts of the cluster cannot hold the workers. The message says how many they can."""


class BusyError(OSError):
    """The workers did not get what they need within the time to wait: others use it, or it was lost."""


class MissingError(OSError):
    """A host of the cluster lacks the program, or the folder to run it in."""


class Cluster(NamedTuple):
    """A Ray cluster, and the resources that each worker reserves there.

    Attributes:
        address: HOST:PORT, or auto for the cluster of this host; None: one of this host alone, for the time of the run.
        cpus, gpus: of each worker; parts of one are possible. With None, a worker has a GPU if there is one for each.
        spread: on as many hosts as there are, not on as few.
        wait: seconds to wait for what others use at the moment.
        grows: the cluster starts hosts on demand, so those that it has now do not count.
    """

    address: str | None
    cpus: float
    gpus: float | None
    spread: bool
    wait: float
    grows: bool


class Command(NamedTuple):
    """The program of every rank: Python with `arguments`, in a `folder` that every host has, with these environment
    variables besides the host's own."""

    arguments: Sequence[str]
    folder: str
    variables: Mapping[str, str]


class ActorLocation(NamedTuple):
    """The location of an actor: the node of the cluster, its address, and the network interface with this address."""

    node: str
    address: str
    interface: str


def check(cluster: Cluster, workers: int) -> Cluster:
    """Connects this process to the cluster; returns what each worker reserves there.

    Raises:
        NoClusterError: there is none.
        NoRoomError: its hosts can never hold the workers.
    """
    ray = _connected(cluster, workers)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if cluster.gpus is None:
        with_gpus = cluster._replace(gpus=1)
        cluster = with_gpus if _room(nodes, with_gpus) >= workers else cluster._replace(gpus=0)
    room = _room(nodes, cluster)
    if room < workers and not cluster.grows:
        ray.shutdown()
        hosts = "; ".join(f"{node['NodeManagerAddress']} has {_described(node['Resources'])}" for node in nodes)
        each = _described(_bundle(cluster))
        raise NoRoomError(f"the Ray cluster has room for {room} of {workers} workers with {each} each: {hosts}")
    return cluster


def launch(
    command: Command, config: LaunchConfig, cluster: Cluster, *, max_restarts: int, say: Callable[[str], None]
) -> int:
    """As `launch.launch`, on a Ray cluster: runs `command` once for each worker of the config and waits. This process
    prints the output of the ranks.

    Raises:
        NoClusterError, NoRoomError: as `check`.
        BusyError: the workers have no room within `cluster.wait`.
        MissingError: a host lacks the program or the folder.
    """
    cluster = check(cluster, config.workers)
    try:
        group = _reserve(cluster, config.workers)
        return Launcher(lambda: _OnRay(command, config, cluster, group), config, max_restarts, say).run()
    finally:
        _ray().shutdown()  # ends the actors, and gives back what they have reserved


def _ray() -> ModuleType:
    """The package, which is optional."""
    return importlib.import_module("ray")


def _connected(cluster: Cluster, workers: int) -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unasked
    ray = _ray()
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if cluster.address is None:
            # On one host nothing is shared out, so Ray must not refuse workers for want of CPUs.
            enough = max(os.cpu_count() or 1, int(cluster.cpus * workers + 0.999))
            small = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
            ray.init(address="local", num_cpus=enough, **small, **quiet)
        else:
            _knock(cluster.address)
            ray.init(address=cluster.address, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise NoClusterError(str(error).splitlines()[0]) from error
    return ray


def _knock(address: str) -> None:
    """Raises OSError if no process listens there."""
    # Ray itself would try for a minute.
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()


def _bundle(cluster: Cluster) -> dict[str, float]:
    return {"CPU": cluster.cpus} | ({"GPU": cluster.gpus} if cluster.gpus else {})


def _room(nodes: Sequence[Mapping[str, Any]], cluster: Cluster) -> int:
    """The number of workers that the hosts can hold, if nothing else runs there."""
    wanted = _bundle(cluster).items()
    # 1e-9: in floating point, 0.3 / 0.1 is below 3.
    return sum(min(int(node["Resources"].get(name, 0) / part + 1e-9) for name, part in wanted) for node in nodes)


def _described(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _reserve(cluster: Cluster, workers: int) -> Any:
    """The placement group. The first bundle, rank zero's, is on this host if that can hold a worker."""
    ray = _ray()
    # Rank zero writes the run folder, which the user looks for on this host.
    here = ray.get_runtime_context().get_node_id()
    own = [node for node in ray.nodes() if node["NodeID"] == here]
    first = {"ray.io/node-id": here} if _room(own, cluster) else {}
    group = ray.util.placement_group(
        [_bundle(cluster)] * workers, strategy="SPREAD" if cluster.spread else "PACK",
        bundle_label_selector=[first] + [{}] * (workers - 1),
    )  # fmt: skip
    if not group.wait(cluster.wait):
        raise BusyError(f"others use what {workers} workers need, for more than {cluster.wait:g} s")
    return group


class _OnRay:
    """A start of all ranks."""

    def __init__(self, command: Command, config: LaunchConfig, cluster: Cluster, group: Any) -> None:
        self._command, self._config, self._cluster, self._group = command, config, cluster, group
        self._sign: float | None = None
        self._token = os.environ.get(TOKEN) or secrets.token_hex()
        actors = [self._actor(bundle) for bundle in range(config.workers)]
        places = self._found(actors)
        nodes = list(dict.fromkeys(place.node for place in places))  # rank zero's first
        self._bundles = sorted(range(config.workers), key=lambda bundle: nodes.index(places[bundle].node))
        self._places = [places[bundle] for bundle in self._bundles]
        self._waiting = {rank: actors[bundle] for rank, bundle in enumerate(self._bundles)}
        self._address = "127.0.0.1" if len(nodes) == 1 else self._places[0].address
        self._port = _ray().get(self._waiting[0].listen.remote(self._address))

    def _actor(self, bundle: int) -> Any:
        ray = _ray()
        # The hosts of the cluster need not have this package.
        ray.cloudpickle.register_pickle_by_value(ray_rank)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        return ray.remote(ray_rank.Rank).options(
            num_cpus=self._cluster.cpus, num_gpus=self._cluster.gpus, max_concurrency=_THREADS,
            scheduling_strategy=strategy,
        ).remote()  # fmt: skip

    def _found(self, actors: Sequence[Any]) -> list[ActorLocation]:
        """The locations of the actors, once all have started."""
        ray, (arguments, folder, _) = _ray(), self._command
        try:
            answers = ray.get([actor.place.remote(arguments, folder) for actor in actors], timeout=self._cluster.wait)
        except ray.exceptions.GetTimeoutError as error:
            raise BusyError(f"the Ray cluster has not started all workers within {self._cluster.wait:g} s") from error
        for _, address, _, missing in answers:
            if missing:
                raise MissingError(f"{address}: this host of the Ray cluster has no {missing}")
        return [ActorLocation(*answer[:3]) for answer in answers]

    def rank(self, number: int, *, joins: bool = False) -> Process:
        actor = self._actor(self._bundles[number]) if joins else self._waiting.pop(number)
        arguments, folder, own = self._command
        variables = {**own, **self._variables(number), **({JOINS: "1"} if joins else {})}
        run = actor.run.options(num_returns="streaming")
        return _RayProcess(actor, run.remote(arguments, folder, variables), self._note_sign)

    def _variables(self, number: int) -> dict[str, str]:
        place = self._places[number]
        neighbours = [rank for rank, other in enumerate(self._places) if other.node == place.node]
        interface = loopback_interface() if self._address == "127.0.0.1" else place.interface
        inherited = {} if number else {STORE_FD: "{store}", MET_FD: "{met}"}
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(self._config.workers),
            "LOCAL_RANK": str(neighbours.index(number)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._port),
            LAUNCHER: "{pid}",
            NOT_ISOLATED: "Ray has started it",
            TOKEN: self._token,
        } | inherited | (dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {})  # fmt: skip

    def last_sign(self) -> float | None:
        return self._sign

    def _note_sign(self) -> None:
        self._sign = time.monotonic()

    def close(self) -> None:
        for actor in self._waiting.values():
            _ray().kill(actor)


class _RayProcess:
    """A rank as the launcher sees it. A thread follows its events."""

    def __init__(self, actor: Any, events: Any, note_sign: Callable[[], None]) -> None:
        self._actor, self._note_sign = actor, note_sign
        self._code: int | None = None
        threading.Thread(target=self._follow, args=(events,), daemon=True).start()

    def _follow(self, events: Any) -> None:
        ray = _ray()
        code = -signal.SIGKILL  # of the actor, or of its host, if nothing better is known
        try:
            for reference in events:
                kind, value = ray.get(reference)
                if kind == "sign":
                    self._note_sign()
                elif kind == "end":
                    code = value
                else:
                    stream = sys.stdout if kind == "out" else sys.stderr
                    stream.buffer.write(value)
                    stream.flush()
            ray.kill(self._actor)  # a new process may need what it has reserved
        except ray.exceptions.RayError as error:
            log.debug("%s", error)
        finally:
            self._code = code

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, sig: int) -> None:
        if self._code is not None:
            return
        if sig == signal.SIGKILL:
            _ray().kill(self._actor)
        else:
            self._actor.send_signal.remote(int(sig))
