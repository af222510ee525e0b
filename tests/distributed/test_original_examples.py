"""The original's two few-shot examples, unmodified, with their default of 32 tasks a step on two processes."""

import os
from pathlib import Path

import pytest

from benchmarks.original_examples import PROGRAMS, run
from benchmarks.remote_calls import ORIGINAL

FOLDER = os.environ.get("TORCHOPT_EXAMPLES", "")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="set TORCHOPT_EXAMPLES to examples/distributed/few-shot of metaopt/torchopt")
@pytest.mark.skipif(not (ORIGINAL / "torchopt").is_dir(), reason="run python benchmarks/remote_calls.py --install")
@pytest.mark.skipif("METALEARN_DATA" not in os.environ, reason="set METALEARN_DATA to a folder with Omniglot")
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_makes_fifty_steps_learns_and_stays_small(program: str) -> None:
    figures = run(Path(FOLDER) / program, "distributed", tasks=32, steps=50, limit=1500)
    assert len(figures.losses) == 50 and figures.learnt()
    assert max(figures.memory) < 5e9, figures.memory
