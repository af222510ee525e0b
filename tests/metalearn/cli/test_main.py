"""The command `metalearn`: its help, and the commands without a file of tests of their own."""

import importlib
import json
import math
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from metalearn import errors
from metalearn.app.job import installed, script
from metalearn.cli import main as command_line
from metalearn.cli import runs as commands_on_runs
from metalearn.cli.main import COMMANDS, FUNCTIONS, IN_CHECKOUT, main, sweeping
from metalearn.cli.train import main as train_main
from metalearn.config.options import groups
from metalearn.errors import as_typed
from metalearn.reporting.index import _spread_out, curve_of
from metalearn.reporting.page import new_figure
from metalearn.runs.metrics import shown, write_table
from tests.runs import ROOT, said_by


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
    assert commands_on_runs.compare([f"one={runs[0]}", runs[1], "--output", "both.png"]) == 0
    assert Path("both.png").read_bytes().startswith(b"\x89PNG")
    assert commands_on_runs.compare([str(tmp_path)]) == 2 and "metrics.jsonl" in capsys.readouterr().err


def test_a_folder_with_an_equals_sign_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Path("seed0,optimizer.lr=0.01"), [0.5])
    for typed, name in (("seed0,optimizer.lr=0.01", "seed0,optimizer.lr=0.01"), ("a=seed0,optimizer.lr=0.01", "a")):
        assert commands_on_runs.named_run(typed) == (name, Path("seed0,optimizer.lr=0.01"))


def with_tests(folder: Path, values: list[float], digests: list[int] | None) -> Path:
    table = {"loss": torch.tensor(values)[:, None], "accuracy": torch.tensor([[0.0, v] for v in values]).double()}
    write_table(folder / "test.csv", table | ({} if digests is None else {"digest": torch.tensor(digests)[:, None]}))
    return folder


def test_the_tests_of_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = np.array([0.5, 0.75, 1.0, 0.25]), np.array([0.75, 0.75, 1.0, 0.5])
    same, fewer = [1, -2, 3, 4], [1, -2, 3]
    runs = [("a", one, same), ("b", two, same), ("c", two[:3], fewer), ("d", two, None)]
    for name, values, digests in runs:
        with_tests(run_of(tmp_path / name, [0.5]), values.tolist(), digests)
    run_of(tmp_path / "running", [0.5])
    assert commands_on_runs.compare(["a", "b", "c", "d", "running"]) == 0
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    paired = 100 * 1.96 * stats.sem(two - one)
    wider = "each interval is that of two independent means, which is wider"
    apart = [100 * 1.96 * math.hypot(stats.sem(one), stats.sem(other)) for other in (two[:3], two)]
    assert lines == [
        ["run", "test accuracy", "difference to a"],
        ["a", f"62.50% ± {100 * 1.96 * stats.sem(one):.2f}%"],
        ["b", f"75.00% ± {100 * 1.96 * stats.sem(two):.2f}%", f"+12.50% ± {paired:.2f}%", "paired, 4 tasks"],
        ["c", f"83.33% ± {100 * 1.96 * stats.sem(two[:3]):.2f}%", f"+20.83% ± {apart[0]:.2f}%", "not paired"],
        ["d", f"75.00% ± {100 * 1.96 * stats.sem(two):.2f}%", f"+12.50% ± {apart[1]:.2f}%", "not paired"],
        ["running", "no test yet"],
        [f"c: other test tasks than those of a; {wider}"],
        [f"d: not known whether of the test of a; {wider}"],  # as of single samples, which have no digests
        ["compare.png"],
    ]
    assert commands_on_runs.compare(["a", "b", "--output", "both.svg"]) == 0
    assert "<svg" in (tmp_path / "both.svg").read_text()
    assert commands_on_runs.compare(["a", "b", "--output", "both.txt"]) == 2
    assert "--output=both.txt: must end with .png, .svg" in capsys.readouterr().err
    (tmp_path / "b/test.csv").write_text("task,loss\n")
    assert commands_on_runs.compare(["a", "b"]) == 2 and "b/test.csv: is no table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "value", "ci95", "words"),
    [
        ("accuracy", 0.5, 0.1234, "50.00% ± 12.34%"), ("mse", 3.15876, 0.92, "3.16 ± 0.92"),
        ("mse", 1234.5, 56.7, "1234 ± 57"), ("mse", 0.0123456, 0.00099, "0.01235 ± 0.00099"),
        ("mse", 2.0, 0.0, "2 ± 0"), ("mse", 0.25, None, "0.25"), ("mse", 2.0, math.nan, "2 ± nan"),
    ],
)  # fmt: skip
def test_a_figure_has_the_digits_that_its_interval_has(
    metric: str, value: float, ci95: float | None, words: str
) -> None:
    assert shown(metric, value, ci95) == words


