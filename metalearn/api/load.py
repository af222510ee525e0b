"""From a folder to a learner. Nothing that the folder holds is imported or run."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from metalearn.algorithms.common.fixed import with_fixed
from metalearn.algorithms.common.losses import measured_by
from metalearn.algorithms.common.metrics import reporting
from metalearn.api import hub
from metalearn.api.learner import Learner, Taught, learner_of
from metalearn.api.own import Network, TasksElsewhere, algorithm_from, given_again, inputs_in, model_from
from metalearn.api.pictures import form_of, read_form
from metalearn.app.parts import chosen_loss
from metalearn.checks import one_of, true_or_false
from metalearn.config.build import build, import_plugins
from metalearn.config.check import PRECISIONS
from metalearn.config.saved import DESCRIPTION, MANIFEST, NETWORK, OWN, changed_config, check_saved
from metalearn.config.values import quoted
from metalearn.errors import ConfigError, NotAdmittedError
from metalearn.nn.inputs import shape_of
from metalearn.nn.precision import type_of
from metalearn.nn.surroundings import with_gradients
from metalearn.runs.checkpoint import Snapshot, fitted
from metalearn.runs.published import PARAMETERS, WEIGHTS, is_published, named, option_of
from metalearn.runs.seen import from_meta
from metalearn.storage.files import is_folder
from metalearn.types import Algorithm, Loss, Model, Params

CLASSIFIER = "classifier.json"
"""The file of what `metalearn fit` makes, which is no run."""


def load(
    path: str | os.PathLike[str],
    *,
    network: Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
    plugins: Sequence[str] = (),
    transductive: bool | None = None,
    device: str = "cpu",
) -> Learner:
    """The learner that a run has trained, or that `Learner.save` has saved.

    Args:
        path: a run folder, whose best checkpoint is taken; the folder of a checkpoint; the folder of a model that
            metalearn export has published; or that of a saved learner.
        network: the class of the network, as package.module.Name, if it is not one of this program's. It runs here, so
            only you can name it. If `metalearn.train` got an object, give the same again: its weights are replaced.
        algorithm, loss: if `metalearn.train` got a function or an object of your own, the same again.
        plugins: packages of your own that the run was trained with. Their code runs here, so only you can admit them.
        transductive: if false, each query is normalised by the support pictures alone, so its prediction does not
            depend on other queries. If true, all queries of a call are normalised together, as a run with
            model.transductive=true does in its test. None: as the saved learner did; of a run, false. Runs of
            algorithm=tim and algorithm=laplacian_shot predict all queries of a call together in any case.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: there is nothing to load, it is damaged or refused, or it learns no tasks. The message names the
            folder and what to type.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path={path!r}: must be the path of a folder, such as outputs/maml_glyphs/seed0")
    return load_as(
        "path", Path(path), network=network, algorithm=algorithm, loss=loss, plugins=plugins,
        transductive=transductive, device=device,
    )  # fmt: skip


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    timeout: float = hub.SECONDS,
    plugins: Sequence[str] = (),
    **options: Any,
) -> Learner:
    """A learner in a folder, or in a repository of Hugging Face's hub, of any origin: only the files that `export`
    writes are fetched, within bounds, and checked as `load` does; no code of it runs. They stay in the hub's cache.

    Args:
        name_or_folder: a folder that is there, or else a repository, such as `you/protonet`.
        revision: a branch, tag or commit of the repository.
        timeout: seconds for all of it.
        plugins, options: as for `load`.

    Raises:
        ValueError: it cannot be fetched in time, is too large, or is refused.
    """
    key, links = "name_or_folder", revision is not None or not os.path.isdir(name_or_folder)  # noqa: PTH112 (or no path)
    folder = Path(name_or_folder)
    if links:
        files = (PARAMETERS, DESCRIPTION), (WEIGHTS,)
        folder = hub.fetch(os.fspath(name_or_folder), *files, revision=revision, timeout=timeout)
    return load_as(key, folder, plugins=plugins, links=links, **options)


