"""How a session ends: rank zero waits until the others have finished, and all leave. Or a new session follows, in which
processes stand in for workers that were lost."""

import contextlib
import logging
from collections.abc import Iterable, Mapping

from torch.distributed import rpc

from distributed.engine.errors import describe
from distributed.engine.info import get_world_rank
from distributed.engine.leaving import GOODBYE_SECONDS
from distributed.engine.session import Session, begin_again, current, leave, present
from distributed.engine.store import newcomers
from distributed.engine.watching import POLL_SECONDS, Watch, ping_errors

log = logging.getLogger(__name__)

_LAST_WORD_SECONDS = 1.0


class StoppedByLeader(RuntimeError):  # noqa: N818 (it is no error of this worker)
    """Rank zero has failed and has ended the session."""


def _note_finished(rank: int, failure: str | None) -> None:
    """Runs on rank zero: worker `rank` has finished, or has failed."""
    session = present()
    if session is not None:
        with session.changed:
            session.finished[rank] = failure
            session.changed.notify_all()


def _note_stop(failure: str | None, whole: bool, goes_on: bool = False) -> None:
    """Runs on the other ranks: rank zero ends the session."""
    session = present()
    if session is not None:
        with session.changed:
            session.stopped, session.failure, session.whole, session.goes_on = True, failure, whole, goes_on
            session.changed.notify_all()


def stop_rpc(failure: BaseException | None = None) -> None:
    """Ends the session. Serves the other workers until all have called this; then all leave together.
    A call that runs beyond its time limit is ended, see `leaving`.

    With `failure`, rank zero does not wait but stops the other workers, which then raise.

    Raises:
        ConnectionError: a worker does not answer.
        RuntimeError: another worker has failed.
    """
    session = present()
    if session is None:
        return
    cause = describe(failure) if failure is not None else None
    together = False
    try:
        if get_world_rank() == 0:
            _dismiss_others(session, cause)
        else:
            session = _serve_until_dismissed(session, cause)
        together = cause is None and session.whole
    finally:
        leave(together=together)


def _dismiss_others(session: Session, cause: str | None) -> None:
    """Rank zero's part of a stop: waits until all others have finished, unless there is a `cause`; then stops them."""
    others = {rank: name for rank, name in enumerate(session.workers) if rank and rank not in session.away}
    session.whole = not session.away
    missing = None if cause is not None else _await_others(session, others)
    failures = session.failures()
    if failures:  # who has failed may have left since
        missing = None
    reason = cause or (str(missing) if missing else None) or (failures[0] if failures else None)
    patience = GOODBYE_SECONDS if reason is None else _LAST_WORD_SECONDS
    goodbyes = {
        name: rpc.rpc_async(name, _note_stop, (reason, session.whole), timeout=patience)
        for rank, name in others.items()
        if session.finished.get(rank) is None
    }
    for name, goodbye in goodbyes.items():
        try:
            goodbye.wait()
        except RuntimeError as error:  # a worker that has left already needs no goodbye
            log.debug("goodbye to %s: %s", name, error)
    if missing is not None:
        raise missing
    if cause is None and failures:
        raise RuntimeError(failures[0])


def _await_others(session: Session, others: Mapping[int, str]) -> Exception | None:
    """Waits until all others have finished, or one has failed. Returns the error of a worker that is lost instead."""
    watch = Watch(session.timeout)
    while True:
        with session.changed:
            if session.changed.wait_for(
                lambda: others.keys() <= session.finished.keys() or any(session.finished.values()), POLL_SECONDS
            ):
                return None if any(session.finished.values()) else _killed_one(others.values())
        missing = watch.lost(others.values())
        if missing is not None:
            return missing


def _killed_one(names: Iterable[str]) -> Exception | None:
    """The error of a worker that was killed after it had finished, if there is one."""
    errors = (error for _, error in ping_errors(names, GOODBYE_SECONDS))
    return next((error for error in errors if isinstance(error, ConnectionError)), None)


def _serve_until_dismissed(session: Session, cause: str | None) -> Session:
    """The other ranks' part of a stop: reports to rank zero, then serves calls until rank zero ends the session, and
    the ones that follow it. Returns the last one."""
    while True:
        _serve(session, cause)
        if not session.goes_on:
            return session
        begin_again()
        session = current()


def _serve(session: Session, cause: str | None) -> None:
    first = session.workers[0]
    try:
        rpc.rpc_sync(first, _note_finished, (get_world_rank(), cause), timeout=session.timeout)
    except RuntimeError as error:
        raise ConnectionError(f"{first} does not answer: {error}") from error
    watch = Watch(session.timeout)
    while cause is None:
        with session.changed:
            if session.changed.wait_for(lambda: session.stopped, timeout=POLL_SECONDS):
                break
        lost = watch.lost([first])
        if lost is not None and not session.stopped:
            raise lost
    if session.failure is not None:
        raise StoppedByLeader(f"stopped by {first}: {session.failure}")


def replace_lost() -> list[str]:
    """On rank zero, between two calls: if a new process has come for every worker that is lost, begins a new session
    with them. Returns the names of these workers.

    Raises:
        ConnectionError: a worker did not come to the new session in time.
    """
    session = current()
    back = [session.workers[rank] for rank in sorted(session.away)]
    if not back or not session.away <= newcomers(session.away):
        return []
    others = [name for rank, name in enumerate(session.workers) if rank and rank not in session.away]
    told = [rpc.rpc_async(name, _note_stop, (None, False, True), timeout=session.timeout) for name in others]
    for future in told:
        with contextlib.suppress(RuntimeError):  # who is lost now is missed at the meeting, unless it is replaced
            future.wait()
    begin_again()
    return back
