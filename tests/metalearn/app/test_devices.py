"""The device of a rank, and why it is no GPU where there seems to be one."""

from pathlib import Path

import pytest
import torch

from metalearn.app import preflight
from metalearn.errors import ConfigError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver, whose torch has CUDA and sees no GPU."""
    monkeypatch.setattr(preflight, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02")
    return tmp_path


def test_a_machine_without_a_driver_is_no_reason(machine: Path) -> None:
    (machine / "version").unlink()
    assert preflight.described("auto") == {"type": "cpu"}


def test_a_torch_without_cuda_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is one without CUDA" in str(preflight.why_no_gpu())


def test_an_old_driver_is_named_as_torch_names_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    reason = "The NVIDIA driver on your system is too old (found version 11040). Please update"
    assert preflight.described("auto") == {"type": "cpu", "why": reason}
    assert preflight.described("cpu") == {"type": "cpu"}  # as was asked for
    with pytest.raises(ConfigError, match=r"^device=cuda: .*too old"):
        preflight.check_device("cuda", "float32")
