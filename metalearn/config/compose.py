"""From the command line to checked config. Imports no torch: a misspelt key or an unknown choice is reported before
anything heavy is loaded."""

import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from metalearn.config import values
from metalearn.config.options import CONF, all_keys_in, check_option, choice_hint, common, groups, keys_in, own_folders
from metalearn.errors import ConfigError, nearest, typed_program

OPEN = "model.network."  # Below this key stand the arguments of a user's own network; any name is allowed there
SEVERAL = ("logger",)  # groups that take several options together: `logger=[tensorboard,wandb]`
PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")  # the name of a package or module
PATHS = (
    "dataset.file", "dataset.root", "hydra.run.dir", "hydra.sweep.dir", "init_from", "launch.data",
    "launch.model", "launch.outputs", "model.weights", "resume",
)  # fmt: skip
"""Keys whose values are paths."""

FOREIGN = {
    **dict.fromkeys(
        ("weight_decay", "wd", "l2"),
        "type optimizer=adamw optimizer.weight_decay=0.01 (sgd and muon have this key too; adam has none)",
    ),
    **dict.fromkeys(("grad_clip", "clip", "max_norm", "max_grad_norm", "clip_norm"), "type optimizer.clip_norm=10.0"),
    **dict.fromkeys(("patience", "early_stopping"), "type trainer.patience=5"),
    **{name: f"type hydra.sweeper.{name}=VALUE" for name in ("n_trials", "n_jobs", "sampler", "pruner", "study_name")},
}  # fmt: skip
"""What to type in place of keys that other programs have. The nearest key of ours may mean something else."""

NEEDS: dict[str, dict[str, tuple[object, ...]]] = {
    "optimizer.decay": {"optimizer.schedule": ("step",)},
    "optimizer.decay_every": {"optimizer.schedule": ("step",)},
    "optimizer.min_lr": {"optimizer.schedule": ("cosine", "linear", "step")},
    "logger.project": {"logger.wandb": (True,), "logger.mlflow": (True,)},
    "logger.wandb_mode": {"logger.wandb": (True,)},
    "logger.mlflow_uri": {"logger.mlflow": (True,)},
    "init_strict": {"init_from": ()},
    "model.input_size": {"model.weights": ()},
}
"""Keys that have an effect only if one of some other keys has one of these values, or, without values, any but null."""

PROVIDER = "command-line"  # Hydra's name for a folder that `--config-dir` has named

for _name, _resolver in values.RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


class Composed(NamedTuple):
    """The config, the folder of its run, the name of the experiment (see `run_group`), and the `whole` that Hydra has
    composed, which has the config with its interpolations, and Hydra's own part."""

    config: DictConfig
    run_dir: Path
    experiment: str
    whole: DictConfig


def composed_by_hydra(overrides: Sequence[str], **options: bool) -> DictConfig:
    """Hydra's composition for these overrides, from all folders that are searched. Nothing is checked."""
    of_multirun = GlobalHydra.instance().hydra  # in one of whose jobs this may be
    GlobalHydra.instance().hydra = None
    # In conf/config.yaml, the search path has tables://conf alone.
    places = [f"hydra.searchpath=[tables://conf,{values.quoted(f'file://{folder}')}]" for folder in own_folders]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=[*overrides, *places], **options)
    finally:
        GlobalHydra.instance().hydra = of_multirun


