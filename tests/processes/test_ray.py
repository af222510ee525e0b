"""launch=ray: what is refused, an actor by itself, and runs on a real cluster of two nodes."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed.launch import on_ray
from metalearn.app import ranks
from metalearn.app.job import installed, to_job
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from tests.runs import Program, Start, alive, assert_same_bytes, metrics, until

TINY = (
    "experiment=maml_sinusoid", "trainer.steps=5", "trainer.val_every=5", "trainer.val_tasks=4",
    "trainer.test_tasks=8", "workers=2",
)  # fmt: skip
OUTPUTS = "outputs/maml_sinusoid"

here_alone = on_ray.Cluster(None, cpus=1, gpus=0, spread=False, wait=1, grows=False)


def node(cpus: float, gpus: float) -> dict[str, object]:
    return {"Alive": True, "NodeManagerAddress": f"10.0.0.{gpus:g}", "Resources": {"CPU": cpus, "GPU": gpus}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of the package: connected to hosts of 8 CPUs with 2 GPUs, and of 4 CPUs without."""
    nodes = [node(8, 2), node(4, 0), node(100, 100) | {"Alive": False}]
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


# Refusals


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"^launch=ray: the package ray is not installed; type pip install ray"):
        to_job(*compose_config(["launch=ray", "workers=2"]), installed(), [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.ray.address=ray://head:10001", r"launch\.ray\.address=ray://head:10001: must be HOST:PORT"),
        ("launch.ray.cpus=0", r"launch\.ray\.cpus=0: must be a finite number above 0"),
        ("launch.ray.gpus=some", r"launch\.ray\.gpus='some': must be a finite number of at least 0"),
        ("launch.ray.wait=-1", r"launch\.ray\.wait=-1: must be"),
        ("launch.ray.spread=2", r"launch\.ray\.spread=2: must be true or false"),
        ("launch.ray=head", r"launch\.ray=head: is a group of keys"),
        ("launch.nnodes=2", r"launch\.nnodes=2: launch=ray places the workers itself"),
        ("launch.isolate=true", r"launch\.isolate=True: launch=ray places the workers itself"),
    ],
)
def test_a_wrong_key_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_job(*compose_config(["launch=ray", "workers=2", override]), installed(), [])


def test_a_cluster_that_does_not_answer_is_named(stand_in: SimpleNamespace) -> None:
    stand_in.is_initialized = lambda: False
    with pytest.raises(ConfigError, match="refused"):
        ranks.connect_to_ray(here_alone._replace(address="127.0.0.1:1"), 2)


@pytest.mark.usefixtures("stand_in")
def test_too_few_cpus_or_gpus_are_named_by_host() -> None:
    message = (
        "room for 2 of 3 workers with 1 CPUs and 1 GPUs each: "
        "10.0.0.2 has 8 CPUs and 2 GPUs; 10.0.0.0 has 4 CPUs and 0 GPUs"
    )
    with pytest.raises(ConfigError, match=message):
        ranks.connect_to_ray(here_alone._replace(gpus=1), 3)
    with pytest.raises(ConfigError, match="room for 3 of 4 workers with 3 CPUs"):
        ranks.connect_to_ray(here_alone._replace(cpus=3), 4)
    assert ranks.connect_to_ray(here_alone._replace(gpus=0.5), 4).gpus == 0.5
    assert ranks.connect_to_ray(here_alone._replace(gpus=1, grows=True), 3).gpus == 1


@pytest.mark.usefixtures("stand_in")
def test_workers_have_gpus_if_there_is_one_for_each() -> None:
    assert ranks.connect_to_ray(here_alone._replace(gpus=None), 2).gpus == 1
    assert ranks.connect_to_ray(here_alone._replace(gpus=None), 3).gpus == 0


def test_a_rank_whose_starter_has_died_ends(start: Start) -> None:
    other = start(*TINY, RANK="0", WORLD_SIZE="2", DISTRIBUTED_LAUNCHER_PID=str(os.getppid())).wait()
    assert (other.code, other.text) == (1, "")


# An actor by itself


def test_an_actor_gives_output_and_exit_code(tmp_path: Path) -> None:
    program = "import os, sys; os.write(1, f'{os.getcwd()} {os.environ[\"X\"]}'.encode()); sys.exit(3)"
    *output, code = on_ray.Host().run(["-c", program], str(tmp_path), {"X": "y"})
    assert (output, code) == ([("out", f"{tmp_path} y".encode())], 3)


def test_an_actor_passes_signals_on() -> None:
    host = on_ray.Host()
    events = host.run(["-c", "import os, time; os.write(1, b'up'); time.sleep(1e9)"], "/", {})
    assert next(events) == ("out", b"up")
    host.signal(signal.SIGTERM)
    assert list(events) == [-signal.SIGTERM]


@pytest.mark.parametrize("missing", ["/no/train.py", "/no/folder"])
def test_an_actor_says_what_its_host_lacks(missing: str, stand_in: SimpleNamespace) -> None:
    stand_in.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    program, folder = (missing, "/") if missing.endswith(".py") else ("-m", missing)
    address, interface, port, lacks = on_ray.Host().place([program], folder)
    assert (address, interface[:2], port > 0, lacks) == ("127.0.0.1", "lo", True, missing)


