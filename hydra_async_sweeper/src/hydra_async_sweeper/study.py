"""The study: which trials exist, with their parameters and results, in an Optuna journal file.

The journal is the only state of a sweep beside the trials' own folders. It may be cut off at any byte: a torn last line
is removed, and a trial that was under way is run again under its number, with its parameters, in its folder.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, TrialState

from hydra_async_sweeper import islands
from hydra_async_sweeper.disk import ADVICE, refuse_links
from hydra_async_sweeper.ranking import results_of
from hydra_async_sweeper.space import Category, Dimension, Number, Params, Space, steps_of, value_at
from hydra_async_sweeper.terms import (
    COMPLETED,
    DIVERGED,
    FAILED,
    PRUNED,
    Direction,
    FinishedTrial,
    StartedTrial,
    StudyError,
    Values,
)

log = logging.getLogger("hydra_async_sweeper")

OUTCOME, TOLD, VALUES, SAME_AS, RETRIES, FAILURE = "outcome", "told", "values", "same_as", "retries", "failure"
PARENT, SECONDS = "parent", "seconds"
"""Names of what is noted at a trial: how it ended; its place in the order of ends; its values; the trial whose values
were copied; how often it has been run again; why it failed; the trial whose checkpoint it goes on from; and the seconds
that it says it took."""


class Study:
    """The trials of one sweep. One process at a time may hold it.

    Args:
        path: the journal file.
        name: of the study.
        space: what is searched.
        directions: `minimize` or `maximize` for each objective.
        identity: what makes this sweep another one if it changes, as nested plain values.

    Raises:
        OSError: the journal cannot be written.
        StudyError: another process holds the study, the journal belongs to a sweep with another identity, or it is no
            journal.
    """

    def __init__(
        self, path: Path, name: str, space: Space, directions: Sequence[Direction], identity: Mapping[str, Any]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_links([path])
        self.path, self._held = path, _hold(path)
        try:
            self._begin_or_resume(path, name, directions, json.loads(json.dumps(identity)))
        except BaseException:
            self.close()
            raise
        self._wanted: int | None = None
        self.space = space
        self.directions = [d.name.lower() for d in self._study.directions]
        self.distributions = {name: distribution(dimension) for name, dimension in space.items()}

    def _begin_or_resume(
        self, path: Path, name: str, directions: Sequence[Direction], identity: Mapping[str, Any]
    ) -> None:
        _mend(path)
        self._open(path, name, directions)
        if self._has_no_values():
            path.unlink()  # nothing is left to resume, so the task runs again, as with Hydra's own sweepers
            self._open(path, name, directions)
        known = self._study.user_attrs.get("identity")
        if known is None:
            self._study.set_user_attr("identity", identity)
        elif known != identity:
            raise StudyError(_differences(path.parent, known, identity))

    def _open(self, path: Path, name: str, directions: Sequence[Direction]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with _reading(path), without_experimental_warnings():
            self._study = optuna.create_study(
                storage=_Storage(path), study_name=name, directions=list(directions), load_if_exists=True
            )

    def keep(self, name: str, value: int) -> int:
        """The value that was noted under this name when the study was made; `value` in a new study."""
        if name not in self._study.user_attrs:
            self._study.set_user_attr(name, value)
        return int(self._study.user_attrs[name])

    def close(self) -> None:
        """Lets another process hold the study."""
        self._held.close()

    def _has_no_values(self) -> bool:
        """Whether all trials have completed, and none has returned a value."""
        ends = [(trial.user_attrs.get(OUTCOME), trial.values) for trial in self._trials()]
        return bool(ends) and all(end == (COMPLETED, None) for end in ends)

    # Trials

    def enqueue(self, count: int) -> None:
        """Adds waiting trials until there are `count` trials in all. If there are more, the last ones wait on."""
        self._wanted = count
        for _ in range(count - len(self._trials())):
            self._study.enqueue_trial({})

    def enqueue_grid(self, combinations: Sequence[Params]) -> None:
        """Adds a waiting trial for each combination that has none yet. If there are more, the last ones wait on."""
        self._wanted = len(combinations)
        for params in combinations[len(self._trials()) :]:
            self._study.enqueue_trial(dict(params))

    def waiting(self) -> list[int]:
        """The numbers of the trials that are to start."""
        return sorted(trial.number for trial in self._trials(TrialState.WAITING) if self._is_wanted(trial))

    def interrupted(self) -> list[int]:
        """The numbers of the trials that were under way when the last controller ended."""
        return sorted(trial.number for trial in self._trials(TrialState.RUNNING))

    def begin(self, number: int, sampler: optuna.samplers.BaseSampler, parent: int | None = None) -> StartedTrial:
        """Gives a trial its parameters. One that was interrupted keeps those that it has; the sampler draws the others.

        Args:
            parent: the trial whose checkpoint it goes on from.
        """
        storage, trial_id = self._study._storage, self._id(number)
        if self._frozen(number).state == TrialState.WAITING:
            storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        if parent is not None and PARENT not in self._frozen(number).user_attrs:
            storage.set_trial_user_attr(trial_id, PARENT, parent)
        self._study.sampler = sampler
        trial = optuna.trial.Trial(self._study, trial_id)
        noted = self._frozen(number)
        params: Params = {}
        for name, dimension in self.space.items():
            drawn = self.distributions[name]
            if name in noted.params and _draws_alone(trial, name, drawn):
                sampler.sample_independent(self._study, noted, name, drawn)  # so that the next ones are as at first
            params[name] = _suggest(trial, name, dimension, drawn)
        return StartedTrial(number, params, parent)

    def tell(
        self, number: int, outcome: str, values: Values | None, *, same_as: int | None = None, failure: str = "",
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Notes how a trial has ended. If a value is not finite, it has diverged."""
        if values is not None and not all(map(math.isfinite, values)):
            outcome, values = DIVERGED, None
        storage, trial_id = self._study._storage, self._id(number)
        notes = {OUTCOME: outcome, TOLD: len(self.finished()), SAME_AS: same_as, FAILURE: failure or None}
        notes[SECONDS] = seconds
        if outcome == PRUNED and values is not None:
            notes[VALUES] = list(values)  # Optuna keeps a pruned trial's last intermediate value
        for name, value in notes.items():
            if value is not None:
                storage.set_trial_user_attr(trial_id, name, value)
        if outcome == COMPLETED and values is not None:
            self._study.tell(number, list(values))
        else:
            self._study.tell(number, state=TrialState.FAIL if outcome == FAILED else TrialState.PRUNED)

    def report(self, number: int, step: int, value: float) -> None:
        """Notes an intermediate value for the pruner."""
        trial = optuna.trial.Trial(self._study, self._id(number))
        if step not in self._frozen(number).intermediate_values:
            trial.report(value, step)

    def should_prune(self, number: int, pruner: optuna.pruners.BasePruner) -> bool:
        """Whether the pruner would stop a trial now."""
        return pruner.prune(self._study, self._frozen(number))

    def retry(self, number: int) -> int:
        """Counts one more run of a trial; returns how often it has been run again."""
        count = self._frozen(number).user_attrs.get(RETRIES, 0) + 1
        self._study._storage.set_trial_user_attr(self._id(number), RETRIES, count)
        return int(count)

    # What there is

    def count(self) -> int:
        """All trials that have begun or are to start."""
        return sum(trial.state != TrialState.WAITING or self._is_wanted(trial) for trial in self._trials())

    def _is_wanted(self, trial: FrozenTrial) -> bool:
        """Whether this command wants the trial; an earlier one may have added more."""
        return self._wanted is None or trial.number < self._wanted

    def finished(self) -> list[FinishedTrial]:
        """The trials that have ended, in the order in which they were told."""
        ended = [finished_of(trial) for trial in self._trials() if trial.state.is_finished()]
        return sorted(ended, key=lambda trial: (trial.told, trial.number))

    def losses(self) -> list[islands.ScoredTrial]:
        """The trials that have ended, as the searches take them; only a completed one has a loss."""
        return results_of(self.finished(), self.directions)

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._trials()[number]

    def _id(self, number: int) -> int:
        return self._trials()[number]._trial_id


