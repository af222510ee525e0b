"""Where a result comes from: date, versions, hardware and commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_CODE = ("train.py", "metalearn", "distributed", "conf")
_SECONDS = 10.0


def made_with() -> dict[str, str]:
    """Names with values, for people."""
    versions = {"metalearn": own_version()} | {name: version_of(name) for name in ("torch", "numpy")}
    versions["Python"] = platform.python_version()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join(f"{name} {it or '(not installed)'}" for name, it in versions.items()),
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "commit": commit(ROOT) or "not known: no checkout",
    }


def own_version() -> str | None:
    """This program's version; None: it runs from a checkout that is not installed."""
    return version_of("metalearn-train")  # the package index has another project of the name metalearn


def version_of(package: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model name, if the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(root: Path) -> str | None:
    """The checked-out commit, with a + if its code has changed since; None if there is no git."""
    if not (root / ".git").exists():  # a package may be installed below another repository
        return None
    try:
        head, changes = (
            subprocess.check_output(["git", *words], cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=_SECONDS)  # noqa: S607
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", *_CODE])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + "+" * bool(changes)