@with_gradients()
def load_as(
    key: str,
    path: Path,
    *,
    network: Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
    plugins: Sequence[str] = (),
    transductive: bool | None = None,
    device: str = "cpu",
    links: bool = False,
) -> Learner:
    """As `load`; messages name the folder by `key`. Files of a published model may be `links`."""
    if transductive is not None:
        true_or_false("transductive", transductive)
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here; give device='cpu'")
    folder = found(key, path)
    saved = named(key, folder, links=links)
    try:
        together = saved.meta.get("queries_together") is True if transductive is None else transductive
        config = _configured(saved, network, _listed(plugins), together)
        import_plugins(config.plugins)
        return _learner(config, saved, network, algorithm, loss, partial(fitted, key, folder), torch.device(device))
    except NotAdmittedError as error:
        raise ConfigError(
            f"{key}={folder}: {error.reason}. Code of {error.package} would run here; if you trust it, give "
            f"plugins=[{error.package!r}] (scripts: --plugins {error.package})"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error) if str(error).startswith(f"{key}=") else f"{key}={folder}: {error}") from error


def found(key: str, path: Path) -> Path:
    """The folder that holds the parameters.

    Raises:
        ConfigError: `path` is no folder, or holds nothing to load.
    """
    if not is_folder(path):
        raise ConfigError(
            f"{key}={path}: there is no such folder; type the folder of a run, such as outputs/maml_glyphs/seed0"
        )
    if is_published(path) or (path / MANIFEST).exists():
        return path
    if is_folder(path / "checkpoints/best"):
        return path / "checkpoints/best"
    if is_folder(path / "checkpoints/last"):
        raise ConfigError(
            f"{key}={path}: this run has not been validated yet, so it has no best checkpoint; type "
            f"{path}/checkpoints/last"
        )
    if (path / CLASSIFIER).exists():
        raise ConfigError(
            f"{key}={path}: is a classifier that metalearn fit has made; type metalearn predict {path} PICTURES, or in "
            "Python metalearn.PictureClassifier.load"
        )
    raise ConfigError(
        f"{key}={path}: holds no run, no checkpoint and no published model; type the folder of a run (it holds "
        "checkpoints), of a checkpoint (…/checkpoints/best), or of a model that metalearn export has written"
    )


def _listed(plugins: object) -> list[str]:
    """The names of packages.

    Raises:
        ConfigError: something else.
    """
    if isinstance(plugins, str) or not isinstance(plugins, Iterable):
        raise ConfigError(f"plugins={plugins!r}: must be a list of packages; give plugins=['my_package']")
    return list(map(str, plugins))


def _configured(saved: Snapshot, network: Network | None, plugins: Sequence[str], transductive: bool) -> DictConfig:
    """The config of what was saved, with the caller's choices.

    Raises:
        ConfigError: it is refused, or names a network that the caller does not name.
    """
    plain = check_saved(saved.meta["config"])
    model = plain.get("model")
    model = model if isinstance(model, Mapping) else {}
    overrides = [f"model.transductive={transductive}".lower()] if "transductive" in model else []
    named_network = model.get("network")
    target = named_network.get("_target_") if isinstance(named_network, Mapping) else None
    if target is not None and network is None:
        raise ConfigError(
            f"it names the network {target}, whose code would run here; if you trust it, give "
            f"network={str(target)!r} (scripts: --network {target})"
        )
    # Only what is published was checked for such notes, and no run writes them.
    own = (
        [group for group in ("algorithm", "model", "dataset", "loss") if OWN in plain.get(group, {})]
        if _is_checked(saved)
        else []
    )
    if network is not None and target is None and "model" not in own:
        raise ConfigError(f"network={network!r}: its network is one of this program's; leave network out")
    if target is not None and not isinstance(network, str):
        raise ConfigError(
            f"network={network!r}: it was trained with a network by its name; give network={str(target)!r}"
        )
    if target is not None:
        overrides.append(f"{NETWORK}._target_={quoted(network)}")
    overrides.append(f"plugins=[{','.join(map(quoted, plugins))}]")
    return changed_config(plain, overrides, {}, own)


def _is_checked(saved: Snapshot) -> bool:
    """Whether it is a published model."""
    return "preprocessing" in saved.meta


