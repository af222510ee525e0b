"""How a session ends, and how the next one follows it.

At the end every worker calls `stop_rpc`, and this happens in order:

1. Each other worker reports to rank zero that it has finished, or failed, and goes on serving calls.
2. Rank zero waits for all reports (`_dismiss_others`), and dismisses the others.
3. All leave together.

Between two steps, `strategies` call `regroup` on rank zero. It lets workers go that wish to leave. If processes wait to
come in, it ends the session of all workers and begins the next one, with the new processes and without the lost ones.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed import rpc

from distributed.calls.errors import describe
from distributed.calls.session import Session, begin_again, current, leave, present
from distributed.calls.shutdown import GOODBYE_SECONDS
from distributed.cluster.info import get_world_rank, get_world_size
from distributed.cluster.meeting import answer, farewells, newcomers, read_requests, seated
from distributed.cluster.watching import POLL_SECONDS, DeafError, Pinger, ping_errors, wait_for

log = logging.getLogger(__name__)

REQUESTS_SECONDS = 0.2
"""Seconds between two looks of rank zero for processes that wait to come in, and for workers that wish to leave."""

_LAST_WORD_SECONDS = 1.0

_wishes_to_leave = False
_looked = 0.0


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
    A call that runs beyond its time limit is ended, see `shutdown`.

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
    silent: set[str] = set()
    missing = None if cause is not None else _await_others(session, others, silent)
    session.whole = not session.away and not silent
    failures = session.failures()
    if failures:  # a worker that has failed may have left since; its report names the cause, its silence does not
        missing = None
    reason = cause or (str(missing) if missing else None) or (failures[0] if failures else None)
    patience = GOODBYE_SECONDS if reason is None else _LAST_WORD_SECONDS
    # All at once: a worker that hangs must not keep the others from hearing it.
    goodbyes = {
        name: rpc.rpc_async(name, _note_stop, (reason, session.whole), timeout=patience)
        for rank, name in others.items()
        if session.finished.get(rank) is None
    }
    for name, goodbye in goodbyes.items():
        if name in silent:  # it has been waited for
            continue
        try:
            wait_for(goodbye, patience)
        except (RuntimeError, DeafError) as error:  # a worker that has left already needs no goodbye
            log.debug("goodbye to %s: %s", name, error)
    if missing is not None:
        raise missing
    if cause is None and failures:
        raise RuntimeError(failures[0])


def _await_others(session: Session, others: Mapping[int, str], silent: set[str]) -> Exception | None:
    """Waits until all others have finished, or one has failed. Returns the error of a worker that is lost instead. Puts
    those into `silent` that have finished and do not answer any more."""
    watch = Pinger(session.timeout)
    while True:
        with session.changed:
            if session.changed.wait_for(
                lambda: others.keys() <= session.finished.keys() or any(session.finished.values()), POLL_SECONDS
            ):
                return None if any(session.finished.values()) else _killed_one(others.values(), silent)
        missing = watch.lost(others.values())
        if missing is not None:
            return missing


def _killed_one(names: Iterable[str], silent: set[str]) -> Exception | None:
    """The error of a worker that was killed after it had finished, if there is one; see `_await_others`."""
    # Without it the workers cannot leave together.
    errors = dict(ping_errors(names, GOODBYE_SECONDS))
    silent.update(errors)
    return next((error for error in errors.values() if isinstance(error, ConnectionError)), None)


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
        report = rpc.rpc_async(first, _note_finished, (get_world_rank(), cause), timeout=session.timeout)
        wait_for(report, session.timeout)
    except DeafError as error:
        _leave_deaf(session, error)
        return
    except RuntimeError as error:
        raise ConnectionError(f"{first} does not answer: {error}") from error
    watch = Pinger(session.timeout)
    has_asked = False
    while cause is None:
        with session.changed:
            if session.changed.wait_for(lambda: session.stopped, timeout=POLL_SECONDS):
                break
        if _wishes_to_leave and not has_asked:
            rpc.rpc_async(first, _note_leaving, (get_world_rank(),), timeout=session.timeout)
            has_asked = True
        lost = watch.lost([first])
        if isinstance(lost, DeafError):
            _leave_deaf(session, lost)
            return
        if lost is not None and not session.stopped:  # rank zero may leave right after its goodbye
            raise lost
    if session.failure is not None:
        raise StoppedByLeader(f"stopped by {first}: {session.failure}")


def _leave_deaf(session: Session, error: DeafError) -> None:
    """Ends the session of a worker that has ended well, but will not hear rank zero's goodbye."""
    log.warning("%s; it leaves without a goodbye", error)
    session.whole, session.goes_on = False, False


def wish_to_leave() -> None:
    """On ranks other than zero: this worker leaves when rank zero lets it go, and serves calls until then. A signal
    handler may call this."""
    global _wishes_to_leave  # a flag alone: a handler must not make a remote call
    _wishes_to_leave = True


def _note_leaving(rank: int) -> None:
    """Runs on rank zero: a worker wishes to leave."""
    session = present()
    if session is not None:
        session.leaving.add(rank)


def regroup() -> list[str]:
    """On rank zero, between two calls: lets workers go that wish to leave. If processes wait to come in, begins a new
    session with them and without the workers that are lost. Returns what has changed, in sentences.

    It looks for requests every `REQUESTS_SECONDS`.
    """
    global _looked
    session = current()
    if time.monotonic() - _looked < REQUESTS_SECONDS:
        return []
    _looked = time.monotonic()
    if not read_requests():
        return []
    changes = _let_go(session)
    if not newcomers():
        return changes
    # Read now, since the next meeting changes them.
    before, present_ranks = seated(), session.present()
    others = [session.workers[rank] for rank in present_ranks if rank]
    told = [rpc.rpc_async(name, _note_stop, (None, False, True), timeout=session.timeout) for name in others]
    for future in told:
        with contextlib.suppress(RuntimeError):  # a worker that is lost now does not come to the meeting
            future.wait()
    begin_again(present_ranks)
    # A newcomer makes up for a lost worker, so `expected` grows only beyond that.
    current().expected = max(session.expected, get_world_size())
    return changes + _changes(session.workers, before)


def _let_go(session: Session) -> list[str]:
    """Dismisses the workers that wish to leave, and those that a user has asked to let go."""
    going = set(session.leaving)
    for request, name in farewells().items():
        leavers = [session.workers[rank] for rank in session.present() if rank]
        if name in leavers:
            going.add(session.workers.index(name))
            answer(request, "")
        else:
            known = ", ".join(leavers) or "none"
            answer(request, f"no worker that could leave has this name; those that could: {known}")
    going -= session.away
    for rank in going:
        rpc.rpc_async(session.workers[rank], _note_stop, (None, False), timeout=session.timeout)
    session.away |= going
    session.expected -= len(going)  # they are not lost, so they do not count for `max_lost`
    return [f"{session.workers[rank]} leaves; the others compute its chunks from now on" for rank in sorted(going)]


def _changes(old_names: Sequence[str], before: Mapping[str, int]) -> list[str]:
    """The changes that a new session has brought; `before` has the rank of each process in the last session."""
    names = current().workers
    after = seated()
    new = [names[rank] for process, rank in after.items() if process not in before]
    moved = {before[process]: rank for process, rank in after.items() if before.get(process, rank) != rank}
    changes = [f"{old_names[old]} is {names[rank]} from now on" for old, rank in sorted(moved.items())]
    if new:
        are = "are new processes" if len(new) > 1 else "is a new process"
        changes.append(f"{' and '.join(sorted(new))} {are}; {len(names)} workers compute from now on")
    return changes
