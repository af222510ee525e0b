"""Decodes pictures of any origin in processes of their own, which have bounds of memory and time.

Decoders trust what a file says of itself. A few bytes can ask for all memory or for hours, or crash a decoder. Here
only the process of that one picture ends, and the picture is named.
"""

import contextlib
import fcntl
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import numpy as np

from metalearn.tasks.common.pictures import PictureForm, Pixels, formed, opened, reason, thumbnail

MOST_MEMORY = 2**30
"""Bytes of address space of a decoding process, with Python and the libraries."""
MOST_SECONDS = 10.0
"""Seconds of the processor for one picture."""

_THREADS = 8
_FEW = 8
"""So many pictures are worth a further process."""
_ANSWER = struct.Struct(">cIII")
"""Before each answer: P and the shape [h, w, channels] of a picture; or E, 0, 0 and the bytes of an error's text."""
_LONGEST_ERROR = 1000


def decoded(paths: Sequence[Path], form: PictureForm | int) -> Iterator[Pixels | str]:
    """The pictures in files, in their order: each in `form`, or as a thumbnail that fits into a square of this side.
    In place of a picture that cannot be read, the reason."""
    count = max(1, min(_THREADS, os.cpu_count() or 1, len(paths) // _FEW))
    with contextlib.ExitStack() as stack:
        turn = stack.enter_context(tempfile.TemporaryFile())
        free: SimpleQueue[_Decoder] = SimpleQueue()
        for _ in range(count):
            free.put(stack.enter_context(contextlib.closing(_Decoder(turn.fileno()))))

        def decode(path: Path) -> Pixels | str:
            decoder = free.get()
            try:
                return decoder.decode(path, form)
            finally:
                free.put(decoder)

        with ThreadPoolExecutor(count) as pool:
            yield from pool.map(decode, paths)


class _Decoder:
    """A decoding process. It is started for the first picture, and again after one that has ended it."""

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, path: Path, form: PictureForm | int) -> Pixels | str:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([str(path), form]).encode() + b"\n")
            process.stdin.flush()
            return _answer(process.stdout)
        except (BrokenPipeError, EOFError):
            self.close()
            if process.returncode == -signal.SIGPROF:
                return f"takes more than {MOST_SECONDS:g} s to decode; save it anew with another program"
            return f"ends the process that decodes it (exit code {process.returncode}); save it anew"

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:  # closing stdin writes what is left of the request
                process.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: what lies in the working folder is not imported.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(self._turn), str(MOST_SECONDS)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[self._turn],
        )  # fmt: skip
        return self._process


def _answer(pipe: IO[bytes]) -> Pixels | str:
    kind, *sizes = _ANSWER.unpack(_exactly(pipe, _ANSWER.size))
    if kind == b"E":
        return _exactly(pipe, min(sizes[2], 4 * _LONGEST_ERROR)).decode(errors="replace")
    height, width, channels = sizes
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.frombuffer(_exactly(pipe, math.prod(shape)), np.uint8).reshape(shape)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    """Raises EOFError if the process has ended."""
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content


# The process


def main(turn: int, seconds: float) -> None:
    """Answers each line of stdin until its end. Large pictures take turns, by a lock on the file `turn`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        fcntl.lockf(turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(turn, fcntl.LOCK_UN)

    for line in sys.stdin.buffer:
        path, form = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also within a decoder
        try:
            with opened(Path(path), alone) as image:
                values = thumbnail(image, form) if isinstance(form, int) else formed(image, PictureForm(*form))
            head, content = _ANSWER.pack(b"P", *values.shape[:2], values[0, 0].size), values.tobytes()
        except Exception as error:  # Pillow raises many types for broken pictures
            content = reason(error)[:_LONGEST_ERROR].encode(errors="replace")
            head = _ANSWER.pack(b"E", 0, 0, len(content))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(head + content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