@pytest.mark.parametrize(
    ("longest", "scale", "labels"), [(900, "linear", None), (20_000, "symlog", ["1,000", "10,000"])]
)
def test_short_and_long_runs_can_be_told_apart(longest: int, scale: str, labels: list[str] | None) -> None:
    with new_figure(4, 4) as figure:
        axes = figure.subplots()
        for end in (0, 100, longest):  # the first has been validated before any step only
            axes.plot([0, end], [1.0, 0.5])
        _spread_out(axes)
        assert axes.get_xscale() == scale
        if labels is not None:
            figure.canvas.draw()
            assert [label.get_text() for label in axes.get_xticklabels()][-2:] == labels


@pytest.mark.parametrize("command", ["bench", "reproduce", "gpu-check"])
def test_what_the_wheel_lacks_needs_a_checkout(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: metalearn {command}: needs a checkout of the repository") and said.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "cache", "compare", "doctor", "gpu-check", "reproduce"])
def test_a_command_names_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--no-such-option"])
    assert ended.value.code == 2 and f"usage: metalearn {command} " in capsys.readouterr().err


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"\n  {command} " in overview for command in COMMANDS)
    for words in (["help"], []):  # without a word, no training of minutes begins
        assert main(words) == 0 and capsys.readouterr().out == overview


def test_a_reader_that_leaves_is_no_failure() -> None:
    """As `head` does. A command that has failed in something else stays one that has failed."""
    for command, code in (
        ("from metalearn.app.process import print_all as ask; ask('x' * 10**6)", 0),
        ("from metalearn.app.process import print_all as ask; return ask('x' * 10**6) + 1", 1),
        ("print('x' * 10**6)", 0),
    ):
        program = (
            "import sys, types, metalearn.cli as cli\n"
            "from metalearn.cli.fit import ended\n"
            f"@ended\ndef main(arguments):\n    {command}\n    return 0\n"
            "sys.modules['shown'] = types.SimpleNamespace(main=main)\n"
            "sys.exit(cli.run('shown', []))"
        )
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            said = process.stderr.read()
        assert (process.returncode, said) == (code, b""), said


def test_ctrl_c_before_a_command_runs_shows_no_traceback() -> None:
    """Importing takes a second. Here the import of a command is interrupted."""
    program = "import importlib, os, signal, sys; from metalearn.cli import run; "
    program += "importlib.import_module = lambda _: os.kill(os.getpid(), signal.SIGINT); sys.exit(run('any', []))"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert (outcome.returncode, outcome.stderr) == (130, b"")


def test_every_command_is_a_function_and_every_file_has_one() -> None:
    places = [FUNCTIONS.get(name, f"{name}.main") for name in {*COMMANDS} - {"help", "sweep", *IN_CHECKOUT}]
    files = {path.stem for path in (ROOT / "metalearn/cli").glob("*.py")} - {"__init__", "main", "arguments"}
    assert {place.partition(".")[0] for place in places} == files
    for module, _, function in (place.partition(".") for place in places):
        assert callable(getattr(importlib.import_module(f"metalearn.cli.{module}"), function))


