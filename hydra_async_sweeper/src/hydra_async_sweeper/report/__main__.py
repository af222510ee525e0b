"""Rebuilds the tables and plots of a sweep from its study.journal. The sweep may still be running.

    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep
    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep --study-name second

Writes trials.csv, optimization_results.yaml and plots/*.png into the folder, and only reads the journal. Exit codes:
0 written; 2 the folder holds no such study, or the journal is damaged; 74 the disk has failed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from hydra_async_sweeper import islands
from hydra_async_sweeper.disk import DISK_FAULT, fault_in, line_of
from hydra_async_sweeper.ranking import FinishedTrials, results_of
from hydra_async_sweeper.report.plots import draw
from hydra_async_sweeper.report.tables import best_command, write_tables
from hydra_async_sweeper.settings import JOURNAL, PBT, RESULTS
from hydra_async_sweeper.space import from_plain
from hydra_async_sweeper.study import finished_of, without_experimental_warnings
from hydra_async_sweeper.terms import ONE_LANE, Lanes, printable

OK, BAD_USAGE = 0, 2


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the sweep")
    parser.add_argument("--study-name", metavar="NAME", help="of the study, if the journal holds several")
    parser.add_argument("--storage", type=Path, metavar="FILE", help=f"the journal, if it is not FOLDER/{JOURNAL}")
    parser.add_argument("--only-plots", action="store_true", help="leave the tables as they are")
    options = parser.parse_args(arguments)
    try:
        study = open_study(options.storage or options.folder / JOURNAL, options.study_name)
        identity = identity_of(study)
        options.folder.mkdir(parents=True, exist_ok=True)
        written = rebuild(options.folder, study, identity, tables=not options.only_plots)
    except (OSError, ValueError) as error:
        if fault := fault_in(error):
            print(printable(line_of(fault, options.folder)), file=sys.stderr)
            return DISK_FAULT
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE
    except (AttributeError, KeyError, TypeError) as error:
        print(printable(f"error: {options.folder}: its study holds what no sweep writes ({error!r})"), file=sys.stderr)
        return BAD_USAGE
    print(printable("\n".join(map(str, written))))
    return OK


def open_study(journal: Path, name: str | None) -> optuna.Study:
    """The study of that name in a journal, or the only one that it holds. Writes nothing.

    Raises:
        FileNotFoundError: there is no journal.
        ValueError: the journal is damaged, or does not hold the study.
    """
    if not journal.is_file():
        raise FileNotFoundError(
            f"{journal}: there is no such journal; name the folder of a sweep, or type --storage FILE"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with without_experimental_warnings():
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
        return optuna.load_study(study_name=name or names[0], storage=storage)


def identity_of(study: optuna.Study) -> Mapping[str, Any]:
    """What the sweeper has noted about a sweep.

    Raises:
        ValueError: another program has made the study.
    """
    identity = study.user_attrs.get("identity")
    if not isinstance(identity, Mapping) or not {"space", "objective", "sampler", "islands"} <= identity.keys():
        raise ValueError(f"study {study.study_name!r}: has no identity, so hydra/sweeper=async has not made it")
    return identity


def rebuild(folder: Path, study: optuna.Study, identity: Mapping[str, Any], *, tables: bool = True) -> list[Path]:
    """Writes the tables and plots; returns their files."""
    frozen = study.get_trials(deepcopy=False)
    trials = sorted((finished_of(t) for t in frozen if t.state.is_finished()), key=lambda t: (t.told, t.number))
    directions = [direction.name.lower() for direction in study.directions]
    ended = FinishedTrials(trials, identity["objective"] or ["value"], directions, lanes_of(identity))
    if tables:
        best = ended.best()
        write_tables(
            folder, ended, total=len(frozen), command=best_command(folder, best[0].number) if best else None,
            name=PBT if identity["sampler"] == PBT else "async", folder_of=partial(trial_folder, folder),
        )  # fmt: skip
    exchanges = exchanges_of(ended, {**study.user_attrs, **identity["islands"]})
    plots = draw(folder, study, ended, from_plain(identity["space"]), exchanges)
    return [*([folder / "trials.csv", folder / RESULTS] if tables else []), *plots]


def lanes_of(identity: Mapping[str, Any]) -> Lanes:
    """How the trials are numbered."""
    if identity["sampler"] == PBT:
        return Lanes("member", identity["population"]["members"], by_round=True)
    return Lanes("island", identity["islands"]["num_islands"]) if identity["islands"] else ONE_LANE


def trial_folder(folder: Path, number: int) -> str:
    """The name of a trial's folder: `trial_0007` where the program names them so, else `7`."""
    name = f"trial_{number:04d}"
    return name if (folder / name).is_dir() else str(number)


def exchanges_of(ended: FinishedTrials, plain: Mapping[str, Any]) -> Sequence[islands.Exchange]:
    """The exchanges between islands, from their settings; none where there are none."""
    if not {"island_size", "num_islands"} <= plain.keys():
        return ()
    settings = islands.islands(**{key: plain[key] for key in islands.IslandSettings._fields if key in plain})
    return islands.fold(results_of(ended.trials, ended.directions), settings).exchanges


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
