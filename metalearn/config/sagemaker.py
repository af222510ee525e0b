"""Reads the environment of a training job of Amazon SageMaker, for `conf/launch/sagemaker.yaml`.

SageMaker's containers set these variables: ENVIRONMENT_VARIABLES.md of https://github.com/aws/sagemaker-training-toolkit.
"""

import json
import os
from collections.abc import Callable, Mapping

from metalearn.errors import ConfigError

CHANNELS = "SM_CHANNEL_"
"""The beginning of the variables that name the folder of an input channel."""

ALL_CHANNELS = "/opt/ml/input/data"
"""The folder of the channels' folders."""


def value(name: str) -> str | int | None:
    """The value of a key of launch=sagemaker.

    Raises:
        ConfigError: a variable is missing, or has a value that SageMaker does not give it.
    """
    return _VALUES[name]()


def _variable(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError as error:
        raise ConfigError(
            f"launch=sagemaker: the environment variable {name} is not set; SageMaker sets it in its training jobs. "
            "Anywhere else, type launch=default"
        ) from error


def _hosts() -> list[str]:
    text = _variable("SM_HOSTS")
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ConfigError(f'SM_HOSTS={text}: must be a list of names in JSON, such as ["algo-1", "algo-2"]')
    return hosts


def _node_rank() -> int:
    hosts, own = _hosts(), _variable("SM_CURRENT_HOST")
    if own not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={own}: is not in SM_HOSTS={os.environ['SM_HOSTS']}")
    return hosts.index(own)


def _workers_per_host() -> int:
    text = os.environ.get("SM_NUM_GPUS", "0")
    if not text.isdecimal():
        raise ConfigError(f"SM_NUM_GPUS={text}: must be a number of GPUs, such as 8")
    return max(int(text), 1)


def _interface() -> str | None:
    return _variable("SM_NETWORK_INTERFACE_NAME") if len(_hosts()) > 1 else None


def _data() -> str:
    channels = {name: folder for name, folder in os.environ.items() if name.startswith(CHANNELS)}
    if len(channels) == 1:
        return next(iter(channels.values()))
    return channels.get(f"{CHANNELS}TRAINING", ALL_CHANNELS)


_VALUES: Mapping[str, Callable[[], str | int | None]] = {
    "nnodes": lambda: len(_hosts()),
    "workers_per_host": _workers_per_host,
    "node_rank": _node_rank,
    "master_addr": lambda: _hosts()[0] if len(_hosts()) > 1 else "127.0.0.1",
    "interface": _interface,
    "data": _data,
}
