"""Population based training by the real program: the same lineage and bits for any slots, after kills, and alone."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from hydra_async_sweeper.islands import ScoredTrial
from hydra_async_sweeper.population import PopulationSettings, decide
from hydra_async_sweeper.space import Number
from tests.runs import metrics, slow
from tests.sweeps.programs import PLOTS, completed, params, rows, run_until_killed, sweep

pytestmark = pytest.mark.thorough

SPACE = ("optimizer.lr=tag(log,interval(1e-4,1e-2))", "algorithm.inner_lr=interval(0.001,0.1)")
SEARCH = ("hydra/sweeper=pbt", "hydra.sweeper.members=3", "hydra.sweeper.rounds=3", "trainer.steps=91")
KEYS = ("number", "parent", "val.mse", "optimizer.lr", "algorithm.inner_lr")


def population_of(folder: Path) -> list[list[str]]:
    return [[row[key] for key in KEYS] for row in rows(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "sweep"
    yield folder, completed(folder, *SPACE, *SEARCH, "hydra.sweeper.n_jobs=2", PLOTS)


def test_each_round_starts_from_its_parents_checkpoint(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    table = rows(folder)
    assert [(row["round"], row["member"]) for row in table] == [(str(n // 3), str(n % 3)) for n in range(9)]
    space = {"optimizer.lr": Number(1e-4, 1e-2, log=True), "algorithm.inner_lr": Number(0.001, 0.1)}
    ended = [
        ScoredTrial(n, n, {key: float(row[key]) for key in space}, float(row["val.mse"])) for n, row in enumerate(table)
    ]
    settings = PopulationSettings(seed=0, members=3, rounds=3)
    for number, row in enumerate(table):
        found = decide(number, ended[: number // 3 * 3], space, settings)
        assert found is not None and found.params == ended[number].params
        assert row["parent"] == ("" if found.parent is None else str(found.parent))
        steps = [m["step"] for m in metrics(folder / f"trial_{number:04d}") if m["split"] == "train"]
        first, last = 91 * (number // 3) // 3, 91 * (number // 3 + 1) // 3
        assert min(steps) > first and max(steps) <= last
    taken = [row for row in table[3:] if int(row["parent"]) % 3 != int(row["member"])]
    assert len(taken) == 2  # the worst of both first rounds


def test_the_results_have_the_winners_lineage(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    table = rows(folder)
    best = min(table[6:], key=lambda row: float(row["val.mse"]))
    results = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert results["best_trial"] == int(best["number"])
    chain = [int(best["number"])]
    while parent := table[chain[0]]["parent"]:
        chain.insert(0, int(parent))
    assert [entry["trial"] for entry in results["lineage"]] == chain and len(chain) == 3
    assert (folder / "plots/population.png").exists()


@slow
def test_kills_and_other_slots_change_no_decision_and_no_bit(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    rng = random.Random(5)
    for kind, slots in (("controller", 1), ("trial", 3), ("nursery", 2)):
        program = sweep(tmp_path / "sweep", *SPACE, *SEARCH, f"hydra.sweeper.n_jobs={slots}")
        run_until_killed(program, kind, rng.uniform(0, 1.5))
    completed(tmp_path / "sweep", *SPACE, *SEARCH)
    assert population_of(tmp_path / "sweep") == population_of(undisturbed[0])
    assert params(tmp_path / "sweep") == params(undisturbed[0])


def test_diverged_members_take_over_until_none_is_left(tmp_path: Path) -> None:
    search = ("hydra/sweeper=pbt", "hydra.sweeper.members=2", "hydra.sweeper.rounds=2", "trainer.steps=20")
    outcome = sweep(tmp_path / "sweep", "algorithm.inner_lr=1e30,1e31", *search).wait()
    assert outcome.code == 1, outcome.text
    assert "no member of the latest round has a value" in outcome.text
    assert [row["outcome"] for row in rows(tmp_path / "sweep")] == ["diverged", "diverged"]