def compose_config(overrides: Sequence[str]) -> Composed:
    """The config for these overrides. Raises ConfigError for a key or a choice that does not exist, a value that cannot
    be read, or options of which one needs a key that another lacks."""
    overrides = with_sets(overrides)
    all_overrides = parsed(overrides)
    for override in all_overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values need a multirun; type --multirun before them")
        if override.key_or_group == "hydra.searchpath":  # it would take the place of our tables
            raise ConfigError(f"{override.input_line}: is set already; type --config-dir=FOLDER to add yamls of yours")
    try:
        choices, settings = sorted_out(all_overrides)
        typed = {override.key_or_group for override in settings}
        for override in choices:
            check_choice(override)
        try:
            whole = composed_by_hydra(overrides, return_hydra_config=True)
        except HydraException:  # a key may be the cause, which our message explains better
            only_choices = [override.input_line or "" for override in choices]
            _known_keys(composed_by_hydra(only_choices, return_hydra_config=True), settings)
            raise
        keys = _known_keys(whole, settings)
        if whole.hydra.job.chdir:
            raise ConfigError(
                "hydra.job.chdir=true: paths of this program begin at the folder in which it was started; leave "
                "hydra.job.chdir out"
            )
        HydraConfig.instance().set_config(whole)  # where `${hydra:…}` looks
        all_groups = groups()  # a look at the disk
        selected = {group: str(option) for group, option in whole.hydra.runtime.choices.items() if group in all_groups}
        config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        for key in sorted(values.keys_of(config) - keys):
            try:
                check_key(key, keys)
            except ConfigError as error:
                raise ConfigError(
                    f"{error}. experiment={selected['experiment']} sets it, so it does not go with this "
                    f"{key.partition('.')[0]}; type another experiment, one of {', '.join(all_groups['experiment'])}"
                ) from error
        check_links(config, selected, typed)
        check_plugins(config, typed)
        _check_effects(config, typed)
        for override in settings:  # one by one, so that an error names the key that was typed
            OmegaConf.select(config, override.key_or_group)
        if whole.run == values.AUTO:
            in_own_folder = not any(override.key_or_group == "hydra.run.dir" for override in all_overrides)
            changed = _changed(config, selected, choices, settings) if in_own_folder else {}
            whole.run = config.run = values.run_name(OmegaConf.select(whole, "seed"), changed)
        run_dir = Path(whole.hydra.run.dir)
        OmegaConf.resolve(config)
    except InterpolationKeyError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; type ${{KEY}} with a key that exists, or a value") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise own_error(error) from error
    return Composed(config, run_dir, values.experiment_of(selected), whole)


