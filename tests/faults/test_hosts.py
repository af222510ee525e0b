"""Two hosts, with a disk in common or without: the same bits as on one, a clean end on both, and a link that is cut."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import INTERFACE, Hosts
from tests.runs import ROOT, Outcome, Program, assert_same_bytes, metrics, slow, until

pytestmark = pytest.mark.thorough

TINY = (
    "experiment=maml_sinusoid", "trainer.steps=6", "trainer.meta_batch_size=8", "trainer.task_chunk=2",
    "trainer.val_every=3", "trainer.val_tasks=8", "trainer.test_tasks=8", "logger.every=1", "logger.tensorboard=false",
    "logger.plots=false", "logger.report=false", "hydra.run.dir=run",
)  # fmt: skip

ENDLESS = (*TINY, "trainer.steps=1000000", "trainer.val_every=1000000", "strategy.timeout=6")

SECONDS, TIMEOUT = 120.0, 200
"""How long both hosts may take in all; and `strategy.timeout`, for which a host would wait that nobody has told of the
end."""

PORT = 29500


def two_hosts() -> Hosts:
    """Skips where the kernel permits no networks of one's own."""
    try:
        return Hosts()
    except OSError as error:
        pytest.skip(f"no two hosts on this machine: {error}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = Program([sys.executable, str(ROOT / "train.py"), *TINY], folder).wait()
    assert outcome.code == 0, outcome.text
    return folder / "run"


def by_launcher(hosts: Hosts, node: int) -> list[str]:
    """The program and how it finds the other host."""
    return [
        sys.executable, str(ROOT / "train.py"), "workers=2", "launch.nnodes=2", f"launch.node_rank={node}",
        f"launch.master_addr={hosts.address(0)}", f"launch.master_port={PORT}",
    ]  # fmt: skip


def by_torchrun(hosts: Hosts, node: int) -> list[str]:
    """The same by torchrun; `is_host` and `local_addr` since both hosts have this machine's name."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={hosts.address(0)}:{PORT}", f"--rdzv_conf=is_host={1 - node}",
        f"--local_addr={hosts.address(node)}", str(ROOT / "train.py"),
    ]  # fmt: skip


HOW = {"launcher": by_launcher, "torchrun": by_torchrun}


def started(hosts: Hosts, how: str, folders: list[Path], *overrides: str) -> list[Program]:
    """The same command on both hosts, each in its folder."""
    own = (*overrides, f"launch.interface={INTERFACE}")
    return [hosts.start(node, [*HOW[how](hosts, node), *own], folders[node]) for node in (0, 1)]


def ended(programs: list[Program], seconds: float = SECONDS) -> list[Outcome]:
    try:
        return [program.wait(seconds) for program in programs]
    finally:
        for program in programs:
            program.kill()


ALL = [(how, strategy, disks) for how in HOW for strategy in ("rpc", "ddp") for disks in (1, 2)]


@slow  # tests/metalearn/app/test_sagemaker.py has two hosts in the default set
@pytest.mark.parametrize(("how", "strategy", "disks"), ALL)
def test_two_hosts_compute_the_bits_of_one_and_end_together(
    how: str, strategy: str, disks: int, hosts: Hosts, alone: Path, tmp_path: Path
) -> None:
    """A completed run, too: the second host sees no result if it has a disk of its own."""
    folders = [tmp_path / "host0", tmp_path / f"host{disks - 1}"]
    command = (*TINY, f"strategy={strategy}", f"strategy.timeout={TIMEOUT}")
    outcomes = ended(started(hosts, how, folders, *command))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert_same_bytes(folders[0] / "run", alone)
    assert "6 steps, 2 workers" in outcomes[0].text, "the second host takes part"
    assert disks == 1 or not (folders[1] / "run").exists()
    if how == "torchrun" and disks == 1:
        return
    again = ended(started(hosts, how, folders, *command))
    assert [outcome.code for outcome in again] == [0, 0], again
    assert "test mse" in again[0].text and "step 1/6" not in again[0].text


@slow
@pytest.mark.parametrize(
    ("how", "own"),
    [
        ("launcher", "strategy=ddp"),
        ("launcher", "strategy=rpc"),
        ("torchrun", "strategy=ddp"),
    ],
)
def test_a_cut_ends_both_hosts_and_each_names_the_missing(how: str, own: str, tmp_path: Path) -> None:
    """The torchrun of the second host waits for its own store, and ends only when the link is there again, or by hand:
    so there only what the workers do is checked."""
    with two_hosts() as hosts:
        folders = [tmp_path / "host0", tmp_path / "host1"]
        programs = started(hosts, how, folders, *ENDLESS, "launch.max_restarts=0", *own.split())
        try:
            until(lambda: len(metrics(folders[0] / "run")) >= 3, "step 3")
            hosts.cut()
            first = programs[0].wait(6 + 15 + 15)
            until(lambda: names_first(programs[1].said()), "the name of the first host's worker", SECONDS)
            assert how == "torchrun" or programs[1].wait(SECONDS).code == 1
        finally:
            for program in programs:
                program.kill()
    assert first.code == 1 and "worker1 did not answer within 6 s" in first.text, first.text


def names_first(text: str) -> bool:
    return "worker0 did not answer" in text or "rank 0" in text
