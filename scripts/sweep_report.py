"""Rebuilds the tables and plots of a sweep from its study.journal. The sweep may still be running.

    python scripts/sweep_report.py outputs/maml_omniglot/sweep
    python scripts/sweep_report.py outputs/maml_omniglot/sweep --study-name second

Writes trials.csv, optimization_results.yaml and plots/*.png into the folder, and only reads the journal. Exit codes:
0 written; 2 the folder holds no such study, or the journal is damaged.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hydra_async_sweeper import islands, report  # noqa: E402 (the path comes first)
from hydra_async_sweeper.ranking import best_trials, results_of  # noqa: E402
from hydra_async_sweeper.settings import PBT  # noqa: E402
from hydra_async_sweeper.space import from_plain  # noqa: E402
from hydra_async_sweeper.terms import ONE_LANE, FinishedTrial, Lanes  # noqa: E402

if TYPE_CHECKING:
    import optuna

OK, BAD_USAGE = 0, 2

JOURNAL = "study.journal"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the sweep")
    parser.add_argument("--study-name", metavar="NAME", help="of the study, if the journal holds several")
    parser.add_argument("--storage", type=Path, metavar="FILE", help=f"the journal, if it is not FOLDER/{JOURNAL}")
    options = parser.parse_args(arguments)
    try:
        study = open_study(options.storage or options.folder / JOURNAL, options.study_name)
        identity = identity_of(study)
        options.folder.mkdir(parents=True, exist_ok=True)
        written = rebuild(options.folder, study, identity)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except (AttributeError, KeyError, TypeError) as error:
        print(f"error: {options.folder}: its study holds what no sweep writes ({error!r})", file=sys.stderr)
        return BAD_USAGE
    print("\n".join(map(str, written)))
    return OK


def open_study(journal: Path, name: str | None) -> "optuna.Study":
    """The study of that name in a journal, or the only one that it holds. Writes nothing.

    Raises:
        FileNotFoundError: there is no journal.
        ValueError: optuna is missing, the journal is damaged, or does not hold the study.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError("a sweep needs the package optuna; type pip install optuna") from error
    if not journal.is_file():
        raise FileNotFoundError(
            f"{journal}: there is no such journal; name the folder of a sweep, or type --storage FILE"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(journal))
            storage = optuna.storages.JournalStorage(backend)
        except Exception as error:  # what Optuna raises depends on the line that is damaged
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{journal}: is damaged, or no journal of Optuna's ({reason})") from error
        names = sorted(study.study_name for study in storage.get_all_studies())
        if not names:
            raise ValueError(f"{journal}: holds no study yet; let its first trial start")
        if name is None and len(names) > 1:
            raise ValueError(f"{journal}: holds {', '.join(names)}; type --study-name {names[0]}")
        if name is not None and name not in names:
            raise ValueError(f"--study-name {name}: {journal} holds {', '.join(names)}; type --study-name {names[0]}")
        name = name or names[0]
        return optuna.load_study(study_name=name, storage=storage)


def identity_of(study: "optuna.Study") -> Mapping[str, Any]:
    """What the sweeper has noted about a sweep.

    Raises:
        ValueError: another program has made the study.
    """
    identity = study.user_attrs.get("identity")
    if not isinstance(identity, Mapping) or not {"space", "objective", "sampler", "islands"} <= identity.keys():
        raise ValueError(f"study {study.study_name!r}: has no identity, so hydra/sweeper=async has not made it")
    return identity


def rebuild(folder: Path, study: "optuna.Study", identity: Mapping[str, Any]) -> list[Path]:
    """Writes the tables and plots; returns their files."""
    from hydra_async_sweeper.study import finished_of

    frozen = study.get_trials(deepcopy=False)
    trials = [finished_of(trial) for trial in frozen if trial.state.is_finished()]
    directions = [direction.name.lower() for direction in study.directions]
    objectives = identity["objective"] or ["value"]
    lanes = lanes_of(identity)
    best = best_trials(trials, directions, lanes)
    command = report.best_command(folder, best[0].number) if best else None
    report.write_tables(
        folder, trials, objectives, directions, total=len(frozen), command=command, lanes=lanes,
        name=PBT if identity["sampler"] == PBT else "async",
        folder_of=partial(trial_folder, folder),
    )  # fmt: skip
    plots = report.draw(
        folder, trials, objectives, directions, from_plain(identity["space"]),
        exchanges=exchanges_of(trials, directions, {**study.user_attrs, **identity["islands"]}), lanes=lanes,
        importances=report.importances_of(study),
    )  # fmt: skip
    return [folder / "trials.csv", folder / "optimization_results.yaml", *plots]


def lanes_of(identity: Mapping[str, Any]) -> Lanes:
    """How the trials are numbered."""
    if identity["sampler"] == PBT:
        return Lanes("member", identity["population"]["members"], by_round=True)
    return Lanes("island", identity["islands"]["num_islands"]) if identity["islands"] else ONE_LANE


def trial_folder(folder: Path, number: int) -> str:
    """The name of a trial's folder: `trial_0007` in this program's sweeps, `7` in others."""
    name = f"trial_{number:04d}"
    return name if (folder / name).is_dir() else str(number)


def exchanges_of(
    trials: Sequence[FinishedTrial], directions: Sequence[str], plain: Mapping[str, Any]
) -> Sequence[islands.Exchange]:
    """The exchanges between islands, from their settings; none where there are none."""
    if not {"island_size", "num_islands"} <= plain.keys():
        return ()
    settings = islands.islands(**{key: plain[key] for key in islands.IslandSettings._fields if key in plain})
    return islands.fold(results_of(trials, directions), settings).exchanges


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