# A real cluster: two nodes of one CPU each

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **small})
cluster.add_node(**small)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed; type pip install {package.replace('_', '-')}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster."""
    needs("ray")
    command = [sys.executable, "-c", CLUSTER]
    quiet = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet) as head:
        assert head.stdout is not None
        guard = threading.Timer(120, head.kill)
        guard.start()
        address = head.stdout.readline().strip()
        assert address, "the cluster did not start"
        guard.cancel()
        yield address
        head.communicate()


def rank_of(run: str, number: int) -> int:
    """The process id of a rank of a run: a fork of the agent of its host, which has the same command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"run={run}".encode(), f"launch.node_rank={number}".encode()} <= set(words):
            found.append(int(path.name))
    return max(found)


@pytest.mark.thorough
def test_two_nodes_give_the_bits_of_one_host(cluster: str, start: Start, tmp_path: Path) -> None:
    on_two = start(*TINY, "run=ray", "launch=ray", f"launch.ray.address={cluster}")
    outcome = on_two.wait()
    assert outcome.code == 0 and "2 workers; all in" in outcome.text, outcome.text
    assert "listening: open to other hosts" in outcome.text  # two nodes, no loopback
    plain = start(*TINY, "run=plain").wait()
    assert plain.code == 0, plain.text
    assert_same_bytes(tmp_path / OUTPUTS / "ray", tmp_path / OUTPUTS / "plain")


@pytest.mark.thorough
def test_more_workers_than_the_cluster_has_are_refused(cluster: str, start: Start, tmp_path: Path) -> None:
    for override, room in (("workers=3", "room for 2 of 3 workers"), ("device=cuda", "room for 0 of 2 workers")):
        outcome = start(*TINY, "launch=ray", f"launch.ray.address={cluster}", override).wait()
        assert outcome.code == 2 and room in outcome.text, outcome.text
    assert not (tmp_path / "outputs").exists()


def long_run(cluster: str, start: Start, tmp_path: Path, name: str, *overrides: str) -> Program:
    program = start(
        *TINY, f"run={name}", "launch=ray", f"launch.ray.address={cluster}", "trainer.steps=100000", *overrides
    )
    until(lambda: metrics(tmp_path / OUTPUTS / name), "the first line of metrics")
    return program


@pytest.mark.thorough
def test_all_ranks_end_when_one_dies(cluster: str, start: Start, tmp_path: Path) -> None:
    program = long_run(cluster, start, tmp_path, "dies", "launch.max_restarts=0")
    first, second = rank_of("dies", 0), rank_of("dies", 1)
    os.kill(second, signal.SIGKILL)
    outcome = program.wait()
    assert outcome.code == 1 and "worker1 was killed by SIGKILL" in outcome.text, outcome.text
    until(lambda: not alive(first), "the end of rank zero")


@pytest.mark.thorough
def test_a_restart_and_ranks_that_end_with_the_program(cluster: str, start: Start, tmp_path: Path) -> None:
    program = long_run(cluster, start, tmp_path, "again", "launch.max_restarts=1")
    os.kill(rank_of("again", 1), signal.SIGKILL)
    until(lambda: "going on after step" in program.said(), "the restart")
    done = metrics(tmp_path / OUTPUTS / "again")[-1]["step"]
    until(lambda: metrics(tmp_path / OUTPUTS / "again")[-1]["step"] > done, "a step after it")
    first, second = rank_of("again", 0), rank_of("again", 1)
    program.process.kill()
    until(lambda: not alive(first) and not alive(second), "the end of the ranks")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_and_goes_on_from_there(
    number: signal.Signals, cluster: str, start: Start, tmp_path: Path
) -> None:
    program = long_run(cluster, start, tmp_path, "stops")
    program.process.send_signal(number)
    outcome = program.wait()
    assert outcome.code == 128 + number and "stopped after step" in outcome.text, outcome.text
    assert (tmp_path / OUTPUTS / "stops/checkpoints/last").exists()


@pytest.mark.thorough
def test_a_sweep_by_hydras_launcher_has_the_bits_of_a_plain_run(cluster: str, start: Start, tmp_path: Path) -> None:
    needs("hydra_plugins.hydra_ray_launcher")
    one = (*TINY[:-1], "workers=1", "logger.plots=false", "logger.report=false")
    ray = "hydra.launcher.ray.init"
    there = ("hydra/launcher=ray", f"{ray}.address={cluster}", f"+{ray}.object_store_memory=null")
    folders = (f"hydra.sweep.dir={tmp_path / 'grid'}", "hydra.sweep.subdir=${seed}")
    grid = start("--multirun", *one, "seed=0,1", *there, *folders).wait()
    assert grid.code == 0, grid.text
    plain = start(*one, "seed=1", "run=seed1").wait()
    assert plain.code == 0, plain.text
    assert_same_bytes(tmp_path / "grid/1", tmp_path / OUTPUTS / "seed1")
    assert (tmp_path / "grid/0/result.json").exists()