def _learner(
    config: DictConfig,
    saved: Snapshot,
    network: Network | None,
    own_algorithm: Any,
    own_loss: Any,
    fit: Callable[[Params, Params], Params],
    device: torch.device,
) -> Learner:
    one_of("precision", config.precision, PRECISIONS)
    source = TasksElsewhere(config.dataset) if OWN in config.dataset else build(config, "dataset")
    if OWN in config.model:
        model = model_from(given_again("model", config.model, network, "network"), config.model)
    else:
        model = build(config, "model")
    own = OWN in config.loss
    loss = given_again("loss", config.loss, own_loss, "loss") if own else build(config, "loss")
    model = measured_by(model, reporting(chosen_loss(loss, source), build(config, "metric"), source))
    name, algorithm = _algorithm(config, model, own_algorithm)
    if algorithm.evaluated_on != "tasks":
        raise ConfigError(
            f"algorithm={name} classifies what it was trained on, and learns no tasks; load a run of "
            "algorithm=protonet, for example"
        )
    shapes = _start(algorithm, model, type_of(config.precision))
    params = {name: value.to(device) for name, value in fit(saved.params, shapes).items()}
    for parameter, value in params.items():
        if not value.isfinite().all():
            raise ConfigError(f"the parameter {parameter} is not finite; take another checkpoint")
    form = read_form(saved.meta["preprocessing"]) if _is_checked(saved) else form_of(source, config.dataset)
    pictures = "image_size" in config.dataset and OWN not in config.dataset
    if (form is not None and source.classes("test") is None) or (form is None and pictures):
        raise ConfigError(
            f"its preprocessing does not fit the dataset {config.dataset._target_}; a dataset of "
            "pictures has the keys image_size and channels, and one of real numbers has not"
        )
    taught = Taught(config, source, model, algorithm, from_meta(saved.meta))
    shape: tuple[int, ...] | None = None if form is None else (form.channels, form.size, form.size)
    if OWN in config.dataset:
        shape = shape_of(inputs_in(config.dataset))
    figures = saved.meta.get("validation")
    validation = dict(figures) if isinstance(figures, Mapping) else {}
    learner = learner_of(name, params, taught, form=form, shape=shape, validation=validation)
    if OWN in config.model:
        _check_outputs(learner, saved.meta.get("probe"))
    return learner


def _algorithm(config: DictConfig, model: Model, own: Any) -> tuple[str, Algorithm]:
    """The algorithm, and its name."""
    if OWN in config.algorithm:
        given = given_again("algorithm", config.algorithm, own, "algorithm")
        return str(config.algorithm[OWN]), with_fixed(algorithm_from(given, model), model)
    if own is not None:
        raise ConfigError(f"algorithm={own!r}: its algorithm is known by its name; leave algorithm out")
    target = str(config.algorithm._target_)
    name = option_of("algorithm", target) or target.rpartition(".")[2]
    return name, with_fixed(build(config, "algorithm", model=model, inner=build(config, "inner")), model)


def _check_outputs(learner: Learner, saved: object) -> None:
    """Raises ConfigError for a network that gives other outputs than the one that was trained."""
    if not isinstance(saved, list) or not all(isinstance(value, float) for value in saved):
        raise ConfigError("probe: must be a list of real numbers; save the learner anew")
    found = learner.probe()
    # Rounding differs from machine to machine.
    if len(found) != len(saved) or not np.allclose(found, saved, rtol=1e-2, atol=1e-3):
        raise ConfigError(
            "network: with these parameters it gives other outputs than the network that was trained; give the same "
            "network, with the same buffers"
        )


def _start(algorithm: Algorithm, model: Model, dtype: torch.dtype) -> Params:
    """The shapes of the parameters. A network of our own is not made for them, whatever size the config asks for.

    Raises:
        ConfigError: they are too large for any machine.
    """
    try:
        with torch.device("meta") if model.stages else contextlib.nullcontext():
            drawn = algorithm.init(torch.Generator("cpu").manual_seed(0))
    except RuntimeError as error:
        raise ConfigError(f"the network cannot be made ({str(error).splitlines()[0]})") from error
    return {name: drawn[name].to(dtype) for name in sorted(drawn)}
