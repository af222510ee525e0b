"""The device that a rank computes on, and why it is not a GPU where there seems to be one."""

import os
from pathlib import Path
from typing import Any

import torch

from metalearn.errors import ConfigError

DRIVER, DEVICES = Path("/proc/driver/nvidia/version"), Path("/dev")


def check_device(name: str, precision: str) -> None:
    """Raises ConfigError where the config asks for a GPU, or for what only a GPU can do, and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        reason = why_no_gpu()
        raise ConfigError(
            f"device=cuda: torch sees no GPU here{f': {reason}' if reason else ''}; type device=auto or device=cpu"
        )
    if precision == "tf32" and own_device(name).type == "cpu":
        raise ConfigError("precision=tf32: is a mode of NVIDIA GPUs; type precision=float32, or precision=bf16")


def own_device(name: str) -> torch.device:
    """This rank's device. `auto` takes a GPU where there is one, chosen by the local rank."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def why_no_gpu() -> str | None:
    """Why torch sees no GPU on a machine that seems to have one, and what to do; None where nothing tells of one."""
    cards = sorted(DEVICES.glob("nvidia[0-9]*"))
    if torch.cuda.is_available() or not (cards or DRIVER.exists()):
        return None
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, and this torch is one without CUDA; install one with CUDA"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and not visible.strip("- 1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides all cards; unset it"
    if not cards:
        return "there is an NVIDIA driver, and no card is visible; in Docker, type docker run --gpus all"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "there is a card, and torch counts none"


def described(name: str) -> dict[str, Any]:
    """The device for result.json: its `type`; a GPU's `name`; and `why` it is no GPU, with `device=auto`."""
    device = own_device(name)
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    reason = why_no_gpu() if name == "auto" else None
    return {"type": "cpu", **({"why": reason} if reason else {})}