def finished_of(trial: FrozenTrial) -> FinishedTrial:
    """A trial that has ended, as Optuna has it."""
    notes = trial.user_attrs
    values = tuple(trial.values if trial.state == TrialState.COMPLETE else notes.get(VALUES, ())) or None
    # Else by the clock, which also runs while a sweep that was stopped does not.
    by_clock = trial.duration.total_seconds() if trial.duration is not None else None
    seconds = notes.get(SECONDS, by_clock)
    outcome = str(notes.get(OUTCOME, FAILED))
    return FinishedTrial(
        trial.number, dict(trial.params), outcome, values, int(notes.get(TOLD, 0)), notes.get(SAME_AS),
        str(notes.get(FAILURE, "")), seconds, notes.get(PARENT),
    )  # fmt: skip


# Distributions


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution for a dimension. It has none for steps on a logarithmic scale: they become categories."""
    if isinstance(dimension, Category):
        return CategoricalDistribution(dimension.options)
    if dimension.log and dimension.step is not None:
        return CategoricalDistribution(values_of(dimension))
    if dimension.whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(float(dimension.low), float(dimension.high), log=dimension.log, step=dimension.step)


def values_of(number: Number) -> list[int | float]:
    """All values of a number with a step."""
    assert number.step is not None
    return [value_at(number, index) for index in range(steps_of(number) + 1)]


def _suggest(trial: optuna.trial.Trial, name: str, dimension: Dimension, drawn: BaseDistribution) -> Any:
    if isinstance(drawn, CategoricalDistribution):
        return trial.suggest_categorical(name, drawn.choices)
    if isinstance(drawn, IntDistribution):
        return trial.suggest_int(name, drawn.low, drawn.high, log=drawn.log, step=drawn.step)
    assert isinstance(drawn, FloatDistribution)
    return trial.suggest_float(name, drawn.low, drawn.high, log=drawn.log, step=drawn.step)


def _draws_alone(trial: optuna.trial.Trial, name: str, drawn: BaseDistribution) -> bool:
    """Whether the sampler draws this parameter by itself, and not with the others, or not at all."""
    return not (drawn.single() or trial._is_fixed_param(name, drawn) or trial._is_relative_param(name, drawn))


# The journal file


_MOST_SECONDS = 60.0
"""How long another process may hold the journal, which takes milliseconds."""
_SILENT_SECONDS, _PAUSE = 1.0, 0.01


class _Storage(JournalStorage):
    """Optuna's storage. What others write into the journal, or take out of it, while the sweep runs is read, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(_Journal(path))

    def _sync_with_backend(self) -> None:
        with _reading(self._path):
            super()._sync_with_backend()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        with _reading(self._path):
            return super().get_all_trials(study_id, deepcopy, states)


