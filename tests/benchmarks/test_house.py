"""The size of the house, counted by hand."""

from pathlib import Path

from benchmarks.house import counted

TEXT = '''"""A file."""

import math


def _root(x: float) -> float:
    """Its root."""
    # A reason.
    if x < 0:
        raise ValueError("x")
    try:
        return math.sqrt(x)  # another reason
    except OverflowError:
        return 0.0


print(_root(1.0))
'''


def test_lines_guards_and_uses_are_those_of_a_hand_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(TEXT)
    found = counted(tmp_path / "a.py")
    assert (found.lines, found.filled, found.code, found.comments) == (17, 12, 9, 2)
    assert (found.raises, found.guards, found.functions) == (1, 4, [9])
    assert found.names == ["_root"] and found.uses["_root"] == 1
