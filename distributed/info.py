"""Rank, world size and worker name of this process, read from the environment variables of torchrun and `launch`."""

import ipaddress
import os
import socket
from typing import NamedTuple

DEFAULT_TIMEOUT = 60.0  # seconds that a remote call may take unless a caller sets another limit
GOODBYE_SECONDS = 5.0  # time limit for the workers to leave together, and for an interrupted call to end
# Bounds of a time limit in seconds. torch counts milliseconds in 32 bits: below 1 ms is no limit, more overflows.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.001, 2_000_000.0
# Environment variables that set the network interface of torch's transports.
INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_session_name: str | None = None  # of this worker
_last_info: "WorldInfo | None" = None


class WorldInfo(NamedTuple):
    """This process's number among all processes, and among those of its host."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        return self.world_rank

    @property
    def worker_name(self) -> str:
        return _session_name or default_worker_name(**self._asdict())


def set_worker_name(name: str | None) -> None:
    """Sets this worker's name for the time of a session; None: the default name."""
    global _session_name
    _session_name = name


def get_world_info() -> WorldInfo:
    """From RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them, a world of one process. As in the original,
    the values are also attributes of this function: `get_world_info.world_rank`, `.WORLD_RANK`. Raises ValueError if
    one is no number, or there is one of the first two without the other."""
    global _last_info
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ) or rank >= size:
        pair = " and ".join(f"{name}={os.environ.get(name, 'unset')}" for name in ("RANK", "WORLD_SIZE"))
        raise ValueError(f"{pair}: both must be set, and RANK must be below WORLD_SIZE; start the program by torchrun")
    info = WorldInfo(rank, size, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))
    if info != _last_info:
        values = info._asdict() | {"rank": rank, "world_info": info}
        vars(get_world_info).update(values | {name.upper(): value for name, value in values.items()})
        _last_info = info
    return info


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{variable}={value!r:.60}: must be a whole number from 0; start the program by torchrun")
    return int(value)


def get_world_rank() -> int:
    return get_world_info().world_rank


get_rank = get_world_rank


def get_world_size() -> int:
    return get_world_info().world_size


def get_local_rank() -> int:
    return get_world_info().local_rank


def get_local_world_size() -> int:
    return get_world_info().local_world_size


def default_worker_name(world_rank: int, world_size: int, local_rank: int = 0, local_world_size: int = 1) -> str:
    """worker0, worker1, …, zero-padded to the width of the world size."""
    return f"worker{world_rank:0{len(str(world_size))}d}"


def name_of_rank(rank: int) -> str:
    """The default name of the worker with this rank in this world."""
    return default_worker_name(rank, get_world_size())


def on_one_host() -> bool:
    """Whether all processes of the world are on this host."""
    info = get_world_info()
    return info.local_world_size == info.world_size


def loopback_interface() -> str:
    """The name of this host's loopback interface."""
    return "lo0" if "lo0" in [name for _, name in socket.if_nameindex()] else "lo"


def use_interface(name: str) -> None:
    """From now on torch opens the connections of this process on this network interface."""
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, name))


def stay_on_loopback() -> None:
    """If the world is on one host, or meets at a loopback address: torch listens on loopback only from now on."""
    if on_one_host() or is_loopback(os.environ.get("MASTER_ADDR", "")):
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, loopback_interface())


def is_loopback(address: str) -> bool:
    """Whether an address is one that no other host reaches."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def is_here(address: str) -> bool:
    """As `is_loopback`; also for a name of which all addresses are such, in a world on one host. In another world a
    host may call itself so, as Debian does, and the others reach it by the same name."""
    if is_loopback(address) or not on_one_host():
        return is_loopback(address)
    try:
        places = [place for *_, place in socket.getaddrinfo(address, None)]
    except OSError:  # the name is not known
        return False
    return all(is_loopback(str(place[0]).partition("%")[0]) for place in places)


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens on an address of either kind, or on the first address of a name."""
    (family, *_, place) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(place[0])
    if host.startswith("::ffff:"):  # an address of IPv4, which a socket that listens on IPv6 alone does not take
        family, host = socket.AF_INET, host.removeprefix("::ffff:")
    return socket.create_server((host, port), family=family)


def check_timeout(seconds: float) -> None:
    """Raises ValueError if `seconds` is not a time limit."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not SHORTEST_TIMEOUT <= seconds <= LONGEST_TIMEOUT:
        bounds = f"{SHORTEST_TIMEOUT:g} to {LONGEST_TIMEOUT:.0f}"
        raise ValueError(f"timeout={seconds!r}: must be a number of seconds from {bounds}, such as 60")