def _changed(
    config: DictConfig, selected: Mapping[str, str], choices: Sequence[Override], settings: Sequence[Override]
) -> values.Config:
    """What was typed, differs from the defaults of the experiment, and is not in the path of the run's folder."""
    in_path = values.UNNAMED + (("algorithm", "dataset") if selected["experiment"] == values.DEFAULT[0] else ())
    typed_groups = {override.key_or_group for override in choices} - {*in_path}
    typed_keys = [key for key in (o.key_or_group for o in settings) if not values.is_below(key, values.UNNAMED)]
    changed: values.Config = {}
    if typed_groups:
        usual = composed_by_hydra([f"experiment={selected['experiment']}"], return_hydra_config=True)
        options = usual.hydra.runtime.choices
        changed |= {group: selected[group] for group in typed_groups if selected[group] != options.get(group)}
    if typed_keys:
        defaults = composed_by_hydra([override.input_line or "" for override in choices])
        plain = dict(values.leaves(values.to_container(defaults, resolve=False)))
        for key in typed_keys:
            value = OmegaConf.select(config, key)
            usually = config.copy()
            OmegaConf.update(usually, key, plain.get(key), force_add=True)  # with its links to other keys
            if OmegaConf.select(usually, key) != value:
                changed[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return changed


def own_error(error: Exception) -> ConfigError:
    """An error of Hydra's or OmegaConf's as ours, with its cause, or the key that it is about."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return cause
    first = str(error).splitlines()[0]
    if key := getattr(error, "full_key", None):
        return ConfigError(f"{key}: {first}; type {key}=VALUE")
    if isinstance(error, InterpolationResolutionError):
        return ConfigError(f"{first}; type a value in place of ${{…}}")
    if error.__cause__ is None:
        return ConfigError(str(error))
    why, advice = str(error.__cause__).splitlines()[0], f"{typed_program()} --cfg hydra lists Hydra's keys"
    if (added := re.search(r"'(model\.network\.[\w.]+)'", first)) is not None:
        advice = f"an argument of a network of your own has a plus: type +{added[1]}=VALUE"
    elif "hydra.sweeper." in first:
        advice = "docs/reference/sweepers.md has the keys of each sweeper"
    return ConfigError(f"{first.rstrip('.')}: {why}; {advice}")


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job of a multirun: all combinations of the listed values. Raises ConfigError for an
    override that cannot be read, or a sweep that is no list of values."""
    choices: list[list[str]] = []
    for override in parsed(overrides):
        key = override.get_key_element()
        if not override.is_sweep_override():  # as Hydra hands it on: 1e-2 becomes 0.01
            whole = (
                override.input_line or "" if override.is_delete() else f"{key}={override.get_value_element_as_str()}"
            )
            choices.append([whole])
            continue
        try:
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        except (HydraException, AssertionError) as error:  # a glob, or an interval without steps
            raise ConfigError(f"{override.input_line}: must list its values; type {key}=A,B") from error
    return [list(job) for job in itertools.product(*choices)]


def compose_sweeper(overrides: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """The keys below `hydra.sweeper` that the overrides ask for, and the folder of the sweep. Raises ConfigError for an
    override that cannot be read, or a key that the sweeper does not have."""
    fixed = [str(override.input_line) for override in parsed(overrides) if not override.is_sweep_override()]
    try:
        whole = composed_by_hydra(fixed, return_hydra_config=True)
        HydraConfig.instance().set_config(whole)  # the folder follows from the options that are chosen
        return values.to_container(whole.hydra.sweeper), Path(whole.hydra.sweep.dir)
    except (HydraException, OmegaConfBaseException) as error:
        if "hydra.sweeper" not in str(error):
            compose_config(fixed)  # raises the error of a run, which names the key, and the nearest one
        raise own_error(error) from error


def as_path(override: str) -> str:
    """The override, with its value in Hydra's quotes if it is a path that Hydra cannot read as it is typed, such as one
    with `=`, brackets or an umlaut. `~` at its beginning is the home folder, which shells leave there."""
    key, equals, value = override.partition("=")
    if not equals or key.lstrip("+") not in PATHS:
        return override
    if value.partition("/")[0] == "~":
        value = str(Path(value).expanduser())
    try:
        OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        value = values.quoted(value)
    return f"{key}={value}"


def with_sets(overrides: Sequence[str]) -> list[str]:
    """The overrides, with `dataset=[A,B]` as `dataset=several dataset.sets=[A,B]`."""
    written: list[str] = []
    for override in overrides:
        sets = override.removeprefix("dataset=[")
        written += [override] if sets == override else ["dataset=several", f"dataset.sets=[{sets}"]
    return written


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides, read by Hydra. Raises ConfigError for one that cannot be read."""
    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            if (hint := choice_hint(override)) and "=" not in override:
                raise ConfigError(f"{override}: is no KEY=VALUE{hint}") from error
            key, equals, value = override.partition("=")
            hint = "type KEY=VALUE"
            if equals and re.fullmatch(r"\+{0,2}[\w./@]+", key):
                text = values.quoted(value)
                if value.startswith("[") and value.endswith("]"):  # a path may have commas, and begins as paths do
                    text = f"[{','.join(map(values.quoted, re.split(',(?=[/.~])', value[1:-1])))}]"
                typed = shlex.quote(f"{key}={text}")
                hint = f"such a text stands in quotes of Hydra's, and these in quotes of the shell; type {typed}"
            raise ConfigError(f"{override}: cannot be read: {str(error).splitlines()[0]}; {hint}") from error
    return parsed


def sorted_out(parsed: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """The overrides that choose a group's option, and those that set a key; Hydra checks those of its own keys."""
    ours = [o for o in parsed if not o.key_or_group.startswith(("hydra.", "hydra/"))]
    all_groups = groups()
    return [o for o in ours if o.key_or_group in all_groups], [o for o in ours if o.key_or_group not in all_groups]


def check_choice(override: Override) -> None:
    """Raises ConfigError for an option that its group does not have."""
    group = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"~{group}: a group cannot be removed; type {group}=NAME")
    value = override.value()
    if isinstance(value, list) and group not in SEVERAL:
        raise ConfigError(f"{override.input_line}: takes one choice; type {group}=NAME")
    for option in value if isinstance(value, list) else [value]:
        check_option(group, str(option))


def check_key(key: str, keys: set[str]) -> None:
    """Raises ConfigError for a key that does not exist; the message names the nearest one, or the options that
    have it."""
    if key in keys or (key.startswith(OPEN) and OPEN.rstrip(".") in keys):
        return
    keys = {name for name in keys if not name.endswith("._target_")}
    last = {name.rpartition(".")[2]: name for name in sorted(keys)}
    name = key.rpartition(".")[2]
    tail = [name] if name in last else difflib.get_close_matches(name, last, n=1, cutoff=0.75)
    if name in FOREIGN:
        raise ConfigError(f"{key}: there is no such key; {FOREIGN[name]}")
    group, _, inner = key.partition(".")
    if having := [option for option in groups().get(group, ()) if inner and key in all_keys_in(group, option)]:
        others = ", ".join(having[:4]) + ", …" * (len(having) > 4)
        have = "has" if len(having) == 1 else "have"
        raise ConfigError(f"{key}: this {group} has no such key; {others} {have} it")
    by_tail = f"; did you mean {last[tail[0]]}?" if tail else ""
    whole = nearest(key, [*sorted(keys), *groups()])
    hint = by_tail if name in last else whole or by_tail
    raise ConfigError(f"{key}: there is no such key{hint} ({typed_program('help train')} lists all)")


def _check_effects(config: DictConfig, typed: Collection[str]) -> None:
    """Raises ConfigError for a key that was typed and has no effect."""
    present = values.keys_of(config)
    for key in sorted(NEEDS.keys() & typed):
        others = {other: (OmegaConf.select(config, other), NEEDS[key][other]) for other in NEEDS[key].keys() & present}
        if others and not any(value in allowed if allowed else value is not None for value, allowed in others.values()):
            other, (value, allowed) = min(others.items())
            present_value, needed = values.as_typed(value), values.as_typed(allowed[0]) if allowed else "PATH"
            raise ConfigError(
                f"{key}={values.as_typed(OmegaConf.select(config, key))}: has no effect with {other}={present_value}; "
                f"type {other}={needed}, or leave {key} out"
            )


def check_plugins(config: DictConfig, typed: Collection[str]) -> None:
    """Raises ConfigError where a yaml admits packages, or where what was typed is no list of packages."""
    names = config.plugins
    if not isinstance(names, ListConfig) or not all(PACKAGE.fullmatch(str(name)) for name in names):
        raise ConfigError(f"plugins={names}: must be a list of packages; type 'plugins=[my_package]'")
    if names and "plugins" not in typed:
        raise ConfigError(
            f"plugins={names}: a yaml names packages, and only the command line may; type 'plugins=[{','.join(names)}]'"
        )


def _known_keys(whole: DictConfig, settings: Sequence[Override]) -> set[str]:
    """The keys that exist with the options that `whole` has chosen, but for those that an experiment adds. A group
    with several options at once has the keys of all its options, since Hydra does not list the chosen ones. They come
    from the yamls: to compose again without the experiment would take half the time of a composition. Raises
    ConfigError for an override of another key."""
    selected = whole.hydra.runtime.choices
    keys = values.keys_of(common())
    for group, options in groups().items():
        if group not in ("experiment", "sweep"):
            for option in options if group not in selected else [selected[group]]:
                keys |= {group} | all_keys_in(group, option) if option is not None else set()
    for override in settings:
        check_key(override.key_or_group, keys)
    return keys


LINK = re.compile(r"(?<!\\)\$\{(\w[\w.\[\]]*)\}")  # `${KEY}` in a value: the value of another key, which must exist


USUAL_MODELS = {"sinusoid": "mlp", "table": "mlp", "texts": "decoder", "chains": "decoder"}
"""Models for datasets without pictures, for advice."""


class KeyLink(NamedTuple):
    """A key with its value, in which `${target}` stands for the value of another key."""

    key: str
    value: str
    target: str


def check_links(config: DictConfig, selected: Mapping[str, str], typed: set[str]) -> None:
    """Raises ConfigError if the key in a `${KEY}` of a config, which is not resolved yet, does not exist. The message
    names the options, of those `selected` in each group, that need it. `typed` are the keys that overrides set."""
    missing = [link for link in _links_of(config) if not _exists(config, link.target)]
    if not missing:
        return
    first = missing[0]
    group, _, name = first.target.partition(".")
    if first.key in typed or group not in selected:
        hint = nearest(first.target, sorted(values.keys_of(config)))
        raise ConfigError(f"{first.key}={first.value}: there is no key {first.target}{hint}")
    needs: dict[str, KeyLink] = {}  # by the group whose option has set the link
    for link in missing:
        if link.target == first.target:
            owner, _, inner = link.key.partition(".")
            by_option = owner in selected and link._replace(key=inner) in _links_of(keys_in(owner, selected[owner]))
            needs.setdefault(owner if by_option else "experiment", link)
    names = " and ".join(f"{by}={selected[by]} ({link.key}={link.value})" for by, link in sorted(needs.items()))
    others = []
    for by in sorted(needs):
        options = groups()[by] if by != "experiment" else []
        fitting = [o for o in options if all(_exists(config, link.target) for link in _links_of(keys_in(by, o)))]
        usual = USUAL_MODELS.get(selected["dataset"]) if by == "model" else None
        option = usual if usual in fitting else next(iter(fitting), None)
        others.append(f"another {by}" + (f", such as {by}={option}" if option else ""))
    raise ConfigError(
        f"{group}={selected[group]} has no key {name}, which {names} need{'s' * (len(needs) == 1)}: these options do "
        f"not fit together; type {', and '.join(others)}, or another {group}"
    )


def _links_of(config: DictConfig) -> list[KeyLink]:
    pairs = values.leaves(values.to_container(config, resolve=False))
    return [KeyLink(key, str(value), target) for key, value in pairs for target in LINK.findall(str(value))]


def _exists(config: DictConfig, key: str) -> bool:
    if key in values.keys_of(config):
        return True
    absent = object()
    try:
        return OmegaConf.select(config, key, default=absent) is not absent  # an item of a list, or behind another link
    except OmegaConfBaseException:
        return True  # it is a link itself, and checked as such
