"""The programs in examples/ run from any folder, and do what they say."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, Program, slow

pytestmark = pytest.mark.thorough


def said(name: str, argument: str, folder: Path, *, ranks: int = 0) -> list[float]:
    """Runs an example; the numbers in its output."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *start, str(ROOT / "examples" / name), argument]
    outcome = Program(command, folder, {"PYTHONPATH": str(ROOT)}).wait()
    assert outcome.code == 0, outcome.text
    return [float(number) for number in re.findall(r"-?\d+\.\d+", outcome.text)]


def test_sine_waves_adapts_to_a_wave(tmp_path: Path) -> None:
    before, after, *wave = said("sine_waves.py", "20", tmp_path)
    assert before > 0 and after > 0 and wave[::2] == [1.514, -1.683, 1.819]
    assert max(abs(value) for value in wave[1::2]) < 2  # not wild


def test_learned_weights_bear_wrong_labels(tmp_path: Path) -> None:
    plain, learned = said("reweight_labels.py", "150", tmp_path)
    assert learned > plain


def test_learned_decays_find_the_useful_inputs(tmp_path: Path) -> None:
    one, learned, of_useful, of_others = said("learned_decay.py", "60", tmp_path)
    assert 1 < learned < one and of_useful < of_others


@slow
def test_descent_on_a_learned_loss_is_faster(tmp_path: Path) -> None:
    _, _, _, on_itself, _, learned, *_ = said("learned_loss.py", "300", tmp_path)
    assert learned < 0.9 * on_itself


def test_a_new_shop_is_learned_from_five_days(tmp_path: Path) -> None:
    before, after = said("own_table.py", "200", tmp_path)
    assert after < 0.7 * before


@slow
def test_files_are_told_apart_by_their_words(tmp_path: Path) -> None:
    after, before = said("own_texts.py", "100", tmp_path)
    assert after > 58 > 54 > before


@pytest.mark.parametrize("name", [pytest.param("own_network.py", marks=slow), "own_algorithm.py"])
def test_own_parts_learn_characters(name: str, tmp_path: Path) -> None:
    accuracy, half, chance = said(name, "15", tmp_path)
    assert accuracy - half > chance == 20.0


@slow
def test_map_reduce_computes_pi_on_two_workers(tmp_path: Path) -> None:
    (pi,) = said("map_reduce.py", "10", tmp_path, ranks=2)
    assert abs(pi - 3.1416) < 0.01  # six standard deviations


@slow
def test_the_notebook_and_own_images_learn_signs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/first_steps.ipynb").read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "STEPS": "5"}
    notebook = Program([sys.executable, "-c", code], tmp_path, environment).wait()
    assert notebook.code == 0, notebook.text
    right = re.search(r"(\d+) of 18 right", notebook.text)
    assert right is not None and int(right.group(1)) > 9, notebook.text  # by chance 6
    run = tmp_path / "outputs/protonet-glyphs/first_steps"
    arguments = [str(ROOT / "examples/own_images.py"), str(run), "my_pictures", "other_pictures"]
    program = Program([sys.executable, *arguments], tmp_path, {"PYTHONPATH": str(ROOT)}).wait()
    assert program.code == 0, program.text
    named = re.findall(r"other_pictures/(\w+)/\d\.png: (\w+) \((\d\.\d\d)\)", program.text)
    assert len(named) == 18 and sum(sign == label for sign, label, _ in named) == int(right.group(1))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_lightning_module_has_the_bits_of_a_plain_run(devices: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the package lightning is not installed; type pip install lightning")
    length = ("trainer.steps=5", "trainer.val_every=5", "trainer.val_tasks=4", "trainer.test_tasks=8")
    overrides = ("experiment=maml_sinusoid", "run=seed0", *length, "trainer.meta_batch_size=20", "trainer.task_chunk=5")
    program = str(ROOT / "examples/lightning_module.py")
    for command in ([program, str(devices), *overrides], [str(ROOT / "train.py"), *overrides]):
        outcome = Program([sys.executable, *command], tmp_path, {"PYTHONPATH": str(ROOT)}).wait()
        assert outcome.code == 0, outcome.text
    plain = tmp_path / "outputs/maml_sinusoid/seed0/checkpoints/last/params.safetensors"
    assert (tmp_path / "params.safetensors").read_bytes() == plain.read_bytes()
