"""Wrong settings of every data set: each is named by its key before anything is read."""

from typing import Any

import pytest

from metalearn.config.build import build
from metalearn.config.options import named, plain_config
from metalearn.errors import ConfigError

FEW_SHOT: dict[str, list[Any]] = {"ways": [1, 5.5], "queries": [0], "shots": [0, [3, 1], "many"], "rotations": [1]}
CHARACTERS: dict[str, list[Any]] = {
    "ways": [1, 1101], "train_drawings": [0, 19], "val_drawings": [0, 6], "channels": [3], "image_size": [4],
    "known": [0, 100_000, True], "seed": [-1], "eval_seed": [-1],
}  # fmt: skip
PHOTOGRAPHS: dict[str, list[Any]] = {
    "ways": [5], "image_size": [20], "channels": [2], "val_samples": [0, 60_000], "known": [55_001], "download": ["no"],
    "seed": [-1],
}  # fmt: skip
FILE = {"file": "nowhere.csv", "task": "who", "target": "effect"}

WRONG: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = [
    ("glyphs", {}, FEW_SHOT | {"channels": [3], "augment": ["blur", ["shift", "blur"], ["shift", "shift"]],
                               "labels": ["none", "some"]}),
    ("image_folder", {"root": "nowhere"}, FEW_SHOT | {
        "split": [[0.5, 0.5], [0.6, 0.3, 0.3], [1.2, -0.1, -0.1], "", 3], "image_size": [4], "channels": [2, True],
        "seed": [-1]}),
    ("image_folder", {"root": "nowhere", "table": "a.csv"}, {"split": ["folders"]}),
    ("glyph_characters", {}, CHARACTERS),
    ("omniglot_characters", {}, CHARACTERS | {"split": ["papers"]}),
    ("mnist", {}, PHOTOGRAPHS),
    ("fashion_mnist", {}, PHOTOGRAPHS),
    ("cifar10", {}, PHOTOGRAPHS),
    ("cifar_fs", {}, FEW_SHOT | {"ways": [17], "queries": [600], "image_size": [28], "channels": [1]}),
    ("fc100", {}, {"ways": [21], "train_ways": [61], "download": ["no"], "rotations": [1]}),
    ("mini_imagenet", {}, {"ways": [17], "train_ways": [65], "image_size": [7], "channels": [2]}),
    ("tiered_imagenet", {}, {"ways": [98], "rotations": [1]}),
    ("emoji", {"root": "nowhere"}, {
        "test": ["held", "seen"], "held_drawers": ["ann", ["ann", "ann"]], "channels": [2], "image_size": [85]}),
    ("table", FILE, {
        "split": [[0.5, 0.5], [0.5, 0.2, 0.2]], "targets": ["class"], "missing": ["zero"], "queries": [0],
        "features": ["age"], "file": ["t.xlsx"]}),
    ("gp_prior", {}, {
        "kernel": ["linear", []], "length": [0, [1, 0.1]], "noise": [1e-9, [0.1, 0.2, 0.3]], "rows": [1],
        "known": [[1, 60]], "features": [1.5], "group": [0], "scale": [0], "period": [[2, 1]], "uniform": ["yes"],
        "inputs": [[1, 0], [0, 1, 2]], "asked": [0, 1.5]}),
    ("noisy_digits", {}, {
        "examples": [0, 1796], "clean": [0, 797], "queries": [0, 697], "wrong": [1, -0.1, "half"], "noise": ["gauss"],
        "seed": [-1], "eval_seed": [-1]}),
    ("sine_prior", {}, {"amplitude": [0], "noise": [-1], "known": [[1, 10_000]]}),
    ("table_prior", {}, {
        "functions": [{"tree": 1}], "known": [20], "missing": [0.5], "target_noise": [[2, 0.1]], "classes": [1]}),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "settings", "wrong"), WRONG)
def test_wrong_settings_are_named(dataset: str, settings: dict[str, Any], wrong: dict[str, list[Any]]) -> None:
    config = plain_config({"dataset": named(dataset, **settings)}, {})
    for key, values in wrong.items():
        usual = config.dataset[key]
        for value in values:
            config.dataset[key] = value
            with pytest.raises(ConfigError, match=rf"^dataset\.{key}=.*(type |must |see )"):
                build(config, "dataset")
        config.dataset[key] = usual
