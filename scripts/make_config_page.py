"""Writes docs/config.md from the comments of the yaml files: python scripts/make_config_page.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from metalearn.config.help import config_page  # noqa: E402 (the path comes first)

if __name__ == "__main__":
    (ROOT / "docs/config.md").write_text(config_page())
