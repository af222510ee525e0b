"""Rebuilds the tables and plots of a sweep from its study.journal. The sweep may still be running.

    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep
    python -m hydra_async_sweeper.report outputs/maml_omniglot/sweep --study-name second

Writes trials.csv, optimization_results.yaml and plots/*.png into the folder, and only reads the journal. Exit codes:
0 written; 2 the folder holds no such study, or the journal is damaged; 74 the disk has failed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from hydra_async_sweeper.islands import Exchange, IslandSettings, fold
from hydra_async_sweeper.report.plots import draw
from hydra_async_sweeper.report.tables import best_command, write_tables
from hydra_async_sweeper.settings import JOURNAL, PBT, RESULTS
from hydra_async_sweeper.slots import DISK_FAULT, fault_in, line_of
from hydra_async_sweeper.space import from_plain
from hydra_async_sweeper.study import finished_of, without_experimental_warnings
from hydra_async_sweeper.trials import ONE_LANE, FinishedTrials, Lanes

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
        written = rebuild(options.folder, study, tables=not options.only_plots)
    except (OSError, ValueError) as error:
        fault = fault_in(error)
        print(line_of(fault, options.folder) if fault else f"error: {error}", file=sys.stderr)
        return DISK_FAULT if fault else BAD_USAGE
    print("\n".join(map(str, written)))
    return OK


def open_study(journal: Path, name: str | None) -> optuna.Study:
    """The study of that name in a journal, or the only one that it holds. Writes nothing.

    Raises:
        FileNotFoundError: there is no journal.
        ValueError: the journal is damaged, does not hold the study, or another program has made it.
    """
    if not journal.is_file():
        raise FileNotFoundError(
            f"{journal}: there is no such journal; name the folder of a sweep, or type --storage FILE"
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with without_experimental_warnings():
        names: list[str] = []
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
            names += sorted(study.study_name for study in storage.get_all_studies())
            study = optuna.load_study(study_name=name, storage=storage)
        except Exception as error:  # what Optuna raises depends on the line that is damaged
            several = f"type --study-name {names[0]}" if names else "it is damaged, or holds no study yet"
            raise ValueError(f"{journal}: {error}; it holds {', '.join(names) or 'none'}; {several}") from error
    if "identity" not in study.user_attrs:
        raise ValueError(f"study {study.study_name!r}: has no identity, so hydra/sweeper=async has not made it")
    return study


def rebuild(folder: Path, study: optuna.Study, *, tables: bool = True) -> list[Path]:
    """Writes the tables and plots; returns their files."""
    identity: Mapping[str, Any] = study.user_attrs["identity"]
    frozen = study.get_trials(deepcopy=False)
    trials = sorted((finished_of(t) for t in frozen if t.state.is_finished()), key=lambda t: (t.told, t.number))
    directions = [direction.name.lower() for direction in study.directions]
    lanes = ONE_LANE
    if identity["sampler"] == PBT:
        lanes = Lanes("member", identity["population"]["members"], by_round=True)
    elif identity["islands"]:
        lanes = Lanes("island", identity["islands"]["num_islands"])
    ended = FinishedTrials(trials, identity["objective"] or ["value"], directions, lanes)

    def folder_of(number: int) -> str:
        """`trial_0007` where the program names folders so, else `7`."""
        name = f"trial_{number:04d}"
        return name if (folder / name).is_dir() else str(number)

    folder.mkdir(parents=True, exist_ok=True)
    if tables:
        best = ended.best()
        write_tables(
            folder, ended, total=len(frozen), command=best_command(folder, best[0].number) if best else None,
            folder_of=folder_of,
        )  # fmt: skip
    exchanges = exchanges_of(ended, {**study.user_attrs, **identity["islands"]})
    plots = draw(folder, study, ended, from_plain(identity["space"]), exchanges)
    return [*([folder / "trials.csv", folder / RESULTS] if tables else []), *plots]


def exchanges_of(ended: FinishedTrials, plain: Mapping[str, Any]) -> Sequence[Exchange]:
    """The exchanges between islands, from their settings; none where there are none."""
    if not {"island_size", "num_islands"} <= plain.keys():
        return ()
    settings = IslandSettings(**{key: plain[key] for key in IslandSettings._fields if key in plain})
    return fold(ended.scored(), settings).exchanges


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
