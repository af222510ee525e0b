"""Whether a learner is evaluated on classes that it has not seen, as few-shot learning wants it."""

from typing import Any

from metalearn.errors import ConfigError
from metalearn.runs.seen import KEY, Seen, overlap
from metalearn.tasks.common.identities import identities_of
from metalearn.types import TaskSource

REFUSE, REPORT = "refuse", "report"

UNKNOWN = (
    "an earlier version saved it, or what it began from, without the identities of its training classes, so it cannot "
    "be checked whether test classes are among them"
)


def seen_in(source: TaskSource) -> Seen:
    """What a training on this source sees; nothing if the source does not name its classes."""
    train, val = (identities_of(source, split) or frozenset() for split in ("train", "val"))
    return Seen(train, val)


def check_unseen(seen: Seen, source: TaskSource, split: str, choice: str) -> dict[str, Any]:
    """Checks that no class of the tasks of a split has been seen.

    Neither training tasks nor plain samples are checked: they are of known classes on purpose.

    Args:
        seen: what the parameters have been trained and validated on.
        source: where the tasks come from.
        split: the split that the tasks are of.
        choice: `refuse`, or `report`, which allows classes that have been seen.

    Returns:
        What result.json says of it: with `report`, `seen_classes`.

    Raises:
        ConfigError: classes have been seen, and `choice` is `refuse`.
    """
    if split == "train" or source.unit(split) == "samples":
        return {}
    identities = identities_of(source, split)
    if identities is None:
        return {}
    found = overlap(seen, split, identities)
    if choice == REPORT:
        return {KEY: found._asdict() | {"complete": seen.complete}}
    if found.trained_on or found.validated_on:
        also = f", and {found.validated_on} more were validated on" if found.validated_on else ""
        raise ConfigError(
            f"dataset: {found.trained_on} of its {found.classes} {split} classes were trained on before{also}; type "
            f"the dataset and dataset.split of the training, or {KEY}={REPORT} to evaluate on them and count them in "
            "the result"
        )
    return {}
