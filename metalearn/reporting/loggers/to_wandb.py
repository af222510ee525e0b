"""Weights & Biases. Nothing leaves the machine unless `logger.wandb_mode=online`, or WANDB_MODE, says so."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metalearn.config.values import Config
from metalearn.reporting.loggers.protocol import OpenLogger, Picture, Sent, Values, flat, opened, run_name

MODES = ("offline", "online")


def wandb_logger(project: str, mode: str | None) -> OpenLogger:
    """A run of the project; its files lie in `wandb` in the run folder.

    Args:
        project: its name.
        mode: one of `MODES`; None: what WANDB_MODE says, else `offline`.
    """

    chosen = mode or os.environ.get("WANDB_MODE", "offline")
    return lambda folder, window: opened("wandb", lambda: _WandbRun(folder, project, chosen))


class _WandbRun:
    def __init__(self, folder: Path, project: str, mode: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else errors are sent, in offline mode too
        os.environ["WANDB_CACHE_DIR"] = str(folder.resolve() / "wandb" / "cache")  # where its links lead
        import wandb  # takes a second

        self._wandb: Any = wandb
        self._sent = Sent(folder / "wandb.json")
        self._is_new = self._sent.id is None
        name = self._sent.id or uuid.uuid4().hex[:12]
        (folder / "wandb").mkdir(exist_ok=True)
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_save_requirements=False,
            silent=True,
        )  # fmt: skip
        self._run: Any = wandb.init(
            project=project, id=name, name=run_name(folder), dir=str(folder), mode=mode, settings=settings,
            resume="allow" if mode == "online" else None,
        )  # fmt: skip
        self._sent.keep(name)

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        self._run.config.update(flat(config), allow_val_change=True)
        if self._is_new:
            self._run.log({f"episodes/{name}": self._wandb.Image(value) for name, value in pictures.items()}, step=0)

    def scalars(self, step: int, split: str, values: Values) -> None:
        if self._sent.claim(split, step):
            self._run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def result(self, config: Config, figures: Values) -> None:
        self._run.summary.update(figures)

    def close(self) -> None:
        self._run.finish()
