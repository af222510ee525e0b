"""What `python train.py --help` says; the explanations are the comments of the yaml files."""

from pathlib import Path

from metalearn.config.compose import CONF, groups


def help_text() -> str:
    """What the program does, its groups and its keys."""
    lines = [
        "Trains meta-learners. Everything is chosen by config: GROUP=OPTION and KEY=VALUE.",
        "",
        "  python train.py                                  MAML on drawn characters, about a minute",
        "  python train.py workers=2 experiment=maml_omniglot",
        "  torchrun --nproc_per_node=2 train.py experiment=maml_omniglot trainer.steps=2000",
        "  python train.py --multirun algorithm.inner_lr=0.1,0.4",
        "",
        "Groups and their options:",
    ]
    for group, options in groups().items():
        lines += [f"  {group}"]
        lines += [f"    {option:22} {_summary(CONF / group / f'{option}.yaml')}" for option in options]
    lines += ["", "Keys of the program:", *_explained(CONF / "config.yaml", "")]
    for group, options in groups().items():
        if group != "experiment":
            for option in options:
                explained = _explained(CONF / group / f"{option}.yaml", f"{group}.")
                lines += [f"Keys of {group}={option}:", *explained] if explained else []
    lines += ["", "Hydra's own flags (--multirun, --cfg job, …): python train.py --hydra-help"]
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """The first comment of a yaml file that is not a directive to Hydra."""
    comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _explained(path: Path, prefix: str) -> list[str]:
    """`key=default  meaning` for every line of a yaml file that has a comment behind it."""
    lines = []
    section = ""
    for line in path.read_text().splitlines():
        setting, _, meaning = line.partition("  # ")
        key, _, value = setting.partition(":")
        if line and not line.startswith((" ", "#")):
            section = "" if meaning else f"{key}."
        if meaning:
            name = f"{prefix}{section}{key.strip()}" if line.startswith(" ") else f"{prefix}{key}"
            lines.append(f"  {name + '=' + value.strip():52} {meaning}")
    return lines
