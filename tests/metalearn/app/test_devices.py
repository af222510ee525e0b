"""The device of a rank, and why it is no GPU where there seems to be one."""

from pathlib import Path

import pytest
import torch

from metalearn.app import devices
from metalearn.errors import ConfigError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver and no card, whose torch has CUDA and sees no GPU."""
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02")
    return tmp_path


def test_a_machine_without_a_driver_is_no_reason(machine: Path) -> None:
    (machine / "version").unlink()
    assert devices.why_no_gpu() is None
    assert devices.described("auto") == {"type": "cpu"}


def test_a_driver_without_a_card_is_a_container_without_gpus(machine: Path) -> None:
    assert devices.described("auto") == {"type": "cpu", "why": devices.why_no_gpu()}
    assert devices.described("cpu") == {"type": "cpu"}  # as was asked for
    with pytest.raises(ConfigError, match=r"torch sees no GPU here: .*docker run --gpus all; type device=auto"):
        devices.check_device("cuda", "float32")


def test_a_torch_without_cuda_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is one without CUDA" in str(devices.why_no_gpu())


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_cards_that_are_hidden_are_named(hidden: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert f"CUDA_VISIBLE_DEVICES={hidden} hides all cards" in str(devices.why_no_gpu())


def test_an_old_driver_is_named_as_torch_names_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvidia0").touch()

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert devices.why_no_gpu() == "The NVIDIA driver on your system is too old (found version 11040). Please update"
