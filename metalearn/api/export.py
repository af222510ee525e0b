"""From a run to its published form."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from metalearn.api import hub, program
from metalearn.api.card import CARD, Reached, card
from metalearn.api.learner import Classification, Learner
from metalearn.api.load import found, load_as
from metalearn.api.own import carried_weights
from metalearn.api.pictures import described
from metalearn.checks import one_of
from metalearn.config.saved import FORMERLY, check_groups, check_saved, run_folder_of
from metalearn.errors import ConfigError
from metalearn.reporting.provenance import made_with, own_version
from metalearn.runs.metrics import METRIC_NAMES
from metalearn.runs.published import FILES, GROUPS, is_published, named, option_of, read, write
from metalearn.runs.seen import KEY, is_count
from metalearn.storage.files import read_json, refuse_nameless, refuse_used, whole_folder

LICENCES = {
    "omniglot": "MIT (Lake, Salakhutdinov and Tenenbaum 2015)",
    "glyphs": "Apache-2.0 (drawn by this program)",
    "sinusoid": "Apache-2.0 (made by this program)",
    "mini_imagenet": "ImageNet's terms of access: research and education, not commercial",
    "cifar_fs": "none published (CIFAR-100, Krizhevsky 2009)",
    "fc100": "none published (CIFAR-100, Krizhevsky 2009)",
    "tiered_imagenet": "ImageNet's terms of access: research and education, not commercial",
    "cub": "research and education, not commercial (Wah et al. 2011)",
    "emoji": "Apache-2.0, MIT, CC-BY-4.0 and CC-BY-SA-4.0, by design (its ATTRIBUTION.txt)",
    "kanji": "free licences of fonts, by design (its ATTRIBUTION.txt)",
    "scripts": "free licences of fonts, by design (its ATTRIBUTION.txt)",
}
"""Licences of the data behind the datasets of `conf/`."""

SAME_DATA = {"omniglot_pretraining": "omniglot", "omniglot_drawers": "omniglot", "glyph_pretraining": "glyphs"}

_FIGURES = (*METRIC_NAMES, "ci95", "tasks", "transductive")
_VERSIONS = ("torch", "numpy", "python")
_LONGEST_VERSION = 40


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    licence: str | None = None,
    network: str | None = None,
    plugins: Sequence[str] = (),
    without: Sequence[str] = (),
    keys: tuple[str, str] = ("path", "out"),
) -> dict[str, Any]:
    """Publishes a run's best checkpoint, or a checkpoint, in the folder `out`; returns the facts in its model.json.

    Args:
        licence: the licence of the data, if this program does not know it.
        network, plugins: as for `metalearn.load`, which needs them again to load what is published.
        without: keys of model.json whose paths stay here: the network is made with None there, and tried.
        keys: what messages call `run` and `out`.

    Raises:
        ConfigError: nothing that can be loaded, or `out` is not empty or cannot be written.
    """
    run_key, out_key = keys
    folder = found(run_key, Path(run))
    refuse_nameless(out_key, Path(out))
    refuse_used(out_key, Path(out))
    if is_published(folder):
        raise ConfigError(f"{run_key}={folder}: is published already; copy the folder")
    learner = load_as(run_key, folder, network=network, plugins=plugins)
    saved = named(run_key, folder)
    config = check_saved(saved.meta["config"])
    check_groups(FORMERLY | config, tuple(GROUPS))
    dataset = option_of("dataset", config["dataset"]["_target_"]) or ""
    facts = {
        "preprocessing": described(learner.form),
        "any_ways": learner.form is not None and learner.ways is None,
        "test": _test_of(folder, saved.meta["step"]),
        "licence": licence or LICENCES.get(SAME_DATA.get(dataset, dataset)),
        "versions": _versions(saved.meta.get("versions")),
    }
    weights = carried_weights(config)
    if without:
        with tempfile.TemporaryDirectory() as parent:
            tried = Path(parent) / "model"
            write(out_key, tried, saved, facts, weights=weights, without=without)
            _check_same(learner, load_as(run_key, tried, network=network, plugins=plugins), without)
    text = _card_of(Path(out).name, learner, facts, saved.meta["step"], dataset, network, plugins)
    write(out_key, Path(out), saved, facts, weights=weights, card=text, without=without)
    return facts


def push_to_hub(
    folder: str | os.PathLike[str], repo_id: str, *, private: bool = False, timeout: float = hub.SECONDS
) -> str:
    """Uploads a folder that `metalearn export` or `Learner.save` has written to a repository of Hugging Face's hub,
    which is made if it is not there; returns its address. Your token is that of `hf auth login`, or `HF_TOKEN`.

    Args:
        repo_id: such as `you/protonet`.
        private: of a new repository: only you see it.
        timeout: seconds for all of it.

    Raises:
        ValueError: the folder holds no published model that can be used; or the hub refuses it, or does not answer.
    """
    read("folder", Path(folder))
    return hub.push(Path(folder), repo_id, files=FILES, private=private, timeout=timeout)


def _check_same(learner: Learner, other: Learner, without: Sequence[str]) -> None:
    """Raises ConfigError if a learner without these paths gives other outputs for pictures."""
    key = f"without={','.join(without)}"
    if learner.form is None:
        raise ConfigError(f"{key}: can be tried with learners of pictures alone; leave it out")
    shape = (learner.form.channels, learner.form.size, learner.form.size)
    if not np.allclose(learner.probe(shape), other.probe(shape), rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"{key}: without it the network gives other outputs, since the file has more than its parameters, such as "
            "buffers; make them parameters, or let your class find the file by itself"
        )


def _card_of(
    name: str,
    learner: Learner,
    facts: Mapping[str, Any],
    step: int,
    dataset: str,
    network: str | None,
    plugins: Sequence[str],
) -> str:
    """The model card."""
    test, origin = facts.get("test"), made_with()
    metric = next((metric for metric in METRIC_NAMES if metric in test), None) if test else None
    reached, figure = None, "not known"
    if test and metric:
        reached = Reached(metric, test[metric], f"test tasks of {dataset or 'own data'}")
        ways = "" if learner.trained_ways is None else f", {learner.trained_ways}-way"
        figure = (
            f"{metric} {test[metric]:.4g} ± {test.get('ci95', float('nan')):.2g} over {test.get('tasks')} tasks{ways}"
        )
    options = [f"network={network!r}"] * bool(network) + [f"plugins={[*plugins]!r}"] * bool(plugins)
    pictures = learner.form is not None and learner.trained_ways is not None
    task = "image-classification" if pictures else "tabular-classification" if learner.trained_ways else (
        "tabular-regression"
    )  # fmt: skip
    return card(
        name, task=task, tags=["few-shot", "meta-learning", learner.name], licence=None, reached=reached,
        facts={
            "Test": figure, "Algorithm": f"{learner.name}, {step} steps", "Data": dataset or "own",
            "Licence of the data": facts.get("licence") or "not known",
            "Trained with": ", ".join(f"{name} {value}" for name, value in (facts.get("versions") or {}).items()),
            **{f"Published: {name}": origin[name] for name in ("date", "versions", "hardware")},
        },
        use=(_USE_PICTURES if pictures else _USE_NUMBERS).replace("LOAD", ", ".join([f'"{name}"', *options])),
    )  # fmt: skip


def export_task(
    task: Classification, out: Path, *, file_format: str, licence: str | None, key: str = "path"
) -> list[str]:
    """As `Classification.export`; messages call `out` by `key`."""
    one_of("format", file_format, program.PROGRAMS)
    program.check_packages(file_format)
    learner, labels = task._learner, [str(label) for label in task.labels]
    if learner.form is None:
        raise ConfigError(f"format={file_format}: only learners of pictures become programs, and this one takes arrays")
    if learner.device.type != "cpu":
        raise ConfigError(f"format={file_format}: programs are made on the CPU; load the learner with device='cpu'")
    if learner.taught.algorithm.transductive:
        raise ConfigError(
            f"algorithm={learner.name}: learns from the pictures that are asked, so there is no program that only "
            "answers; take a learner of another algorithm, such as protonet"
        )
    x = learner.shown([Image.fromarray(picture) for picture in program.noise(learner.form)])[0].float()
    network = _AdaptedNetwork(task)
    ours = torch.cat([network(part)[0] for part in program.in_batches(x)])
    facts = {
        "Classes": program.first_few_of(labels), "Algorithm": learner.name,
        "Queries": "all pictures of a call are normalised together" if learner.transductive else "",
        "Licence": licence or "not known", **made_with(),
    }  # fmt: skip
    use, tags = program.USES[file_format].replace("OUTPUTS", "probabilities"), ["few-shot", learner.name, file_format]
    with whole_folder(key, out) as folder:
        program.write_preprocessing(folder, learner.form, labels, output="probabilities [n, classes]")
        difference = program.write_program(
            network, x, [ours], folder / program.FILES[file_format], file_format,
            name=f"algorithm={learner.name}", outputs=["probabilities"], folded=True,
        )  # fmt: skip
        text = card(
            out.name, task="image-classification", tags=tags, licence=licence, reached=None, facts=facts, use=use
        )
        (folder / CARD).write_text(text, encoding="utf-8")
    return [f"largest difference from this program: {difference:.1e}"]


class _AdaptedNetwork(nn.Module):
    """From pictures [n, channels, size, size] to the probabilities [n, classes]; both float32."""

    def __init__(self, task: Classification) -> None:
        super().__init__()
        self._task = task

    def forward(self, pictures: Tensor) -> tuple[Tensor]:
        return (self._task._probabilities(self._task._learner.on_device(pictures[None])).float(),)


_USE_PICTURES = """With `pip install metalearn-train`, beside this folder, or by the name of its repository on the hub:

