"""Whether a learner is evaluated on classes that it has not seen, as few-shot learning wants it."""

import logging
from collections.abc import Mapping
from typing import Any

from metalearn.errors import ConfigError
from metalearn.runs.metrics import KEY, SEEN_DRAWERS, UNKNOWN_OVERLAP, Seen, overlap
from metalearn.tasks.common.identities import drawers_of, identities_of
from metalearn.tasks.common.pictures import first_few
from metalearn.types import TaskSource

log = logging.getLogger("metalearn")

REFUSE, REPORT = "refuse", "report"

UNKNOWN = (
    "the identities of its training classes are not all known (its dataset does not name them, or it began from "
    "pretrained weights or another checkpoint without them), so it cannot be checked whether "
    "test classes are among them"
)


def seen_in(source: TaskSource, steps: int) -> Seen:
    """What a training of so many steps on this source sees. It is not complete if the source has classes and does not
    name them. Without steps, a training only validates."""
    train, val = (identities_of(source, split) for split in ("train", "val"))
    complete = train is not None or not steps or source.classes("train") is None
    drawers = frozenset(drawers_of(source, "train")) if steps else frozenset()
    return Seen(train if train and steps else frozenset(), val or frozenset(), complete, drawers)


def check_unseen(seen: Seen, source: TaskSource, split: str, choice: str) -> dict[str, Any]:
    """Checks that no class of the tasks of a split has been seen.

    Neither training tasks nor plain samples are checked: they are of known classes on purpose.

    Args:
        seen: what the parameters have been trained and validated on.
        source: where the tasks come from.
        split: the split that the tasks are of.
        choice: `refuse`, or `report`, which allows classes that have been seen.

    Returns:
        What result.json says of it: with `report`, `seen_classes`; and `seen_drawers`, if it holds back drawers whose
        pictures the training has shown.

    Raises:
        ConfigError: classes have been seen, and `choice` is `refuse`.
    """
    if split == "train" or source.unit(split) == "samples":
        return {}
    drawers = seen_drawers(seen, source, split)
    shown: dict[str, Any] = {SEEN_DRAWERS: drawers} if drawers else {}
    identities = identities_of(source, split)
    if identities is None:
        has_classes = source.classes(split) is not None
        return {KEY: UNKNOWN_OVERLAP} if choice == REPORT and has_classes else {}
    found = overlap(seen, split, identities)
    if choice == REPORT:
        return shown | {KEY: found._asdict() | {"complete": seen.complete}}
    if found.trained_on or found.validated_on:
        also = f", and {found.validated_on} more were validated on" if found.validated_on else ""
        raise ConfigError(
            f"dataset: {found.trained_on} of its {found.classes} {split} classes were trained on before{also}; type "
            f"the dataset and dataset.split of the training, or {KEY}={REPORT} to evaluate on them and count them in "
            "the result"
        )
    return shown


def seen_drawers(seen: Seen, source: TaskSource, split: str) -> list[str]:
    """The names of the drawers whom a test holds back, and whose pictures the training has shown."""
    held = drawers_of(source, split) if split == "test" else {}
    return sorted(name for key, name in held.items() if key in seen.drawers)


def warn_of_seen_drawers(counted: Mapping[str, Any]) -> None:
    """Says so if `check_unseen` has found any. Nothing is refused: with the same test, they show what unseen drawers
    cost."""
    if names := counted.get(SEEN_DRAWERS):
        log.warning(
            "dataset.held_drawers: the training has shown pictures by %s, so this test is none of unseen drawers; "
            "result.json names them as %s", first_few(names), SEEN_DRAWERS,
        )  # fmt: skip
