"""Hugging Face's hub: folders go there and come from there. What comes is of any origin, so only files with the names
that are asked for are fetched, and none that is too large."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from metalearn.errors import ConfigError

SECONDS = 600.0
"""For all that a call sends and gets."""

LARGEST_FILE = 2**31
"""Bytes of a file that is fetched."""

_LONGEST_REASON = 300

Result = TypeVar("Result")


def push(folder: Path, repo_id: str, *, files: Sequence[str] = ("*",), private: bool, timeout: float) -> str:
    """Uploads those `files` of a folder (names or patterns) to a repository, which is made if it is not there; returns
    its address.

    Raises:
        ConfigError: the hub refuses it, or does not answer within `timeout` seconds.
    """
    api = _api()

    def work() -> str:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=list(files), commit_message="Upload by metalearn"
        )
        return str(address)

    return _within(timeout, f"repo_id={repo_id}", work)


def fetch(
    repo_id: str, required: Sequence[str], optional: Sequence[str], *, revision: str | None, timeout: float
) -> Path:
    """Fetches files of a repository into the hub's cache; returns the folder, in which they are links.

    Raises:
        ConfigError: there is no such repository or file, a file is too large, or the hub does not answer within
            `timeout` seconds.
    """
    api = _api()

    def work() -> Path:
        about = api.model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size for file in about.siblings or ()}
        folders = set()
        for name in (*required, *(name for name in optional if name in sizes)):
            size = sizes.get(name)
            if size is None or size > LARGEST_FILE:
                reason = (
                    "is not there" if size is None else f"has {size:,} bytes, and at most {LARGEST_FILE:,} are read"
                )
                raise ValueError(f"{name}: {reason}")
            # All of one commit, whatever is pushed meanwhile.
            folders.add(Path(api.hf_hub_download(repo_id, name, revision=about.sha)).parent)
        (folder,) = folders
        return folder

    return _within(timeout, f"name={repo_id}", work)


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError("huggingface_hub is not installed; type pip install 'metalearn-train[hub]'") from error
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # which the package reads only when it is imported


def _within(seconds: float, what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns.

    Raises:
        ConfigError: it fails, or takes longer than this.
    """
    from distributed.cluster.store import within  # imports all of distributed, which only the hub needs here

    # Some calls of the package wait without a limit, and none limits a transfer as a whole.
    try:
        return within(seconds, work)
    except TimeoutError:
        raise ConfigError(f"{what}: the hub has not answered within {seconds:g} s; give a longer timeout") from None
    except Exception as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())[:_LONGEST_REASON]}") from error
