"""What is exported of a run, of a learner and of an adapted task."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metalearn.api.learner import checked_folder, load
from metalearn.api.objects import carried_weights, without_file
from metalearn.config.build import option_of
from metalearn.config.saved import run_folder_of
from metalearn.errors import ConfigError
from metalearn.reporting.provenance import made_with, own_version
from metalearn.runs.checkpoint import LEARNER, fill_learner, read_learner, read_named
from metalearn.runs.metrics import KEY, METRIC_NAMES
from metalearn.saved import exporter, hub
from metalearn.saved.exporter import FOLDER, Card, described, use
from metalearn.saved.form import kind_of
from metalearn.storage.files import StrPath, read_json
from metalearn.tasks.texts import BYTES

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


def export(
    run: StrPath, out: StrPath, *, licence: str | None = None, network: str | None = None,
    plugins: Sequence[str] = (), without: Sequence[str] = (), keys: tuple[str, str] = ("path", "out"),
) -> dict[str, Any]:  # fmt: skip
    """Publishes a run's best checkpoint, or a checkpoint, in the folder `out`; returns the facts in its meta.json.
    Raises ConfigError if there is nothing that can be loaded, or `out` is not empty or cannot be written.

    Args:
        licence: the licence of the data, if this program does not know it.
        network, plugins: as for `metalearn.load`, which needs them again to load what is published.
        without: keys of the config whose paths stay here: the network is made with None there, and tried.
        keys: what messages call `run` and `out`.
    """
    run_key, out_key = keys
    folder = checked_folder(run_key, Path(run))
    if kind_of(folder) == LEARNER.name:
        raise ConfigError(f"{run_key}={folder}: is published already; copy the folder")
    learner = load(folder, network=network, plugins=plugins, key=run_key)
    meta = read_named(run_key, folder).meta
    taught, step = learner.taught, meta["step"]
    dataset = option_of("dataset", meta["config"]["dataset"]["_target_"]) or ""
    config = without_file(meta["config"], taught.source, taught.algorithm.computes)
    facts = {
        "preprocessing": described(learner.form) if learner.form else None,
        "any_ways": learner.form is not None and learner.ways is None, "step": step, "seed": config.get("seed"),
        "test": _test_of(folder, step),
        "licence": licence or LICENCES.get(dataset),
        "versions": ({"metalearn": version} if (version := own_version()) else {}) | meta.get("versions", {}),
    }  # fmt: skip
    if KEY in meta:
        facts[KEY] = meta[KEY]
    write = partial(
        fill_learner, params=learner.params, config=config, facts=facts, weights=carried_weights(config),
        without=without,
    )  # fmt: skip
    if without:
        with tempfile.TemporaryDirectory() as tried:
            write(Path(tried))
            other, key = load(tried, network=network, plugins=plugins, key=run_key), f"without={','.join(without)}"
        if learner.form is None:
            raise ConfigError(f"{key}: can be tried with learners of pictures alone; leave it out")
        shape = (learner.form.channels, learner.form.size, learner.form.size)
        if not np.allclose(learner.probe(shape), other.probe(shape), rtol=1e-2, atol=1e-3):
            raise ConfigError(
                f"{key}: without it the network gives other outputs, since the file has more than its parameters, such "
                "as buffers; make them parameters, or let your class find the file by itself"
            )
    test, reached, figure = facts["test"], None, "not known"
    reads = taught.algorithm.stream is not None
    if test:
        metric = next(metric for metric in METRIC_NAMES if metric in test)
        reached = (metric, test[metric], f"test tasks of {dataset or 'own'}")
        ways = "" if reads or learner.trained_ways is None else f", {learner.trained_ways}-way"
        figure = f"{metric} {test[metric]:.4g} ± {test['ci95']:.2g} over {test['tasks']} tasks{ways}"
    pictures, origin = learner.form is not None and learner.trained_ways is not None, made_with()
    task = "text-generation" if reads else f"tabular-{'classification' if learner.trained_ways else 'regression'}"
    lines = {
        "Test": figure, "Algorithm": f"{learner.name}, {step} steps", "Data": dataset or "own",
        "Licence of the data": facts["licence"] or "not known",
        "Trained with": ", ".join(f"{library} {version}" for library, version in facts["versions"].items()),
        **{f"Published: {item}": origin[item] for item in ("date", "versions", "hardware")},
    }  # fmt: skip
    name = Path(out).name
    options = [f"network={network!r}"] * bool(network) + [f"plugins={[*plugins]!r}"] * bool(plugins)
    read = '"Once upon a time"' if learner.trained_ways == BYTES else "[0, 1, 0]"
    kind = "texts" if reads else "pictures" if pictures else "numbers"
    uses = use(f"learner_of_{kind}", LOAD=", ".join([f'"{name}"', *options]), READ=read)
    card = Card(
        name, "image-classification" if pictures else task, ["few-shot", "meta-learning", learner.name], None, lines,
        {FOLDER: uses}, reached,
    )  # fmt: skip
    exporter.export(out_key, Path(out), FOLDER, fill=write, program=None, about=None, card=card)
    return facts


def push_to_hub(folder: StrPath, repo_id: str, *, private: bool = False, timeout: float = hub.SECONDS) -> str:
    """Uploads a folder that `metalearn export` or `Learner.save` has written to a repository of Hugging Face's hub,
    which is made if it is not there; returns its address. Your token is that of `hf auth login`, or `HF_TOKEN`. Raises
    ValueError if the folder holds no published model that can be used, or the hub refuses it or does not answer.

    Args:
        repo_id: such as `you/protonet`.
        private: of a new repository: only you see it.
        timeout: seconds for all of it.
    """
    try:
        read_learner(Path(folder))
    except ValueError as error:
        raise ConfigError(f"folder={error}; type one that metalearn export has written") from error
    return hub.push(Path(folder), repo_id, private=private, timeout=timeout)


def _test_of(folder: Path, step: int) -> dict[str, Any] | None:
    """The result of the run's test, if `folder` is the checkpoint that was tested: the best one of a completed run."""
    # If the run has gone on since, its best checkpoint may be of a later step; so the step is compared too.
    run = run_folder_of(folder)
    best, result = run / "checkpoints/best", read_json(run / "result.json")
    if result.get("status") != "completed" or not best.exists() or not best.samefile(folder):
        return None
    if (result.get("val") or {}).get("step") != step or not result.get("test"):
        return None
    names = (*METRIC_NAMES, "ci95", "tasks", "transductive", KEY)
    return {name: result["test"][name] for name in names if name in result["test"]}
