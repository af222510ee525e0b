"""From a folder to a learner. Nothing that the folder holds is imported or run."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
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
from metalearn.api.learner import Learner, Taught, learner_of
from metalearn.api.own import Network, TasksElsewhere, algorithm_from, given_again, inputs_in, model_from
from metalearn.api.pictures import form_of
from metalearn.app.parts import chosen_loss
from metalearn.checks import one_of, true_or_false
from metalearn.config.build import build, import_plugins, option_of
from metalearn.config.check import PRECISIONS
from metalearn.config.saved import NETWORK, OWN, changed_config, check_saved
from metalearn.config.values import quoted
from metalearn.errors import ConfigError, NotAdmittedError
from metalearn.nn.inputs import shape_of
from metalearn.nn.precision import type_of
from metalearn.nn.surroundings import with_gradients
from metalearn.runs.checkpoint import Snapshot, fitted, read_named
from metalearn.runs.seen import from_meta
from metalearn.saved import hub
from metalearn.saved.exporter import read_form
from metalearn.saved.form import MANIFEST, USES, kind_of
from metalearn.storage.files import is_folder
from metalearn.types import Algorithm, Loss, Params


@with_gradients()
def load(
    path: str | os.PathLike[str],
    *,
    network: Network | None = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
    plugins: Sequence[str] = (),
    transductive: bool | None = None,
    device: str = "cpu",
    key: str = "path",
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
        key: how messages name the folder.

    Raises:
        ValueError: there is nothing to load, it is damaged or refused, or it learns no tasks. The message names the
            folder and what to type.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{key}={path!r}: must be the path of a folder, such as outputs/maml_glyphs/seed0")
    if transductive is not None:
        true_or_false("transductive", transductive)
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here; give device='cpu'")
    if plugins is None or isinstance(plugins, str):
        raise ConfigError(f"plugins={plugins!r}: must be a list of packages; give plugins=['my_package']")
    folder = checked_folder(key, Path(path))
    saved = read_named(key, folder)
    try:
        together = saved.meta.get("queries_together") is True if transductive is None else transductive
        config = _configured(saved, network, plugins, together)
        import_plugins(config.plugins)
        fit = partial(fitted, key, folder)
        return _learner(config, saved, network, algorithm, loss, fit, torch.device(device))
    except NotAdmittedError as error:
        raise ConfigError(
            f"{key}={folder}: {error.reason}. Code of {error.package} would run here; if you trust it, give "
            f"plugins=[{error.package!r}] (scripts: --plugins {error.package})"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error) if str(error).startswith(f"{key}=") else f"{key}={folder}: {error}") from error


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    timeout: float = hub.SECONDS,
    **options: Any,
) -> Learner:
    """A learner in a folder, or in a repository of Hugging Face's hub, of any origin: only files of the kinds that
    `export` writes are fetched, and checked as `load` does; no code of it runs. They stay in the hub's cache.

    Args:
        name_or_folder: a folder that is there, or else a repository, such as `you/protonet`.
        revision: a branch, tag or commit of the repository.
        timeout: seconds for all of it.
        options: as for `load`.

    Raises:
        ValueError: it cannot be fetched in time, or is refused.
    """
    return load(hub.fetch(name_or_folder, revision=revision, timeout=timeout), key="name_or_folder", **options)


def checked_folder(key: str, path: Path) -> Path:
    """The folder that holds the parameters.

    Raises:
        ConfigError: `path` is no folder, or holds nothing to load.
    """
    if not is_folder(path):
        raise ConfigError(
            f"{key}={path}: there is no such folder; type the folder of a run, such as outputs/maml_glyphs/seed0"
        )
    kind = kind_of(path)
    if kind == "learner" or (kind in (None, "checkpoint") and (path / MANIFEST).exists()):
        return path
    if is_folder(path / "checkpoints/best"):
        return path / "checkpoints/best"
    if is_folder(path / "checkpoints/last"):
        raise ConfigError(
            f"{key}={path}: this run has not been validated yet, so it has no best checkpoint; type "
            f"{path}/checkpoints/last"
        )
    if kind in USES:
        raise ConfigError(f"{key}={path}: is {USES[kind].format(folder=path)}")
    raise ConfigError(
        f"{key}={path}: holds no run, no checkpoint and no published model; type the folder of a run (it holds "
        "checkpoints), of a checkpoint (…/checkpoints/best), or of a model that metalearn export has written"
    )


def _configured(saved: Snapshot, network: Network | None, plugins: Sequence[str], transductive: bool) -> DictConfig:
    """The config of what was saved, with the caller's choices."""
    plain = check_saved(saved.meta["config"])
    model = plain["model"]
    overrides = [f"model.transductive={transductive}".lower()] if "transductive" in model else []
    named_network = model.get("network")
    target = named_network.get("_target_") if isinstance(named_network, Mapping) else None
    if target is not None and network is None:
        raise ConfigError(
            f"it names the network {target}, whose code would run here; if you trust it, give "
            f"network={str(target)!r} (scripts: --network {target})"
        )
    objects = [group for group in ("algorithm", "model", "dataset", "loss") if OWN in plain.get(group, {})]
    if network is not None and target is None and "model" not in objects:
        raise ConfigError(f"network={network!r}: its network is one of this program's; leave network out")
    if target is not None and not isinstance(network, str):
        raise ConfigError(
            f"network={network!r}: it was trained with a network by its name; give network={str(target)!r}"
        )
    if target is not None:
        overrides.append(f"{NETWORK}._target_={quoted(network)}")
    overrides.append(f"plugins=[{','.join(map(quoted, plugins))}]")
    return changed_config(plain, overrides, {}, objects)


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
    if OWN in config.algorithm:
        given = given_again("algorithm", config.algorithm, own_algorithm, "algorithm")
        name, algorithm = str(config.algorithm[OWN]), algorithm_from(given, model)
    elif own_algorithm is not None:
        raise ConfigError(f"algorithm={own_algorithm!r}: its algorithm is known by its name; leave algorithm out")
    else:
        target = str(config.algorithm._target_)
        name = option_of("algorithm", target) or target.rpartition(".")[2]
        algorithm = build(config, "algorithm", model=model, inner=build(config, "inner"))
    algorithm = with_fixed(algorithm, model)
    if algorithm.evaluated_on != "tasks":
        raise ConfigError(
            f"algorithm={name} classifies what it was trained on, and learns no tasks; load a run of "
            "algorithm=protonet, for example"
        )
    # A network of our own is not made to learn the shapes of its parameters.
    with torch.device("meta") if model.stages else contextlib.nullcontext():
        drawn = algorithm.init(torch.Generator("cpu").manual_seed(0))
    shapes = {name: drawn[name].to(type_of(config.precision)) for name in sorted(drawn)}
    params = {name: value.to(device) for name, value in fit(saved.params, shapes).items()}
    for parameter, value in params.items():
        if not value.isfinite().all():
            raise ConfigError(f"the parameter {parameter} is not finite; take another checkpoint")
    if "preprocessing" in saved.meta:  # of a published one
        shown = saved.meta["preprocessing"]
        form = None if shown is None else read_form(shown)
    else:
        form = form_of(source, config.dataset)
    if form is not None and source.classes("test") is None:
        raise ConfigError(
            f"dataset._target_={config.dataset._target_}: gives real numbers for pictures, and no learner takes such"
        )
    shape: tuple[int, ...] | None = None if form is None else (form.channels, form.size, form.size)
    if OWN in config.dataset:
        shape = shape_of(inputs_in(config.dataset))
    taught = Taught(config, source, model, algorithm, from_meta(saved.meta))
    validation = saved.meta.get("validation") or {}
    learner = learner_of(name, params, taught, form=form, shape=shape, validation=validation)
    if OWN in config.model:
        expected, outputs = saved.meta.get("probe", []), learner.probe()
        # Rounding differs from machine to machine.
        if len(outputs) != len(expected) or not np.allclose(outputs, expected, rtol=1e-2, atol=1e-3):
            raise ConfigError(
                "network: with these parameters it gives other outputs than the network that was trained; give the "
                "same network, with the same buffers"
            )
    return learner
