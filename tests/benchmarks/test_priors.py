"""The figures of the comparison on real tables, by hand."""

import numpy as np

from benchmarks.priors import ranks, report, with_interval

AREAS = np.array([[0.9, 0.8, 0.8], [0.5, 0.7, 0.6]])


def test_the_best_has_rank_one_and_equal_ones_share_theirs() -> None:
    np.testing.assert_array_equal(ranks(AREAS), [[1, 2.5, 2.5], [3, 1, 2]])


def test_the_report_sorts_learners_by_their_means() -> None:
    figures = np.stack([AREAS, AREAS - 0.1, AREAS], axis=2)
    assert with_interval(AREAS[:, 0]) == "0.700 ± 0.392"  # 1.96 · 0.283 / √2
    lines = list(report(["a", "b", "ours"], ["one", "two"], figures, classes=True))
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| b", "| a", "| ours"]
    assert lines[2] == "| b | 0.750 ± 0.098 | 1.75 ± 1.47 | 0.050 ± 0.098 | 65.0% | 0.75 |"
    # An error is to be small.
    lines_of_errors = list(report(["a", "b", "ours"], ["one", "two"], figures, classes=False))
    assert [line.split(" | ")[0] for line in lines_of_errors[2:5]] == ["| a", "| ours", "| b"]
    assert lines_of_errors[2].split(" | ")[2:4] == ["2.00 ± 1.96", "0.000 ± 0.196"]
    assert lines[-2:] == ["| one | 0.900 | 0.800 | 0.800 |", "| two | 0.500 | 0.700 | 0.600 |"]