class _Journal(JournalFileBackend):
    """Optuna's journal in a file. An append that fails leaves the file as it was: Optuna would write on behind half a
    line. Nor is a file written that somebody has removed or cut off meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), lock_obj=_FileLock(path))
        self._path, self._size = path, path.stat().st_size

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        size = self._path.stat().st_size
        if size < self._size:
            raise OSError(errno.ESTALE, "has become shorter while the sweep ran", str(self._path))
        try:
            super().append_logs(logs)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._size = self._path.stat().st_size


class _FileLock(BaseJournalFileLock):
    """A lock of the kernel's, which a killed process leaves behind in no case."""

    def __init__(self, journal: Path) -> None:
        self._path = journal.with_name(f".{journal.name}.lock")
        self._file: TextIO | None = None

    def acquire(self) -> bool:
        self._file = _open_lock(self._path)
        began, told = time.monotonic(), False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            waited = time.monotonic() - began
            if waited > _MOST_SECONDS:
                self._file.close()
                raise StudyError(
                    f"{self._path} is held by another process, since {waited:.0f} s; end that process (lsof names it), "
                    "and the same command goes on"
                )
            if waited > _SILENT_SECONDS and not told:
                log.warning("%s is held by another process: waiting", self._path)
                told = True
            time.sleep(_PAUSE)

    def release(self) -> None:
        assert self._file is not None
        self._file.close()


def _hold(journal: Path) -> TextIO:
    path = journal.with_name(f".{journal.name}.controller")
    try:
        file = _open_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StudyError(
            f"{journal.parent}: another process is running this sweep; wait for it, or type another "
            "hydra.sweeper.study_name=NAME"
        ) from None
    except OSError as error:
        if error.errno in ADVICE:
            raise
        raise StudyError(f"{path} cannot be locked ({error.strerror}); type another hydra.sweep.dir=/path") from error
    return file


def _open_lock(path: Path) -> TextIO:
    """Opens a lock file, which may be new. A link is not followed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # it is another user's
        # Who may read a file can lock it. So it is open to those alone who may write in the folder.
        os.fchmod(descriptor, 0o600 | (path.parent.stat().st_mode & 0o022) * 3)
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _mend(journal: Path) -> None:
    """Removes what a kill has left of a last line: Optuna would append to it, and never read the file again.

    Raises:
        StudyError: a whole line is no JSON object; Optuna would append to the file before it reads it.
    """
    if not journal.exists():
        return
    content = journal.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        with journal.open("r+b") as file:
            file.truncate(end)
    for line in content[:end].splitlines():
        try:
            if not isinstance(json.loads(line), dict):
                raise ValueError("a line is no object")
        except (ValueError, RecursionError) as error:
            raise _damaged(journal, error) from error


@contextlib.contextmanager
def _reading(journal: Path) -> Iterator[None]:
    """Makes a StudyError of what Optuna raises, which does not check what it reads."""
    try:
        yield
    except (OSError, StudyError, optuna.exceptions.DuplicatedStudyError):  # the last one tells it to load the study
        raise
    except Exception as error:
        raise _damaged(journal, error) from error


def _damaged(journal: Path, error: Exception) -> StudyError:
    return StudyError(
        f"{journal}: is no journal of a study, or is damaged ({type(error).__name__}: {error}); move it away to begin "
        "the search anew"
    )


def _differences(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    before, after = dict(_leaves(known)), dict(_leaves(now))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    lines = [f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}" for key in keys]
    return (
        f"{folder} holds another sweep:\n  " + "\n  ".join(lines) + "\n"
        "type hydra.sweeper.study_name=NAME to keep both, or the same values to resume"
    )


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


@contextlib.contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Optuna warns of what it may change. Version 4 does so at every start of a trial, of `constant_liar`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
