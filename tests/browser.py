"""Opens pages in headless Chromium, at any width, light and dark."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

WIDTHS = (360, 800, 1600)

# A window is never narrower than 500 pixels; a frame may be.
_FRAME = """<!DOCTYPE html><meta charset="utf-8">
<style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe width="{width}" height="{height}" src="{address}"></iframe><p id="found"></p><script>
onload = () => {{ const page = frames[0].document.documentElement;
  const theme = frames[0].matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const over = cell => cell.scrollWidth > cell.clientWidth + 1 &&
    frames[0].getComputedStyle(cell).overflowX == "visible";
  const cells = [...frames[0].document.querySelectorAll("td, th")].filter(over).length;
  found.textContent = [page.scrollWidth, frames[0].innerWidth, theme, page.scrollHeight, cells].join(" "); }}
</script>"""


def chromium(*options: str, dark: bool, home: Path) -> str:
    """What headless Chromium prints with these options."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
        f"--user-data-dir={home}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def check_fits(page: Path, width: int, *, dark: bool, home: Path, picture: Path | None = None) -> None:
    """Checks that a page is not wider than a screen of this width, nor any text than its cell, and is as dark as asked
    for.

    Args:
        home: a folder for the wrapper and for the browser's own files.
        picture: where a screenshot of the whole page goes.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    wrapper = home / "wrapper.html"
    wrapper.write_text(_FRAME.format(width=width, height=900, address=page.as_uri()))
    window = f"--window-size={max(width, 500)},900"
    shown = chromium("--dump-dom", window, wrapper.as_uri(), dark=dark, home=home / "browser")
    found = re.search(r'id="found">(\d+) (\d+) (\w+) (\d+) (\d+)<', shown)
    assert found is not None, shown
    assert int(found[1]) <= int(found[2]) == width, f"{page} at {width} px is {found[1]} px wide"
    assert found[3] == ("dark" if dark else "light")
    assert found[5] == "0", f"{page} at {width} px: {found[5]} cells of tables run into their neighbours"
    if picture is not None:
        height = min(int(found[4]), 12_000)
        wrapper.write_text(_FRAME.format(width=width, height=height, address=page.as_uri()))
        window = f"--window-size={max(width, 500)},{height}"
        chromium(f"--screenshot={picture}", window, wrapper.as_uri(), dark=dark, home=home / "browser")
