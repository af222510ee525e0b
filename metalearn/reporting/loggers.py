"""Where the lines of a run go besides the terminal and train.log: metrics.jsonl, which every run has, and the loggers
that the config chooses."""

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from metalearn.config.saved import typed_keys
from metalearn.config.values import Config, leaves
from metalearn.errors import RunError
from metalearn.reporting.page import Picture
from metalearn.runs.metrics import jsonable
from metalearn.storage.files import read_json, write_atomically, writing

Values = dict[str, float]
Sums = dict[str, tuple[float, int]]  # for each figure, its sum over some steps and the number of steps

log = logging.getLogger("metalearn")


@dataclass(frozen=True)
class Window:
    """The steps to log."""

    done: int  # the last step of which the training is done
    validated: int  # the last one of which the validation is done
    steps: int  # their number
    meta_batch_size: int  # the tasks, or samples, of a step
    unit: str = "tasks"
    # Sums over steps that are done, but not in a line yet.
    pending: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    digest: str | None = None  # of metrics.jsonl after the steps done, if it is known
    val_every: int = 1  # steps between validations
    val_tasks: int = 0  # of each validation
    test_tasks: int = 0


class Logger:
    """Gets the lines of a run. A logger overrides the methods that it has a use for."""

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        """Gets the config, and a few episodes as pictures by name."""

    def scalars(self, step: int, split: str, values: Values) -> None:
        """Gets the values of a step of a split."""

    def result(self, config: Config, figures: Values) -> None:
        """Gets the config and the final figures."""

    def close(self) -> None:
        """Ends it."""


OpenLogger = Callable[[Path, Window], Logger]


def flat(config: Config) -> dict[str, bool | int | float | str]:
    """The config by dotted keys, with plain values only: lists and None as text."""
    return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in leaves(config)}


def as_yaml(config: Config) -> str:
    """The config as text, in its own order."""
    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


class Sent:
    """A file in the run folder that notes the points sent to another program, which cannot take a point back. A run
    that goes on makes the steps after its checkpoint again, with the same values: they are not sent twice. `id` is the
    run's name in that program; None: it has nothing of this run yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = read_json(path)
        self.id: str | None = content.get("id")
        self._steps: dict[str, int] = content.get("steps", {})

    def keep(self, new_id: str) -> None:
        """Notes the run's name in the other program."""
        self.id = new_id
        self._save()

    def claim(self, split: str, step: int) -> bool:
        """Whether a point has not been sent yet; from now on it counts as sent."""
        if step <= self._steps.get(split, 0):
            return False
        self._steps[split] = step
        self._save()
        return True

    def _save(self) -> None:
        write_atomically(self._path, json.dumps({"id": self.id, "steps": self._steps}) + "\n")


class Guarded(Logger):
    """The logger of another program, by the key `name` of the group logger. A failure after the start does not end the
    run: it is reported once, and the logger gets nothing more. Raises RunError if it cannot be opened."""

    def __init__(self, name: str, open_logger: OpenLogger, folder: Path, window: Window) -> None:
        self._name, self._failed = name, False
        try:
            logger = open_logger(folder, window)
        except Exception as error:  # of the other program's code: any type
            advice = f"type logger.{name}=false to go on without"
            raise RunError(f"logger.{name}: cannot be opened: {error}; {advice}") from error
        for method in ("start", "scalars", "result", "close"):
            setattr(self, method, partial(self._call, getattr(logger, method)))

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if not self._failed:
            try:
                method(*arguments)
            except Exception as error:  # of the other program's code: any type
                self._failed = True
                log.warning("logger.%s: has failed and gets nothing more: %s", self._name, error)
                log.debug("where logger.%s failed:", self._name, exc_info=True)  # for train.log


METRICS = "metrics.jsonl"  # the file of a run folder
Row = dict[str, Any]


def rows_of(run_dir: Path) -> Iterator[Row]:
    """The complete lines of metrics.jsonl: a running program may be writing the last one. Raises FileNotFoundError if
    the folder holds no run, and ValueError if a line is no JSON."""
    path = run_dir / METRICS
    if not path.exists():
        raise FileNotFoundError(f"{run_dir}: holds no {METRICS}; type the folder of a run that has begun")
    with path.open(encoding="utf-8") as file:
        try:
            yield from (json.loads(line) for line in file if line.endswith("\n"))
        except ValueError as error:
            raise ValueError(f"{path}: has a line that is no JSON ({error})") from error


