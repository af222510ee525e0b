"""Ranks with a network of their own: strangers cannot connect to them, and nothing else is different."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.launch.elastic import LaunchConfig, check_isolation
from distributed.launch.isolation import CannotIsolateError
from tests.listeners import listeners
from tests.runs import ROOT, Outcome, Start, metrics, ranks_of, slow, until, why_not_isolable

pytestmark = pytest.mark.thorough

SHORT = (
    "run=seed0", "trainer.meta_batch_size=4", "trainer.task_chunk=2", "trainer.val_every=100000", "trainer.val_tasks=4",
    "trainer.test_tasks=4", "logger.every=1", "logger.tensorboard=false", "logger.plots=false",
    "logger.report=false", "model.filters=16",
)  # fmt: skip
RUN = Path("outputs/maml_glyphs/seed0")

OWN_NETWORK = "in a network of this run's own"
OPEN = "Every user of this host can connect there and run code here, since this run has no network of its own"

NO_MORE_NETWORKS = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
"""For a shell in a user namespace of its own: there the kernel then refuses network namespaces."""

INSIDE = """
import os, socket
from pathlib import Path
from distributed.launch.isolation import enter_network, new_network

network, listener = new_network("127.0.0.1", 0)
address = listener.getsockname()
Path("secret").write_text("of the user")
Path("secret").chmod(0o400)


def rights():
    status = Path("/proc/self/status").read_text()
    return os.geteuid(), os.getegid(), [line for line in status.splitlines() if line[:6] in ("CapPrm", "CapEff")]


before = rights()
try:
    socket.create_connection(address)
except ConnectionRefusedError:
    print("refused")
child = os.fork()
if child == 0:
    enter_network(network)
    print([name for _, name in socket.if_nameindex()], rights() == before, Path("secret").read_text())
    Path("made").write_text("")
    print(Path("secret").stat().st_uid, Path("secret").stat().st_gid)
    socket.create_connection(address).close()
    print("connected", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(Path("made").stat().st_uid, Path("made").stat().st_gid)
"""


@pytest.fixture(scope="module")
def isolable() -> None:
    """Skips where the kernel refuses networks of their own."""
    reason = why_not_isolable()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")


def connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("strategy", "isolate"),
    [
        ("rpc", "auto"),
        pytest.param("rpc", "false", marks=slow),
        pytest.param("ddp", "auto", marks=slow),
        pytest.param("ddp", "false", marks=slow),
    ],
)
def test_a_stranger_connects_to_no_port_of_an_isolated_world(
    strategy: str, isolate: str, isolable: None, start: Start, tmp_path: Path
) -> None:
    own = ("trainer.steps=100000", "workers=2", f"strategy={strategy}", f"launch.isolate={isolate}")
    program = start(*SHORT, *own)
    until(lambda: len(metrics(tmp_path / RUN)) >= 2, "step 2")
    ranks = ranks_of(program)
    addresses = {address for rank in ranks for address in listeners(rank)}
    assert len(ranks) == 2 and len(addresses) >= 3
    assert {connects(*address) for address in addresses} == {isolate == "false"}, addresses
    host = Path("/proc/self/ns/net").readlink()
    networks = {Path(f"/proc/{rank}/ns/net").readlink() for rank in ranks}
    assert len(networks) == 1 and (host in networks) == (isolate == "false")
    line, other = (OPEN, OWN_NETWORK) if isolate == "false" else (OWN_NETWORK, OPEN)
    assert line in program.said() and other not in program.said()
    program.process.terminate()
    outcome = program.wait()
    assert outcome.code == 143, outcome.text


def test_isolated_ranks_compute_the_same_bits(isolable: None, start: Start, tmp_path: Path) -> None:
    params = {}
    for name, own in (
        ("isolated-alone", ("launch.isolate=true", "strategy=rpc")),
        ("isolated", ("launch.isolate=true", "workers=2")),
        ("open", ("launch.isolate=false", "workers=2")),
    ):
        outcome = start(*SHORT, "trainer.steps=5", f"run={name}", *own).wait()
        assert outcome.code == 0, outcome.text
        assert (OWN_NETWORK in outcome.text) == name.startswith("isolated"), outcome.text
        params[name] = (tmp_path / RUN.with_name(name) / "checkpoints/last/params.safetensors").read_bytes()
    assert len(set(params.values())) == 1


@pytest.mark.parametrize(
    "ordinary", [pytest.param(False, marks=slow), True], ids=["this-user", "a-user-without-rights"]
)
def test_the_user_and_files_stay_as_they_are(ordinary: bool, isolable: None, tmp_path: Path) -> None:
    user, group = (1000, 1000) if ordinary else (os.geteuid(), os.getegid())
    become = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if ordinary else []
    done = subprocess.run(
        [*become, sys.executable, "-c", INSIDE],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused", "['lo'] True of the user", f"{user} {group}", "connected", f"{user} {group}"
    ]  # fmt: skip


# What is not isolated


def without_networks(*overrides: str, folder: Path) -> Outcome:
    """Runs train.py where the kernel refuses network namespaces."""
    program = [sys.executable, str(ROOT / "train.py"), *overrides]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", NO_MORE_NETWORKS, "sh", *program],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout)


@slow
def test_without_namespaces_auto_warns_and_true_is_refused(isolable: None, tmp_path: Path) -> None:
    own = (*SHORT, "trainer.steps=2", "workers=2")
    outcome = without_networks(*own, folder=tmp_path)
    assert outcome.code == 0 and f"{OPEN} ([Errno 28] unshare: " in outcome.text, outcome.text
    outcome = without_networks(*own, "workers=1", "run=other", "launch.isolate=true", folder=tmp_path)
    assert outcome.code == 2 and "launch.isolate=true: these ranks cannot have a network" in outcome.text, outcome.text
    assert "[Errno 28] unshare: " in outcome.text and "type launch.isolate=auto" in outcome.text
    assert not (tmp_path / RUN.with_name("other")).exists()


@pytest.mark.parametrize(
    "wish", [{"nnodes": 2, "interface": "lo"}, {"interface": "eth9"}, {"master_addr": "10.0.0.1"}], ids=str
)
def test_what_needs_the_network_of_the_host_is_not_isolated(wish: dict[str, Any]) -> None:
    config = LaunchConfig(2, **wish)
    check_isolation(config)
    key, value = next(iter(wish.items()))
    with pytest.raises(CannotIsolateError, match=f"^{key}={value}$"):
        check_isolation(config._replace(isolate=True))


def test_torchrun_is_refused_where_ranks_must_be_isolated(start: Start) -> None:
    outcome = start("launch.isolate=true", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2").wait()
    assert outcome.code == 2 and "python train.py workers=2 launch.isolate=true" in outcome.text, outcome.text
