"""A program for tests: resumes runs in the folders that stdin names, each in a fork. Prints their exit codes as JSON.

It loads the libraries once; a process of its own for each run would load them every time.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sympy  # noqa: F401 (torch's optimizers load it; what is loaded here, no fork must load)

import train
from metalearn.app import (
    parts,  # noqa: F401
    ranks,  # noqa: F401
    run,  # noqa: F401
)


def resume(folder: str, arguments: list[str]) -> int:
    """Runs the command line in a folder; its output goes to output.txt there."""
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            code = train.main(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    print(json.dumps([resume(folder.strip(), sys.argv[1:]) for folder in sys.stdin]))
