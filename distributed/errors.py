"""Exceptions: their texts, and what torch's errors of a call mean."""


def describe(error: BaseException) -> str:
    """The type and the message."""
    return f"{type(error).__name__}: {error}"


def says_timeout(message: str) -> bool:
    """Whether a message of torch is about a time limit."""
    return "timeout" in message.lower() or "timed out" in message.lower()


def worker_error(name: str, error: Exception, timeout: float) -> Exception:
    """The exception to raise for torch's error of a call to a worker."""
    lines = str(error).splitlines() or [type(error).__name__]
    if not isinstance(error, RuntimeError):  # of the code that serves the call: another version, or no memory
        # torch puts the name of the worker before it, and the traceback behind.
        return RuntimeError(f"{name}: {lines[1] if 'On WorkerInfo' in lines[0] and lines[1:] else lines[0]}")
    first = lines[0]
    if says_timeout(first):
        return TimeoutError(f"{name} did not answer within {timeout:g} s: {first}")
    if any(sign in first.lower() for sign in ("eof", "pipe", "connection", "connect", "closed", "shutting down")):
        return ConnectionError(f"{name} does not answer: {first}")
    return RuntimeError(f"{name}: {first}")


class StoppedByLeader(RuntimeError):  # noqa: N818 (it is no error of this worker)
    """Rank zero has failed, or has stopped the run, and has ended this worker's part in it."""
