"""From a folder to a learner. Nothing that the folder holds is imported or run."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

from metalearn.algorithms.common.losses import measured_by
from metalearn.api.learner import Learner, Taught, learner_of
from metalearn.api.pictures import form_of, read_form
from metalearn.app.parts import chosen_loss
from metalearn.checks import one_of, true_or_false
from metalearn.config.build import build, import_plugins
from metalearn.config.check import PRECISIONS
from metalearn.config.foreign import check_saved
from metalearn.config.saved import MANIFEST, NETWORK, changed_config
from metalearn.config.values import quoted
from metalearn.errors import ConfigError, NotAdmittedError
from metalearn.nn.precision import type_of
from metalearn.runs.checkpoint import Snapshot, fitted
from metalearn.runs.published import is_published, named, option_of
from metalearn.runs.seen import from_meta
from metalearn.storage.files import is_folder
from metalearn.types import Algorithm, Model, Params


def load(
    path: str | os.PathLike[str],
    *,
    network: str | None = None,
    plugins: Sequence[str] = (),
    transductive: bool = False,
    device: str = "cpu",
) -> Learner:
    """The learner that a run has trained.

    Args:
        path: a run folder, whose best checkpoint is taken; the folder of a checkpoint; or the folder of a model that
            metalearn export has published.
        network: the class of the network, as package.module.Name, if it is not one of this program's. It runs here, so
            only you can name it.
        plugins: packages of your own that the run was trained with. Their code runs here, so only you can admit them.
        transductive: if false, each query is normalised by the support pictures alone, so its prediction does not
            depend on other queries. If true, all queries of a call are normalised together, as a run with
            model.transductive=true does in its test. Runs of algorithm=tim and algorithm=laplacian_shot predict all
            queries of a call together in any case.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: there is nothing to load, it is damaged or refused, or it learns no tasks. The message names the
            folder and what to type.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path={path!r}: must be the path of a folder, such as outputs/maml_glyphs/seed0")
    return load_as("path", Path(path), network=network, plugins=plugins, transductive=transductive, device=device)


def load_as(
    key: str,
    path: Path,
    *,
    network: str | None = None,
    plugins: Sequence[str] = (),
    transductive: bool = False,
    device: str = "cpu",
) -> Learner:
    """As `load`; messages name the folder by `key`."""
    true_or_false("transductive", transductive)
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here; give device='cpu'")
    folder = found(key, path)
    saved = named(key, folder)
    try:
        config = _configured(saved, network, _listed(plugins), transductive)
        import_plugins(config.plugins)
        return _learner(config, saved, partial(fitted, key, folder), torch.device(device))
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


def _configured(saved: Snapshot, network: str | None, plugins: Sequence[str], transductive: bool) -> DictConfig:
    """The config of what was saved, with the caller's choices.

    Raises:
        ConfigError: it is refused, or names a network that the caller does not name.
    """
    plain = check_saved(saved.meta["config"])
    model = plain.get("model")
    model = model if isinstance(model, Mapping) else {}
    overrides = [f"model.transductive={transductive}".lower()] if "transductive" in model else []
    own = model.get("network")
    target = own.get("_target_") if isinstance(own, Mapping) else None
    if target is not None and network is None:
        raise ConfigError(
            f"it names the network {target}, whose code would run here; if you trust it, give "
            f"network={str(target)!r} (scripts: --network {target})"
        )
    if network is not None and target is None:
        raise ConfigError(f"network={network!r}: its network is one of this program's; leave network out")
    if network is not None:
        overrides.append(f"{NETWORK}._target_={quoted(network)}")
    overrides.append(f"plugins=[{','.join(map(quoted, plugins))}]")
    return changed_config(plain, overrides, {})


def _learner(
    config: DictConfig, saved: Snapshot, fit: Callable[[Params, Params], Params], device: torch.device
) -> Learner:
    one_of("precision", config.precision, PRECISIONS)
    source = build(config, "dataset")
    model = measured_by(build(config, "model"), chosen_loss(build(config, "loss"), source))
    algorithm = build(config, "algorithm", model=model, inner=build(config, "inner"))
    target = str(config.algorithm._target_)
    name = option_of("algorithm", target) or target.rpartition(".")[2]
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
    form = read_form(saved.meta["preprocessing"]) if "preprocessing" in saved.meta else form_of(source, config.dataset)
    pictures = "image_size" in config.dataset
    if (form is not None and source.classes("test") is None) or (form is None and pictures):
        raise ConfigError(
            f"its preprocessing does not fit the dataset {config.dataset._target_}; a dataset of "
            "pictures has the keys image_size and channels, and one of real numbers has not"
        )
    taught = Taught(config, source, model, algorithm, from_meta(saved.meta))
    shape = None if form is None else (form.channels, form.size, form.size)
    figures = saved.meta.get("validation")
    validation = dict(figures) if isinstance(figures, Mapping) else {}
    return learner_of(name, params, taught, form=form, shape=shape, validation=validation)


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