@pytest.mark.parametrize(
    "command",
    [["-m", "metalearn", "fit", "--version"], ["train.py", "a=1", "--version"], ["scripts/evaluate.py", "--version"]],
)
def test_the_version_is_that_of_the_project(command: list[str]) -> None:
    said = said_by([sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in command)])
    assert (said.returncode, said.stderr) == (0, "") and said.stdout.count("\n") == 1
    assert said.stdout.startswith("metalearn ") and f"torch {version('torch')}" in said.stdout
    assert "metalearn 0." in said.stdout or "not installed" in said.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["maml_omniglot"], "did you mean experiment=maml_omniglot?"),
        (["train", "MAML"], "did you mean algorithm=maml?"),
        (["train", "seed=1", "omniglott"], "did you mean dataset=omniglot?"),
        (["train", "experiment=MAML_Omniglot"], "did you mean maml_omniglot?"),
        (["train", "Trainer.Steps=3"], "did you mean trainer.steps?"),
        (["Evaluat"], "did you mean evaluate?"),
    ],
)
def test_a_word_that_is_none_gets_the_one_that_is_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert hint in said and said.count("\n") == 1


METALEARN = f"#!{sys.executable}\nimport sys\nfrom metalearn.cli.main import main\nsys.exit(main())\n"