```python
import metalearn

task = metalearn.from_pretrained(LOAD).adapt(["cat_1.jpg", "dog_1.jpg"], ["cat", "dog"])
print(task.predict(["what_is_this.jpg"]))
```"""

_USE_NUMBERS = """With `pip install metalearn-train`, beside this folder, or by the name of its repository on the hub;
x and y are arrays, as in the training:

```python
import metalearn

print(metalearn.from_pretrained(LOAD).adapt(x, y).predict(new_x))
```"""


def _test_of(folder: Path, step: int) -> dict[str, Any] | None:
    """The result of the run's test, if `folder` is the checkpoint that was tested: the best one of a completed run."""
    # If the run has gone on since, its best checkpoint may be of a later step; so the step is compared too.
    run = run_folder_of(folder)
    best, result = run / "checkpoints/best", read_json(run / "result.json")
    if result.get("status") != "completed" or not best.exists() or not best.samefile(folder):
        return None
    test, validated = result.get("test"), result.get("val")
    if not isinstance(test, dict) or not isinstance(validated, dict) or validated.get("step") != step:
        return None
    figures = {name: test[name] for name in _FIGURES if name in test}
    known = all(isinstance(value, int | float) and math.isfinite(value) for value in figures.values())
    if KEY in test:
        figures[KEY] = test[KEY]
        known = known and is_count(test[KEY])
    return figures if known else None  # the file may be of any origin


def _versions(saved: object) -> dict[str, str]:
    """The versions of the run's libraries, and the version of this program."""
    known = saved if isinstance(saved, dict) else {}
    ours = own_version()
    libraries = {name: str(known[name])[:_LONGEST_VERSION] for name in _VERSIONS if name in known}
    return libraries if ours is None else {"metalearn": ours} | libraries
