"""Files that are there whole or not at all."""

from pathlib import Path


def put(path: Path, text: str) -> None:
    """Writes a file, or replaces it: a reader never finds half of it, nor does one who was killed leave it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
