"""Steps that cannot be made: numbers that are not finite, faulty functions of the user."""

from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS, RUN, TOGETHER
from tests.runs import ROOT, Start, slow

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("how", ["split", *(pytest.param(how, marks=slow) for how in TOGETHER if how != "split")])
def test_what_is_not_finite_is_not_applied(how: str, start: Start, tmp_path: Path) -> None:
    bad = ["optimizer.lr=1e30", "trainer.steps=50", "launch.max_restarts=2"]
    outcome = start(*ENDLESS, *TOGETHER[how], *bad, "workers=2", "hydra.run.dir=" + str(RUN)).wait(60)
    assert outcome.code == 3 and "is not finite" in outcome.text, outcome.text
    assert "The step is not applied, and nothing was saved" in outcome.text and "restart" not in outcome.text
    worker = "worker1" if how == "split" else "worker0"  # samples end at the last shard
    assert outcome.text.count(f"on {worker}: ") == 1, outcome.text


OWN = [
    ("partitioner", "deal_twice", "it gave out [1] twice"),
    ("reducer", "fail_at_the_third_call", "failed with ArithmeticError: cannot reduce this"),
]


@pytest.mark.parametrize(("group", "name", "message"), OWN)
def test_faulty_functions_of_ones_own_end_the_run(
    group: str, name: str, message: str, start: Start, tmp_path: Path
) -> None:
    own = [f"{group}=function", f"{group}.name=tests.own_functions.{name}"]
    outcome = start(*ENDLESS, "workers=2", *own, PYTHONPATH=str(ROOT)).wait(60)
    assert outcome.code == 1 and message in outcome.text, outcome.text
    saved = list((tmp_path / RUN / "checkpoints").glob("step_*/manifest.json"))
    assert bool(saved) == (name == "fail_at_the_third_call")


def test_missing_functions_are_reported_before_anything_starts(start: Start, tmp_path: Path) -> None:
    outcome = start(*ENDLESS, "workers=2", "reducer=function", "reducer.name=nowhere.mean").wait(60)
    assert outcome.code == 2 and "reducer.name=nowhere.mean" in outcome.text, outcome.text
    assert list(tmp_path.glob("outputs")) == []


@slow
def test_a_run_without_a_finite_validation_ends_with_one_line(start: Start, tmp_path: Path) -> None:
    """Of all ranks: those that rank zero leaves in the test would say that it does not answer."""
    wild = ["trainer.steps=2", "trainer.val_every=2", "algorithm.inner_lr=1000", "algorithm.eval_steps=30"]
    outcome = start(*ENDLESS, *TOGETHER["ddp-maml"], *wild, "optimizer.lr=1e-6", "workers=2").wait(60)
    assert outcome.code == 3 and outcome.text.count("error: ") == 1, outcome.text
    assert "so this run has no result" in outcome.text, outcome.text
