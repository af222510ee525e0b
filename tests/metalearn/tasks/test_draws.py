"""The drawing of tasks in C beside numpy, whose numbers it must give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metalearn.storage.cache import compiler_of_machine
from metalearn.tasks.common import episodes
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds, TaskDraws, draw_many, draw_one
from metalearn.tasks.glyphs import glyphs

needs_compiler = pytest.mark.skipif(compiler_of_machine() is None, reason="no C compiler")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[TaskDraws, int]:
    ways, per_class = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    classes = draw(st.integers(ways, 3000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = generator.integers(per_class, per_class + 40, classes)
    root = draw(st.integers(0, 2**64 - 1) | st.integers(0, 3))
    index = draw(st.integers(0, 2**62) | st.integers(0, 100))
    return TaskDraws(root, draw(st.integers(0, 2)), sizes, ways, per_class, draw(st.booleans())), index


@needs_compiler
@settings(deadline=None, max_examples=300)
@given(drawn())
def test_c_draws_the_numbers_of_numpy(case: tuple[TaskDraws, int]) -> None:
    task, index = case
    assert episodes._drawn_by_c() is not None
    assert np.array_equal(draw_many(task, np.array([index]))[0], draw_one(task, index))


def test_the_numbers_of_a_task_are_the_pictures_of_its_episode() -> None:
    source = glyphs(
        episode=EpisodeSpec(5, 2, 3), image_size=12, channels=1, rotations=True, seeds=Seeds(3, 4)
    )  # fmt: skip
    pictures = source.pictures_of("val")  # type: ignore[attr-defined]
    for index in (0, 11):
        (numbers,) = source.numbers("val", torch.tensor([index]))  # type: ignore[attr-defined]
        support, query = source.episodes("val", torch.tensor([index]))
        for way, (turns, *chosen) in enumerate(numbers.tolist()):
            wanted = torch.stack([torch.rot90(pictures[number], turns) for number in chosen]).float() / 255
            both = torch.cat([support.x[0, support.y[0] == way], query.x[0, query.y[0] == way]])
            assert both[:, 0].equal(wanted)


def test_where_c_draws_otherwise_numpy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskDraws(0, 0, np.full(30, 20), 5, 2, rotations=True)
    monkeypatch.setattr(episodes, "draw_one", lambda draws, index: draw_one(draws, index + 1))  # as a later numpy may
    monkeypatch.setattr(episodes, "_drawn_by_c", episodes._drawn_by_c.__wrapped__)
    assert np.array_equal(draw_many(task, np.arange(3)), np.stack([draw_one(task, index) for index in (1, 2, 3)]))


def test_more_classes_than_c_can_choose_of_are_drawn_by_numpy() -> None:
    task = TaskDraws(0, 0, np.full(10_001, 5), 300, 1, rotations=False)
    assert np.array_equal(draw_many(task, np.arange(2))[1], draw_one(task, 1))
