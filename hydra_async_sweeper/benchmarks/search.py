"""Compares searches on functions whose minimum is known, as a Markdown table of the best loss.

    pip install optuna                                   the baseline TPE; nothing else needs it
    python hydra_async_sweeper/benchmarks/search.py --seeds 20 --jobs 4      40 minutes of CPU time, nearly all TPE's

One trial runs at a time: every suggestion knows every earlier result.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from search_functions import PROBLEMS, Problem

from hydra_async_sweeper.islands import IslandSettings, ScoredTrial, fold, offspring
from hydra_async_sweeper.space import Params

POP_SIZE = 8
"""Of each island: twice the number of workers, as Propulate's examples have it, for four workers."""

Search = Callable[[Problem, int], float]
"""From a problem and a seed to the best loss after all evaluations."""


def random_search(problem: Problem, seed: int) -> float:
    """Every parameter uniform in its limits: an island that never has enough individuals to breed."""
    settings = IslandSettings(seed=seed, pop_size=problem.evaluations)
    return min(loss_of(problem, offspring(n, [[]], problem.space, settings)) for n in range(problem.evaluations))


def island_search(problem: Problem, seed: int, *, num_islands: int, pollination: bool = True) -> float:
    """Our islands of one worker each."""
    settings = IslandSettings(seed=seed, pop_size=POP_SIZE, num_islands=num_islands, pollination=pollination)
    trials: list[ScoredTrial] = []
    losses: list[float] = []
    for number in range(problem.evaluations):
        params = offspring(number, fold(trials, settings), problem.space, settings)
        losses.append(loss_of(problem, params))
        trials.append(ScoredTrial(number, number, params, losses[-1]))
    return min(losses)


def tpe(problem: Problem, seed: int) -> float:
    """Optuna's TPE with its defaults."""
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def objective(trial: Any) -> float:
        ends = zip(problem.space, problem.limits, strict=True)
        return problem.loss([trial.suggest_float(key, low, high) for key, (low, high) in ends])

    study.optimize(objective, n_trials=problem.evaluations)
    return float(study.best_value)


def loss_of(problem: Problem, params: Params) -> float:
    return problem.loss([float(params[key]) for key in problem.space])


SEARCHES: dict[str, Search] = {
    "random": random_search,
    "TPE": tpe,
    "one island": partial(island_search, num_islands=1),
    "4 islands, pollination": partial(island_search, num_islands=4),
    "4 islands, migration": partial(island_search, num_islands=4, pollination=False),
}


def measure(problem: str, search: str, seed: int) -> tuple[float, float]:
    """The best loss, and CPU seconds."""
    start = time.process_time()
    best = SEARCHES[search](PROBLEMS[problem], seed)
    return best, time.process_time() - start


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="searches of each kind on each function")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="FUNCTION")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: quartiles need two searches or more; type --seeds 20")
    if importlib.util.find_spec("optuna") is None:
        parser.error("Optuna is not installed; type pip install optuna")
    print("| function | dimensions | evaluations | minimum |", " | ".join(SEARCHES), "|")
    print("| --- " * 4 + "| --- " * len(SEARCHES) + "|", flush=True)
    cpu = dict.fromkeys(SEARCHES, 0.0)
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in options.only:
            problem = PROBLEMS[name]
            row = {}
            for search in SEARCHES:
                best, seconds = zip(*pool.map(partial(measure, name, search), range(options.seeds)), strict=True)
                row[search] = best
                cpu[search] += sum(seconds) / options.seeds
            print(line(problem, row), flush=True)
    print()
    print(f"Best loss, lower is better: median of {options.seeds} seeds (quartiles); bold: the lowest median.")
    print(f"An island breeds from its best {POP_SIZE}. One trial runs at a time.")
    print("CPU seconds of one search, mean over the functions:", end=" ")
    print(", ".join(f"{search} {total / len(options.only):.2g}" for search, total in cpu.items()) + ".")
    return 0


def line(problem: Problem, row: Mapping[str, Sequence[float]]) -> str:
    """A row of the table."""
    cells = [problem.name, str(len(problem.limits)), f"{problem.evaluations:,}", f"{problem.minimum:g}"]
    least = min(median(best) for best in row.values())
    for best in row.values():
        low, middle, high = quantiles(best, n=4, method="inclusive")
        mark = "**" if middle == least else ""
        cells.append(f"{mark}{middle:.3g}{mark} ({low:.3g} to {high:.3g})")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
