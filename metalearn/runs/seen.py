"""The classes that parameters have been trained and validated on. Every checkpoint and published model has them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

KEY = "seen_classes"
"""Of meta.json and of model.json."""

MOST_SAVED = 200_000
"""Classes that are saved: of so many, the JSON is still read again (`metalearn.storage.files.LARGEST_JSON`)."""


class Seen(NamedTuple):
    """The identities of the classes (see `metalearn.types.NamesClasses`) in training and in validation. `complete` is
    false if those of the training, or of what it began from, are not known."""

    train: frozenset[str] = frozenset()
    val: frozenset[str] = frozenset()
    complete: bool = True

    def joined(self, other: "Seen") -> "Seen":
        """The classes of both."""
        return Seen(self.train | other.train, self.val | other.val, self.complete and other.complete)


class Overlap(NamedTuple):
    """Of `classes` classes to evaluate on, how many were trained on, and how many only validated on."""

    trained_on: int
    validated_on: int
    classes: int


UNKNOWN_OVERLAP = {"trained_on": None, "validated_on": None, "classes": None, "complete": False}
"""What is reported of classes without identities."""


def is_count(value: object) -> bool:
    """Whether a value from elsewhere is what is reported of seen classes."""
    return (
        isinstance(value, dict)
        and value.keys() == UNKNOWN_OVERLAP.keys()
        and all(count is None or isinstance(count, int) for count in value.values())
    )


def overlap(seen: Seen, split: str, identities: frozenset[str]) -> Overlap:
    """What has been seen of the classes of a split, `test` or `val`. Validation classes may be validated on again."""
    trained_on = identities & seen.train
    validated_on = identities & seen.val - trained_on if split == "test" else ()
    return Overlap(len(trained_on), len(validated_on), len(identities))


def to_meta(seen: Seen) -> dict[str, Any]:
    """Seen classes as plain values: few, however many classes there are. More than `MOST_SAVED` are saved as not
    known."""
    if len(seen.train) + len(seen.val) > MOST_SAVED:
        seen = Seen(complete=False)
    return {"train": " ".join(sorted(seen.train)), "val": " ".join(sorted(seen.val)), "complete": seen.complete}


def from_meta(meta: Mapping[str, Any]) -> Seen:
    """The seen classes in the content of meta.json or model.json; nothing, and not complete, if an earlier version
    wrote it."""
    saved = meta.get(KEY)
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), str) for name in ("train", "val")):
        return Seen(complete=False)
    return Seen(frozenset(saved["train"].split()), frozenset(saved["val"].split()), saved.get("complete") is True)
