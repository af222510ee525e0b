"""A stand-in for Slurm: its commands on PATH, whose jobs are real processes, all on this machine.

A job's batch script runs once, and again each time that `scontrol requeue` has been called for it. Every task of `srun`
is the first of a process group, to which signals go, as Slurm sends them.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "sacct")
JOB = "7"
STATE = "STAND_IN_SLURM"
"""Environment variable: the folder with the commands and what is known of the job."""


class Slurm:
    """The commands in a folder; `environment` has them on PATH. Stop it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in COMMANDS:
            command = folder / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
            command.chmod(0o755)
        path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {"PATH": path, STATE: str(folder)}

    def signal_batch(self, number: signal.Signals) -> None:
        """As `#SBATCH --signal=B:…` does."""
        os.kill(self._pids("batch")[-1], number)

    def signal_tasks(self, number: signal.Signals) -> None:
        """As `#SBATCH --signal=…` does."""
        for pid in self._pids("tasks"):
            os.killpg(pid, number)

    def ended(self) -> bool:
        return (self._folder / "ended").exists()

    def requeued(self) -> int:
        """How often the batch script has been started again."""
        return len(self._pids("batch")) - 1

    def stop(self) -> None:
        for pid in (*self._pids("supervisor"), *self._pids("tasks")):
            if not self.ended():
                os.killpg(pid, signal.SIGKILL)

    def _pids(self, name: str) -> list[int]:
        path = self._folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def sbatch(arguments: Sequence[str]) -> int:
    """Starts the job: `sbatch SCRIPT ARGUMENTS`."""
    state = Path(os.environ[STATE])
    supervisor = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "supervise", *arguments], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=(state / "output").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    (state / "supervisor").write_text(f"{supervisor.pid}\n")
    print(f"Submitted batch job {JOB}")
    return 0


def supervise(arguments: Sequence[str]) -> int:
    """Runs the batch script, with a variable for each of its options that srun needs."""
    state = Path(os.environ[STATE])
    lines = Path(arguments[0]).read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    nodes = int(options["nodes"])
    job = {
        "SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS": str(nodes),
        "SLURM_JOB_NODELIST": ",".join(["localhost"] * nodes),
    }  # fmt: skip
    restarts = 0
    while True:
        variables = os.environ | job | {"SLURM_RESTART_COUNT": str(restarts)}
        batch = subprocess.Popen(["bash", *arguments], env=variables)
        with (state / "batch").open("a") as file:
            file.write(f"{batch.pid}\n")
        batch.wait()
        if not (state / "requeue").exists():
            break
        (state / "requeue").unlink()
        restarts += 1
    (state / "ended").touch()
    return 0


def srun(arguments: Sequence[str]) -> int:
    """Runs a command once on each node; passes SIGTERM on."""
    parser = argparse.ArgumentParser()
    for name in ("--output", "--error", "--kill-on-bad-exit"):
        parser.add_argument(name)
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    tasks = []
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
        own = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
        own["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
        name = (options.output or "").replace("%j", JOB).replace("%t", str(node))
        output = Path(name).open("a") if name else None  # noqa: SIM115 (the task's)
        tasks.append(
            subprocess.Popen(
                options.command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        )
    (Path(os.environ[STATE]) / "tasks").write_text("".join(f"{task.pid}\n" for task in tasks))
    signal.signal(signal.SIGTERM, lambda number, frame: [os.killpg(task.pid, number) for task in tasks])
    return max(task.wait() for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    if arguments[0] == "requeue":
        assert list(arguments) == ["requeue", JOB]
        (Path(os.environ[STATE]) / "requeue").touch()
    else:
        assert arguments[:2] == ["show", "hostnames"]
        print(*arguments[2].split(","), sep="\n")
    return 0


def sacct(arguments: Sequence[str]) -> int:
    state = "COMPLETED" if (Path(os.environ[STATE]) / "ended").exists() else "RUNNING"
    print(f"JobID|State|NodeList\n{JOB}|{state}|localhost")
    return 0


if __name__ == "__main__":
    commands = {one.__name__: one for one in (sbatch, supervise, srun, scontrol, sacct)}
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