class Lines(Logger):
    """The file of a run that logs. If a run continues, the lines of what it will do again are removed."""

    def __init__(self, folder: Path, window: Window) -> None:
        self._path = folder / METRICS
        lines, kept = list[bytes](), []
        try:
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                lines = [line for line in file if line.endswith(b"\n")]
        except OSError as error:
            advice = "make it readable, or move it away"
            raise RunError(f"{self._path}: cannot be read: {error.strerror}; {advice}") from error
        last = {"train": window.done, "val": window.validated, "test": 0}  # the steps that are not done again
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # it is damaged, which the digest shows
                row = json.loads(line)
                if 0 < row["step"] <= last[row["split"]]:
                    kept.append(line.decode())
        self._digest = hashlib.sha256("".join(kept).encode())
        if window.digest not in (None, self.digest()):
            log.warning("%s: its lines up to step %d are not those that this run has written", self._path, window.done)
        write_atomically(self._path, "".join(kept))
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")

    def scalars(self, step: int, split: str, values: Values) -> None:
        line = json.dumps(jsonable({"step": step, "split": split, **values})) + "\n"
        with writing(self._path):
            self._file.write(line)
            self._file.flush()
        self._digest.update(line.encode())

    def digest(self) -> str:
        """The SHA-256 of all lines so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        with writing(self._path), self._file:
            os.fsync(self._file.fileno())


# TensorBoard sorts groups by name and opens the first two: those shall be the curves, not single points.
_GROUPS = {"test": "z_test"}


class TensorboardLogger(Logger):
    """TensorBoard's events of a run: curves, hyperparameters with the final figures, the config, a few episodes. If the
    run goes on, events after the steps done are purged. Raises RunError if they cannot be written."""

    def __init__(self, folder: Path, window: Window) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._folder, self._window = folder, window
        self._excepthook = threading.excepthook
        threading.excepthook = self._ended
        with writing(folder):
            self._writer: Any = SummaryWriter(str(folder), purge_step=window.done + 1 if window.done else 0)

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        if self._window.done:
            return  # an earlier session has written them, at step 0
        text = "".join(f"    {line}\n" for line in as_yaml(config).splitlines())  # code in Markdown
        with writing(self._folder):
            self._writer.add_text("config", text, 0)
            for name, picture in pictures.items():
                self._writer.add_image(f"episodes/{name}", picture, 0, dataformats="HWC")

    def scalars(self, step: int, split: str, values: Values) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(f"{_GROUPS.get(split, split)}/{name}", value, step)

    def result(self, config: Config, figures: Values) -> None:
        values, typed = flat(config), dict[str, str]()
        with suppress(OSError, ValueError):  # damaged: the run does not end for it
            typed = typed_keys(self._folder)
        changed = {key: value for key, value in values.items() if any(f"{key}.".startswith(f"{t}.") for t in typed)}
        named = {f"{_GROUPS['test']}/{name.rpartition('/test_')[2]}": value for name, value in figures.items()}
        with writing(self._folder):
            self._writer.add_hparams(changed | values, named, run_name=".", global_step=self._window.steps)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()
        threading.excepthook = self._excepthook

    def _ended(self, args: threading.ExceptHookArgs) -> None:
        """Prints the traceback of a thread, but for the writer's: the next call here raises its error."""
        if type(args.thread).__name__ != "_AsyncWriterThread":
            self._excepthook(args)


MODES = ("offline", "online")


class WandbLogger(Logger):
    """Weights & Biases: a run of the project; its files lie in `wandb` in the run folder. Nothing leaves the machine
    unless `mode`, else WANDB_MODE, is `online`."""

    def __init__(self, folder: Path, window: Window, *, project: str, mode: str | None) -> None:
        mode = mode or os.environ.get("WANDB_MODE", "offline")
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
            project=project, id=name, name=f"{folder.parent.name}/{folder.name}", dir=str(folder), mode=mode,
            settings=settings, resume="allow" if mode == "online" else None,
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


_LONGEST_PARAM = 500  # the most characters of a parameter's value that every store of MLflow takes
_MOST_PARAMS = 100  # the most parameters in one call


class MlflowLogger(Logger):
    """MLflow: a run of the experiment, at the tracking server or database `uri`, else MLFLOW_TRACKING_URI, else in
    `mlflow.db` in the run folder: MLflow has given up its stores of plain files."""

    def __init__(self, folder: Path, window: Window, *, experiment: str, uri: str | None) -> None:
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient, entities  # takes seconds

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._entities: Any = entities
        home = folder.resolve()
        self._client: Any = MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
        self._status, self._steps = "KILLED", window.steps  # killed, unless a result comes
        self._sent = Sent(folder / "mlflow.json")
        self._is_new = self._sent.id is None
        if self._is_new:
            artifacts = None if uri else (home / "mlartifacts").as_uri()
            old = self._client.get_experiment_by_name(experiment)
            number = old.experiment_id if old else self._client.create_experiment(experiment, artifacts)
            name = f"{folder.parent.name}/{folder.name}"
            self._sent.keep(self._client.create_run(number, run_name=name).info.run_id)
        else:
            self._client.update_run(self._sent.id, status="RUNNING")

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        if not self._is_new:
            return  # the parameters of a run cannot be changed
        texts = [(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(config).items()]
        params = [self._entities.Param(name, text) for name, text in texts]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._sent.id, params=params[first : first + _MOST_PARAMS])
        self._client.log_text(self._sent.id, as_yaml(config), "config.yaml")
        for name, picture in pictures.items():
            self._client.log_image(self._sent.id, picture, f"episodes/{name}.png")

    def scalars(self, step: int, split: str, values: Values) -> None:
        if self._sent.claim(split, step):
            self._log({f"{split}/{name}": value for name, value in values.items()}, step)

    def result(self, config: Config, figures: Values) -> None:
        if self._sent.claim("result", self._steps):
            self._log(figures, self._steps)
        self._status = "FINISHED"

    def close(self) -> None:
        self._client.set_terminated(self._sent.id, self._status)

    def _log(self, values: Values, step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._sent.id, metrics=metrics)


def openers_of(project: str, wandb_mode: str | None, mlflow_uri: str | None) -> dict[str, OpenLogger]:
    """What opens each logger, by its key of the group logger."""
    return {
        "tensorboard": TensorboardLogger,
        "wandb": partial(Guarded, "wandb", partial(WandbLogger, project=project, mode=wandb_mode)),
        "mlflow": partial(Guarded, "mlflow", partial(MlflowLogger, experiment=project, uri=mlflow_uri)),
    }
