"""Hugging Face's hub: saved folders go there and come from there. What comes may be from anybody, so only files of a
saved form are fetched, and none of them is run."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from metalearn.errors import ConfigError, install
from metalearn.storage.files import StrPath, is_folder

SECONDS = 600.0  # for all that a call sends and gets
FILES = ("*.safetensors", "*.json", "*.md")

Result = TypeVar("Result")


def push(folder: Path, repo_id: str, *, private: bool, timeout: float) -> str:
    """Uploads a saved folder to a repository, which is made if it is not there; returns its address. Raises ConfigError
    if the hub refuses it, or does not answer within `timeout` seconds."""
    api, message = _api(), "Upload by metalearn"

    def upload() -> str:
        address = str(api.create_repo(repo_id, private=private, exist_ok=True))
        api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=list(FILES), commit_message=message)
        return address

    return _within(timeout, f"repo_id={repo_id}", upload)


def fetch(name_or_folder: StrPath, *, revision: str | None, timeout: float) -> Path:
    """A folder that is there, if there is no `revision`; or else a repository, which is fetched into the hub's cache.
    Raises ConfigError if there is no such repository, or the hub does not answer within `timeout` seconds."""
    if revision is None and is_folder(Path(name_or_folder)):
        return Path(name_or_folder)
    api, name = _api(), os.fspath(name_or_folder)
    download = partial(api.snapshot_download, name, revision=revision, allow_patterns=list(FILES))
    return Path(_within(timeout, f"name={name}", download))


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"huggingface_hub is not installed; type {install('hub')}") from error
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # which the package reads only when it is imported


def _within(seconds: float, what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns; a ConfigError if it fails or takes longer than this."""
    outcome: Future[Result] = Future()

    def call() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    # Some calls of the package wait without a limit, and none limits a transfer; a thread can be left behind.
    Thread(target=call, daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        raise ConfigError(f"{what}: the hub has not answered within {seconds:g} s; give a longer timeout") from None
    except Exception as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split()):.300}") from error
