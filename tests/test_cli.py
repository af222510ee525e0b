"""Commands of `metalearn` without a file of tests of their own: compare, and those that need a checkout."""

import json
from pathlib import Path

import pytest

from metalearn.__main__ import main
from metalearn.cli import checkout, compare
from metalearn.reporting import plots
from metalearn.reporting.figures import new_axes
from metalearn.reporting.plots import curve_of


def run_of(folder: Path, accuracies: list[float]) -> Path:
    """A run folder with these validations, one each second."""
    rows = [
        {"step": 10 * number, "split": "val", "accuracy": value, "elapsed_seconds": float(number)}
        for number, value in enumerate(accuracies, start=1)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_validations_of_a_run_are_its_curve(tmp_path: Path) -> None:
    curve = curve_of(run_of(tmp_path / "a", [0.5, 0.75]))
    assert curve == ("a", "accuracy", [10, 20], [1.0, 2.0], [0.5, 0.75])


def test_runs_are_compared_in_one_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(run_of(tmp_path / name, [0.5, 0.9])) for name in "ab"]
    assert compare.main([f"one={runs[0]}", runs[1], "--output", "both.png"]) == 0
    assert Path("both.png").read_bytes().startswith(b"\x89PNG")
    assert compare.main([str(tmp_path)]) == 2 and "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("longest", "scale", "labels"), [(900, "linear", None), (20_000, "symlog", ["1,000", "10,000"])]
)
def test_short_and_long_runs_can_be_told_apart(longest: int, scale: str, labels: list[str] | None) -> None:
    _, axes = new_axes(4, 4)
    for end in (0, 100, longest):  # the first has been validated before any step only
        axes.plot([0, end], [1.0, 0.5])
    plots._spread_out(axes)
    assert axes.get_xscale() == scale
    if labels is not None:
        axes.figure.canvas.draw()
        assert [label.get_text() for label in axes.get_xticklabels()][-2:] == labels


@pytest.mark.parametrize("command", ["bench", "reproduce", "gpu-check"])
def test_what_the_wheel_lacks_needs_a_checkout(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert checkout.main_of(command)([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: metalearn {command}: needs a checkout of the repository") and said.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "cache", "compare", "doctor", "gpu-check", "reproduce"])
def test_a_command_names_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--no-such-option"])
    assert ended.value.code == 2 and f"usage: metalearn {command} " in capsys.readouterr().err
