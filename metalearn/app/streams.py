"""The standard streams of a process, where they may be closed, full, or read by somebody who has left."""

import errno
import io
import os
import select
import sys

_NAMES = ("stdin", "stdout", "stderr")


class _Dropping(io.FileIO):
    """A standard stream that drops all text from the first that cannot be written: a terminal that is gone ends no
    training."""

    failure: OSError | None = None

    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        while self.failure is None:
            try:
                written = super().write(view)
            except OSError as error:
                self.failure = error
            else:
                if written is not None:
                    return written
                select.select([], [self], [])  # whoever shares the terminal has made it non-blocking
        return view.nbytes


def set_up() -> None:
    """Opens the closed standard streams, and lets the output streams drop what cannot be written. Signs that their
    encoding lacks are written as escapes."""
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:  # or the next file of the run would get this number, and with it what C libraries print
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream.buffer, io.BytesIO):
            stream.reconfigure(errors="backslashreplace")
            if stream.fileno() == number and not isinstance(_raw(stream), _Dropping):
                setattr(sys, name, _dropping(stream, number))


def lost() -> OSError | None:
    """Why stdout has not got all that was written to it; None if it has, or if its reader has left on purpose."""
    sys.stdout.flush()
    failure: OSError | None = getattr(_raw(sys.stdout), "failure", None)
    return None if failure is None or failure.errno == errno.EPIPE else failure


def print_all(text: str) -> int:
    """Prints what a command was asked for; returns the exit code, that of a failure if it was lost."""
    print(text, flush=True)
    return all_printed()


def all_printed() -> int:
    """The exit code of a command that only prints."""
    return 0 if lost() is None else 1


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _dropping(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_Dropping(number, "w", closefd=False))
    return io.TextIOWrapper(
        buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )  # fmt: skip
