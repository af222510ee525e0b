"""The device of a rank, and why it is no GPU where there seems to be one."""

from pathlib import Path

import pytest
import torch

from metalearn.app import parts
from metalearn.errors import ConfigError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver, whose torch has CUDA and sees no GPU."""
    monkeypatch.setattr(parts, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02")
    return tmp_path


def test_a_machine_without_a_driver_is_no_reason(machine: Path) -> None:
    (machine / "version").unlink()
    assert parts.described("auto") == {"type": "cpu"}


def test_a_torch_without_cuda_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is one without CUDA" in str(parts.why_no_gpu())


def test_an_old_driver_is_named_as_torch_names_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    reason = "The NVIDIA driver on your system is too old (found version 11040). Please update"
    assert parts.described("auto") == {"type": "cpu", "why": reason}
    assert parts.described("cpu") == {"type": "cpu"}  # as was asked for
    with pytest.raises(ConfigError, match=r"^device=cuda: .*too old"):
        parts.check_device("cuda", "float32")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As our launcher asks, or torchrun has started them, which knows no device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="2 GPUs for 4 ranks; type workers=2 for each host"):
        parts.check_device("cuda", "float32", 4)
    for device, ranks in (("cuda", 2), ("auto", 4), ("cpu", 4)):
        parts.check_device(device, "float32", ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="2 GPUs for 3 ranks"):
        parts.check_device("cuda", "float32")


@pytest.mark.parametrize(("taken", "lines"), [(0.5, 0), (30, 1)])
def test_a_gpu_in_use_is_named(
    taken: float, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process's part, 8 GiB, does not count."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((80 - 8 - taken) * gib), 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * gib)
    parts.warn_of_other_users(torch.device("cuda", 1))
    assert caplog.text.count("cuda:1: other processes hold 30 of its 80 GiB") == lines
