"""The standard streams of a process, where they may be closed, or read by a program that has left."""

import io
import os
import select
import sys


def set_up() -> None:
    """Opens the closed standard streams. Signs that the encoding of an output lacks are written as escapes."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # or the next file of the run would get this number, and with it what C libraries print
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        if number and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def reader_has_left() -> bool:
    """Whether stdout is a pipe that nobody reads any more: `head` has had enough. What is left of the output is dropped
    then, or Python would complain at its end."""
    pipe = select.poll()
    pipe.register(1, 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return left


def print_all(text: str) -> int:
    """Prints what a command was asked for; returns the exit code."""
    print(text, flush=True)
    return 0