IN_BASH = r"""
PATH=$1:$PATH; eval "$(metalearn -sc install=bash)"
for line in "metalearn ev" "metalearn sweep hydra.sweeper.n_t" "metalearn train experiment=maml_mini"; do
    COMP_LINE=$line COMP_POINT=${#line}; words=($line); COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    $(complete -p metalearn | sed 's/.*-F \([^ ]*\).*/\1/')
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.thorough
def test_bash_completes_commands_keys_and_choices(tmp_path: Path) -> None:
    (tmp_path / "metalearn").write_text(METALEARN)
    (tmp_path / "metalearn").chmod(0o755)
    said = said_by(["bash", "-c", IN_BASH, "bash", str(tmp_path)], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert said.stdout.splitlines() == ["evaluate", "hydra.sweeper.n_trials=", "experiment=maml_mini_imagenet"], said


@pytest.mark.parametrize(
    ("topic", "lines"),
    [
        ("algorithm", ["algorithm=maml ", "Keys of algorithm=reptile:", "  algorithm.inner_lr="]),
        ("algorithm=maml", ["algorithm=maml ", "Keys of algorithm=maml:"]),
        ("trainer.steps", ["  trainer.steps="]),
        ("launch", ["  launch.nnodes="]),
        ("seed", ["  seed="]),
        ("adapt", ["usage: metalearn adapt "]),
    ],
)
def test_help_can_be_narrowed(topic: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if topic == "adapt":
        with pytest.raises(SystemExit):
            main(["help", topic])
    else:
        assert main(["help", topic]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{line}" in f"\n{said}" for line in lines), said
    if topic == "algorithm=maml":
        assert "reptile" not in said


@pytest.mark.parametrize(
    ("topic", "nearest"),
    [("algoritm", "algorithm"), ("trainer.stepz", "trainer.steps"), ("algorithm=malm", "algorithm=maml")],
)
def test_help_names_the_nearest_topic(topic: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 2
    assert f"help {topic}: is no command, group, option or key; did you mean {nearest}?" in capsys.readouterr().err


def test_a_sweep_is_an_asynchronous_multirun_by_default() -> None:
    assert sweeping(["a=1,2"]) == ["--multirun", "hydra/sweeper=async", "a=1,2"]
    assert sweeping(["hydra/sweeper=basic", "a=1,2"]) == ["--multirun", "hydra/sweeper=basic", "a=1,2"]


def test_training_imports_neither_what_draws_nor_what_compiles(tmp_path: Path) -> None:
    """matplotlib takes half a second, torch._dynamo one: longer than torch itself."""
    overrides = ["experiment=maml_sinusoid", "trainer.steps=1", "trainer.val_tasks=2", "trainer.test_tasks=2",
                 "logger.plots=false", "logger.report=false", f"hydra.run.dir={tmp_path}/run"]  # fmt: skip
    program = (
        f"import sys; from metalearn.cli.train import main; code = main({overrides}); "
        "print(code, sorted({'torch._dynamo', 'sympy', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1:] == ["0 []"], run.stdout + run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prior", "check", "gp", "--tasks", "2", "dataset.x=1"], "x"),
        (["compare", "a", "--output", "both.png", "b"], "a: holds no metrics.jsonl"),
        (["predict", "a", "b.jpg", "--out", "c.csv", "d.jpg"], "CLASSIFIER=a: there is no such folder"),
        (["remove", "a", "cat", "--threads", "1", "dog"], "CLASSIFIER=a: there is no such folder"),
        (["evaluate", "--config-dir", "yamls", "checkpoint=a"], "checkpoint=a: must be the folder of a checkpoint"),
        (["evaluate"], "checkpoint: missing; type checkpoint=…/checkpoints/best"),
    ],
)
def test_options_may_stand_anywhere(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("yamls").mkdir()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_help_of_a_training_fits_on_a_screen_or_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "algorithm/mine.yaml"
    mine.parent.mkdir()
    mine.write_text("# of mine\n_target_: mine.mine\nrate: 1.0  # a rate of mine\n")
    monkeypatch.setattr(sys, "argv", ["metalearn"])
    monkeypatch.setattr("metalearn.config.options.own_folders", [])
    flag = f"--config-dir={tmp_path}"
    assert main(["train", "--help", flag]) == 0
    short = capsys.readouterr().out
    assert short.count("\n") <= 120 and "metalearn help train" in short and "  trainer.steps " in short
    for group, options in groups().items():
        assert f"  {group} " in short and all(re.search(rf"\b{option}\b", short) for option in [*options, "mine"])
    assert main(["help", flag, "train"]) == 0
    assert "Keys of algorithm=mine:\n  algorithm.rate=1.0" in capsys.readouterr().out
    assert main(["help", "algorithm=mine", flag]) == 0
    assert "  algorithm.rate=1.0 " in capsys.readouterr().out


@pytest.mark.parametrize("in_checkout", [True, False])
def test_what_to_type_for_an_extra(in_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "metalearn/errors.py"))
    if in_checkout:
        (tmp_path / "pyproject.toml").touch()
    place = f"-e '{tmp_path}[onnx]'" if in_checkout else "'/path/to/metalearn[onnx]'"
    assert errors.install("onnx") == f"pip install {place}"


@pytest.mark.parametrize(
    ("started", "train"),
    [
        ("/venv/bin/metalearn", "metalearn train"),
        ("/site-packages/metalearn/__main__.py", "python -m metalearn train"),
        ("/checkout/train.py", "python train.py"),
    ],
)
def test_messages_name_the_program_that_was_started(
    started: str, train: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    program = script(ROOT / "train.py") if started.endswith("train.py") else installed()
    words = ["workers=3", "experiment=maml_sinusoid"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments, message in (
        (words, f"or, without torchrun,\n  {train} workers=3 "),
        (["--multirun", "seed=1,2"], f"\n  {train} --multirun workers=2 seed=1,2"),
        (["launch.isolate=true"], f"\n  {train} workers=2 launch.isolate=true …"),
        (["hydra.nope=1"], f"; {train} --cfg hydra lists"),
    ):
        assert train_main(arguments, program) == 2 and message in capsys.readouterr().err
    other = as_typed("-m metalearn COMMAND")
    assert main(["help"]) == 0 and capsys.readouterr().out.startswith(f"usage: {other} …")
