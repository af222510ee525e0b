"""The classes that parameters have been trained and validated on. Every checkpoint and published model has them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

KEY = "seen_classes"
"""The key of the seen classes in meta.json."""

SEEN_DRAWERS = "seen_drawers"
"""The key of the names of drawers that a test holds back, and the training has shown, in result.json."""


class Seen(NamedTuple):
    """The identities (see `metalearn.types.NamesClasses`) of the classes in training and in validation. `complete` is
    false if some are not known: the training's, or those of the run that it began from. `drawers` are the known ones of
    the training (see `metalearn.types.NamesDrawers`)."""

    train: frozenset[str] = frozenset()
    val: frozenset[str] = frozenset()
    complete: bool = True
    drawers: frozenset[str] = frozenset()

    def joined(self, other: "Seen") -> "Seen":
        """The classes and drawers of both."""
        complete = self.complete and other.complete
        return Seen(self.train | other.train, self.val | other.val, complete, self.drawers | other.drawers)


class Overlap(NamedTuple):
    """Counts of classes to evaluate on: all of them, those trained on, and those only validated on."""

    trained_on: int
    validated_on: int
    classes: int


UNKNOWN_OVERLAP = {"trained_on": None, "validated_on": None, "classes": None, "complete": False}
"""The report on classes that have no identities."""


def overlap(seen: Seen, split: str, identities: frozenset[str]) -> Overlap:
    """Counts the classes of a split, `test` or `val`, that were seen. Validation classes may be validated on again."""
    trained_on = identities & seen.train
    validated_on = identities & seen.val - trained_on if split == "test" else ()
    return Overlap(len(trained_on), len(validated_on), len(identities))


def to_meta(seen: Seen) -> dict[str, Any]:
    """Seen classes as plain values."""
    # Texts, not lists: indented JSON would give each of a hundred thousand classes a line.
    texts = {name: " ".join(sorted(getattr(seen, name))) for name in ("train", "val", "drawers")}
    return {"complete": seen.complete} | {name: text for name, text in texts.items() if text or name != "drawers"}


def from_meta(meta: Mapping[str, Any]) -> Seen:
    """The seen classes in the content of meta.json; nothing, and not complete, if it says none."""
    saved = meta.get(KEY)
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), str) for name in ("train", "val")):
        return Seen(complete=False)
    drawers = saved.get("drawers", "")
    return Seen(
        frozenset(saved["train"].split()), frozenset(saved["val"].split()), saved.get("complete") is True,
        frozenset(drawers.split() if isinstance(drawers, str) else ()),
    )  # fmt: skip
