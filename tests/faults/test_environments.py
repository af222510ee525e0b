"""Environments that programs are not written for: streams, limits, locales, shells, folders. A command does there what
it does elsewhere, or ends with one line and the right exit code; it never ends with a traceback."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runs import ROOT, slow
from tests.saved import saved_run

pytestmark = pytest.mark.thorough

TINY = (
    "experiment=maml_sinusoid trainer.steps=2 trainer.val_every=2 trainer.val_tasks=4 trainer.test_tasks=4 "
    "trainer.meta_batch_size=2 launch.outputs=$FOLDER/outputs logger.plots=false logger.report=false"
)
COMMANDS = {
    "train": f"train.py {TINY} run=$RUN",
    "workers": f"train.py {TINY} run=$RUN workers=2",
    "evaluate": "scripts/evaluate.py checkpoint=$SAVED output=$FOLDER/evaluated/$RUN trainer.test_tasks=4",
    "help": "train.py --help",
    "wrong": "train.py trainer.step=2",
}
CODES = {"wrong": 2}
NO_MEMORY = {"train": 1, "workers": 1, "evaluate": 1}
REFUSED = dict.fromkeys(COMMANDS, 2)

ENVIRONMENTS = {
    # name: (the command in it, exit codes that are others than usual)
    "as usual": ("$C", {}),
    "stdout read by head": ("$C | head -c 1; exit ${PIPESTATUS[0]}", {}),
    "working folder gone": (
        "mkdir $FOLDER/gone.$RUN && cd $FOLDER/gone.$RUN && rmdir $FOLDER/gone.$RUN && $C",
        REFUSED,
    ),
    "working folder /": ("cd / && $C", {}),
    "ulimit -v 500 MB": ("ulimit -v 500000; $C", NO_MEMORY),
    "ulimit -v 2 GB": ("ulimit -v 2000000; $C", NO_MEMORY),
    "ulimit -n 64": ("ulimit -n 64; $C", {}),
    "ulimit -s 256 kB": ("ulimit -s 256; $C", {}),
    "ulimit -f 8 kB": ("ulimit -f 8; $C", {"train": 1, "workers": 1}),
    "ulimit -c 0, umask 077": ("ulimit -c 0; umask 077; $C", {}),
    "umask 000": ("umask 000; $C", {}),
    "one processor": ("taskset -c 0 $C", {}),
    "nice 5": ("nice -n 5 $C", {}),  # not 19: the tests beside would leave it no time
    "SIGCHLD ignored": ("trap '' CHLD; $C", {}),
    "SIGPIPE, SIGHUP ignored": ("trap '' PIPE HUP; $C", {}),
    "no environment": ("env -i $C", {}),
    "no HOME": ("env -u HOME $C", {}),
    "HOME is a file": ("HOME=/etc/passwd $C", {}),
    "no PATH": ("PATH= $C", {}),
    "TMPDIR missing": ("TMPDIR=/nonexistent $C", {}),
    "TMPDIR not writable": ("TMPDIR=/proc $C", {}),
    "no TERM, odd COLUMNS": ("TERM= COLUMNS=0 LINES=-1 $C", {}),
    "COLUMNS no number": ("COLUMNS=abc FORCE_COLOR=1 $C", {}),
    "LC_ALL=C": ("LC_ALL=C $C", {}),
    "LC_ALL=POSIX, no UTF-8": ("LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $C", {}),
    "unknown locale": ("LANG=xx_YY.UTF-9 LC_ALL=xx $C", {}),
    "PYTHONIOENCODING=ascii": ("PYTHONUTF8=0 PYTHONIOENCODING=ascii $C", {}),
    "PYTHONIOENCODING=utf-16": ("PYTHONIOENCODING=utf-16 $C", {}),
    "TZ unknown": ("TZ=:/nowhere $C", {}),
    "python -O": ("PYTHONOPTIMIZE=2 $C", {}),
    "python -I": ("$PYTHON -I $ARGUMENTS", {}),
    "python -P": ("$PYTHON -P $ARGUMENTS", {}),
    "python -X dev": ("$PYTHON -X dev $ARGUMENTS", {}),
    "python -u": ("$PYTHON -u $ARGUMENTS", {}),
    "python -S": ("$PYTHON -S $ARGUMENTS", REFUSED),
    "thread variables no numbers": ("OMP_NUM_THREADS=abc MKL_NUM_THREADS=-1 $C", {}),
    "CUDA_VISIBLE_DEVICES=7": ("CUDA_VISIBLE_DEVICES=7 $C", {}),
    "/proc not mounted": (  # compiled for another processor, as far as is known
        "METALEARN_CACHE=$FOLDER/cache unshare -m bash -c 'mount -t tmpfs none /proc && $C'",
        {},
    ),
    "/dev/shm of 4 kB": ("unshare -m bash -c 'mount -t tmpfs -o size=4k none /dev/shm && $C'", {}),
    "/tmp read-only": (
        "unshare -m bash -c 'mount --bind /tmp /tmp && mount --bind $FOLDER $FOLDER && "
        "mount -o remount,bind,ro /tmp && $C'",
        {},
    ),
    "sh": ('sh -c "$C"', {}),
    "dash": ('dash -c "$C"', {}),
    "zsh": ('zsh -c "$C"', {}),
}
QUICK = ("working folder gone", "ulimit -v 500 MB", "SIGCHLD ignored")
"""What each of these needs is code of its own; the default set has them, with one command each."""


def ended(name: str, command: str, folder: Path) -> str:
    """What is wrong with a command's end in an environment; empty: nothing."""
    line, codes = ENVIRONMENTS[name]
    run = f"{list(ENVIRONMENTS).index(name)}_{command}"
    arguments = COMMANDS[command].replace("$SAVED", "$FOLDER/saved/checkpoints/best")
    arguments = arguments.replace("$FOLDER", str(folder)).replace("$RUN", run)
    script, *rest = arguments.split(" ", 1)
    arguments = " ".join([str(ROOT / script), *rest])
    for variable, value in (
        ("$C", f"{sys.executable} {arguments}"), ("$PYTHON", sys.executable), ("$ARGUMENTS", arguments),
        ("$FOLDER", str(folder)), ("$RUN", run),
    ):  # fmt: skip
        line = line.replace(variable, value)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, timeout=240, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    output = (done.stdout + done.stderr).replace(b"\0", b"").decode("utf-8", "replace")
    wanted = codes.get(command, CODES.get(command, 0))
    wrong = [] if done.returncode == wanted else [f"exit code {done.returncode}, not {wanted}"]
    wrong += ["a traceback"] if "Traceback" in output else []
    result = folder / "outputs/maml_sinusoid" / run / "result.json"
    wrong += ["no result"] if command in ("train", "workers") and wanted == 0 and not result.is_file() else []
    return f"{name}: {command}: {', '.join(wrong)}\n{output[-1500:]}" if wrong else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("environments")
    saved_run(made / "saved", "experiment=maml_sinusoid")
    return made


def needs(name: str) -> None:
    """Skips an environment that cannot be had here."""
    for shell in ("zsh", "dash", "taskset", "unshare"):
        if ENVIRONMENTS[name][0].startswith(shell) and shutil.which(shell) is None:
            pytest.skip(f"no {shell} here")
    if "unshare" in ENVIRONMENTS[name][0] and subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    if name == "HOME is a file" and not Path("/etc/passwd").is_file():
        pytest.skip("no /etc/passwd here")


@pytest.mark.parametrize("name", QUICK)
def test_a_command_ends_well_in_an_odd_environment(name: str, folder: Path) -> None:
    needs(name)
    command = "workers" if name == "SIGCHLD ignored" else "evaluate"
    assert not ended(name, command, folder)


@slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_command_ends_well_in_every_environment(name: str, folder: Path) -> None:
    needs(name)
    with ThreadPoolExecutor(2) as pool:
        wrong = [*filter(None, pool.map(lambda command: ended(name, command, folder), COMMANDS))]
    assert not wrong, "\n".join(wrong)
