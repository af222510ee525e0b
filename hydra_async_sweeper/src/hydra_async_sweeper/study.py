"""The study: which trials exist, with their parameters and results, in an Optuna journal file.

The journal is the only state of a sweep beside the trials' own folders. It may be cut off at any byte: a torn last line
is removed, and a trial that was under way is run again under its number, with its parameters, in its folder.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from hydra_async_sweeper.islands import ScoredTrial, fold, offspring
from hydra_async_sweeper.population import decide
from hydra_async_sweeper.settings import SweeperSettings
from hydra_async_sweeper.slots import plain
from hydra_async_sweeper.space import Category, Dimension, Params, Space
from hydra_async_sweeper.trials import (
    COMPLETED,
    DIVERGED,
    FAILED,
    Direction,
    FinishedTrial,
    FinishedTrials,
    StartedTrial,
    StudyError,
    TrialResult,
    leaves,
)

END, PARENT, RETRIES = "end", "parent", "retries"
"""What is noted at a trial: how it ended, as the fields of a FinishedTrial that Optuna has not; the trial whose
checkpoint it goes on from; and how often it has been run again."""


class Study:
    """The trials of one sweep, in the journal at `path`. One process at a time may hold it. `identity` is what makes
    this sweep another one if it changes, as nested plain values.

    Raises:
        OSError: the journal cannot be written.
        StudyError: another process holds the study, the journal belongs to a sweep with another identity, or it is no
            journal.
    """

    def __init__(
        self, path: Path, name: str, space: Space, directions: Sequence[Direction], identity: Mapping[str, Any]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # Held for the whole sweep, and taken once more at each append. The kernel frees it when its process dies.
        # Optuna's own locks are files, which a killed process leaves behind: the next one would wait for 30 s.
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise StudyError(
                f"{path.parent}: another process is running this sweep; wait for it, or type another "
                "hydra.sweep.dir=/path"
            ) from None
        try:
            self._study = self._open(name, directions)
            ends = [trial.user_attrs.get(END) for trial in self._trials()]
            if ends and all(end and (end["outcome"], end["values"]) == (COMPLETED, None) for end in ends):
                path.unlink()  # nothing is left to resume, so the task runs again, as with Hydra's own sweepers
                self._study = self._open(name, directions)
            noted, identity = self._study.user_attrs.get("identity"), json.loads(json.dumps(identity, default=plain))
            if noted is None:
                self._study.set_user_attr("identity", identity)
            elif noted != identity:
                before, after = dict(leaves(noted)), dict(leaves(identity))
                keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
                lines = [f"\n  {key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}" for key in keys]
                raise StudyError(
                    f"{path.parent} holds another sweep:{''.join(lines)}\n"
                    "type hydra.sweeper.study_name=NAME to keep both, or the same values to resume"
                )
        except BaseException:
            self.close()
            raise
        self._total = math.inf  # the trials that this command wants; an earlier one may have added more
        self.space = space
        self.directions = [d.name.lower() for d in self._study.directions]
        self.distributions = {name: distribution(dimension) for name, dimension in space.items()}

    def _open(self, name: str, directions: Sequence[Direction]) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        lock: Any = self._lock
        try:
            with without_experimental_warnings():
                JournalStorage(JournalFileBackend(str(self.path), lock))  # reads it, before anything is cut or appended
                content = self.path.read_bytes()
                if not content.endswith(b"\n"):
                    # A kill has torn the last line. Optuna would append to it, and never read the file again.
                    with self.path.open("r+b") as file:
                        file.truncate(content.rfind(b"\n") + 1)
                storage = JournalStorage(JournalFileBackend(str(self.path), lock))
                return optuna.create_study(
                    storage=storage, study_name=name, directions=list(directions), load_if_exists=True
                )
        except OSError:
            raise
        except Exception as error:  # what Optuna raises depends on the line
            raise StudyError(
                f"{self.path}: is no journal of a study, or is damaged ({type(error).__name__}: {error}); move it away "
                "to begin the search again"
            ) from error

    def keep(self, name: str, value: int) -> int:
        """The value that was noted under this name when the study was made; `value` in a new study."""
        if name not in self._study.user_attrs:
            self._study.set_user_attr(name, value)
        return int(self._study.user_attrs[name])

    def close(self) -> None:
        """Lets another process hold the study."""
        self._lock.release()

    def enqueue(self, count: int, grid: Sequence[Params] = ()) -> None:
        """Adds waiting trials until there are `count` trials in all, with the parameters of the grid, if there is one.
        If there are more, the last ones wait on."""
        self._total = count
        for number in range(len(self._trials()), count):
            self._study.enqueue_trial(dict(grid[number]) if grid else {})

    def waiting(self) -> list[int]:
        """The numbers of the trials that are to start."""
        return [trial.number for trial in self._trials(TrialState.WAITING) if trial.number < self._total]

    def interrupted(self) -> list[int]:
        """The numbers of the trials that were under way when the last controller ended."""
        return [trial.number for trial in self._trials(TrialState.RUNNING)]

    def begin(self, number: int, sampler: BaseSampler, parent: int | None = None) -> StartedTrial:
        """Gives a trial its parameters, and the parent whose checkpoint it goes on from. One that was interrupted keeps
        the parameters that it has; the sampler draws the others."""
        # Study.ask() takes the first waiting trial; which one starts is the controller's choice here.
        storage, frozen = self._study._storage, self._frozen(number)
        trial_id = frozen._trial_id
        if frozen.state == TrialState.WAITING:
            storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        if parent is not None and PARENT not in frozen.user_attrs:
            storage.set_trial_user_attr(trial_id, PARENT, parent)
        self._study.sampler = sampler
        trial = optuna.trial.Trial(self._study, trial_id)
        noted = self._frozen(number)
        params: Params = {}
        for name, drawn in self.distributions.items():
            together = drawn.single() or trial._is_fixed_param(name, drawn) or trial._is_relative_param(name, drawn)
            if name in noted.params and not together:
                sampler.sample_independent(self._study, noted, name, drawn)  # so that the next ones are as at first
            params[name] = trial._suggest(name, drawn)
        return StartedTrial(number, params, parent)

    def tell(self, number: int, result: TrialResult, *, same_as: int | None = None) -> None:
        """Notes how a trial has ended. If one of its values is not finite, it has diverged."""
        outcome, values, failure, seconds = result
        if values is not None and not all(map(math.isfinite, values)):
            outcome, values = DIVERGED, None
        # The values, too: Optuna gives a pruned trial its last intermediate value.
        end = {"outcome": outcome, "values": values, "told": len(self.finished()), "same_as": same_as,
               "failure": failure, "seconds": seconds}  # fmt: skip
        self._study._storage.set_trial_user_attr(self._frozen(number)._trial_id, END, end)
        if outcome == COMPLETED and values is not None:
            self._study.tell(number, list(values))
        else:
            self._study.tell(number, state=TrialState.FAIL if outcome == FAILED else TrialState.PRUNED)

    def prunes(self, number: int, step: int, value: float, pruner: optuna.pruners.BasePruner) -> bool:
        """Notes an intermediate value; returns whether the pruner would stop the trial now."""
        if step not in self._frozen(number).intermediate_values:
            optuna.trial.Trial(self._study, self._frozen(number)._trial_id).report(value, step)
        return pruner.prune(self._study, self._frozen(number))

    def retry(self, number: int) -> int:
        """Counts one more run of a trial; returns how often it has been run again."""
        trial = self._frozen(number)
        count = int(trial.user_attrs.get(RETRIES, 0)) + 1
        self._study._storage.set_trial_user_attr(trial._trial_id, RETRIES, count)
        return count

    def count(self) -> int:
        """All trials that have begun or are to start."""
        return sum(trial.state != TrialState.WAITING or trial.number < self._total for trial in self._trials())

    def finished(self) -> list[FinishedTrial]:
        """The trials that have ended, in the order in which they were told."""
        return finished_of(self._study)

    def ended(self, settings: SweeperSettings) -> FinishedTrials:
        """The trials that have ended, with the names of their values, and how they are numbered."""
        return FinishedTrials(self.finished(), settings.objective or ["value"], self.directions, settings.lanes)

    def losses(self) -> list[ScoredTrial]:
        """The trials that have ended, as the searches take them; only a completed one has a loss."""
        both = ((trial, trial.losses(self.directions) or (None,)) for trial in self.finished())
        return [ScoredTrial(trial.told, trial.number, trial.params, losses[0]) for trial, losses in both]

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._trials()[number]  # Optuna numbers the trials of a study from 0 on, without gaps


def finished_of(study: optuna.Study) -> list[FinishedTrial]:
    """The trials of Optuna's study that have ended, in the order in which they were told."""
    ended = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished():
            end: dict[str, Any] = dict(trial.user_attrs[END])
            values, parent = end.pop("values"), trial.user_attrs.get(PARENT)
            if end["seconds"] is None and trial.duration is not None:  # it runs on while the sweep does not
                end["seconds"] = trial.duration.total_seconds()
            params = dict(trial.params)
            ended.append(FinishedTrial(trial.number, params, values=values and tuple(values), parent=parent, **end))
    return sorted(ended, key=lambda trial: (trial.told, trial.number))


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution for a dimension. It has none for steps on a logarithmic scale: they become categories."""
    if isinstance(dimension, Category):
        return CategoricalDistribution(dimension.options)
    if dimension.log and dimension.step is not None:
        return CategoricalDistribution(dimension.values())
    if dimension.whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(float(dimension.low), float(dimension.high), log=dimension.log, step=dimension.step)


# Optuna warns of what it may change. Version 4 does so at every start of a trial, of `constant_liar`.
without_experimental_warnings = partial(
    warnings.catch_warnings, action="ignore", category=optuna.exceptions.ExperimentalWarning
)


PRUNERS: dict[str, Any] = {"median": optuna.pruners.MedianPruner, "hyperband": optuna.pruners.HyperbandPruner}

Search = Callable[[int], tuple[BaseSampler, int | None] | None]
"""From a trial's number to a sampler that gives its parameters, and the trial whose checkpoint it goes on from, if any;
None while what decides that is not known yet."""


def search_of(study: Study, settings: SweeperSettings) -> Search:
    """The search that the settings ask for."""
    # A sampler is made again for every trial, from seed and number: a seeded Optuna sampler that is made once repeats
    # its first draws after every restart.
    samplers: dict[str, Callable[..., BaseSampler]] = {
        "tpe": partial(optuna.samplers.TPESampler, constant_liar=True, n_startup_trials=10),
        "cmaes": optuna.samplers.CmaEsSampler, "gp": optuna.samplers.GPSampler,
    }  # fmt: skip

    def choose(number: int) -> tuple[BaseSampler, int | None] | None:
        params: Params | None = None
        parent: int | None = None
        if settings.population is not None:
            decision = decide(number, study.losses(), study.space, settings.population)
            if decision is None:
                return None
            params, parent = decision.params, decision.parent
        elif settings.sampler == "islands":
            params = offspring(number, fold(study.losses(), settings.islands), study.space, settings.islands)
        seed = (settings.seed * 1_000_003 + number) % 2**32  # what numpy takes
        with without_experimental_warnings():
            sampler = samplers.get(settings.sampler, optuna.samplers.RandomSampler)(seed=seed)
            return sampler if params is None else optuna.samplers.PartialFixedSampler(params, sampler), parent

    return choose
