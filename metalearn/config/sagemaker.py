"""Reads the environment of a training job of Amazon SageMaker, for `conf/launch/sagemaker.yaml`.

SageMaker's containers set these variables: ENVIRONMENT_VARIABLES.md of https://github.com/aws/sagemaker-training-toolkit.
"""

import json
import os

from metalearn.errors import ConfigError

CHANNELS = "SM_CHANNEL_"
"""The beginning of the variables that name the folder of an input channel."""

ALL_CHANNELS = "/opt/ml/input/data"
"""The folder of the channels' folders."""


def value(name: str) -> str | int | None:
    """The value of a key of launch=sagemaker.

    Raises:
        ConfigError: a variable is missing.
    """
    if name == "data":
        channels = {key: folder for key, folder in os.environ.items() if key.startswith(CHANNELS)}
        only = next(iter(channels.values())) if len(channels) == 1 else None
        return only or channels.get(f"{CHANNELS}TRAINING", ALL_CHANNELS)
    try:
        text, host, gpus = os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"], os.environ.get("SM_NUM_GPUS", "0")
    except KeyError as error:
        raise ConfigError(
            f"launch=sagemaker: the environment variable {error.args[0]} is not set; SageMaker sets it in its training "
            "jobs. Anywhere else, type launch=default"
        ) from error
    hosts = json.loads(text)
    values: dict[str, str | int | None] = {
        "nnodes": len(hosts),
        "workers_per_host": max(int(gpus), 1),
        "node_rank": hosts.index(host),
        "master_addr": hosts[0] if len(hosts) > 1 else "127.0.0.1",
        "interface": os.environ.get("SM_NETWORK_INTERFACE_NAME") if len(hosts) > 1 else None,
    }
    return values[name]
