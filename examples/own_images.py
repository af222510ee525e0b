"""Pictures of one's own, named by what a run has learned.

python examples/own_images.py MODEL LABELLED OTHERS

MODEL is a run folder, a checkpoint or a published model. LABELLED has a folder for each class, with a few pictures
each; OTHERS has the pictures to be named.
"""

import sys
from pathlib import Path

import metalearn

PICTURES = (".png", ".jpg", ".jpeg")


def pictures_in(folder: str) -> list[Path]:
    """All pictures below a folder."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in PICTURES)


def main(model: str, labelled: str, others: str) -> None:
    """Prints the name of each picture in `others`, and how sure the learner is."""
    support = pictures_in(labelled)
    task = metalearn.load(model).adapt(support, [path.parent.name for path in support])
    queries = pictures_in(others)
    for path, (label, probabilities) in zip(queries, task.predict(queries), strict=True):
        print(f"{path}: {label} ({probabilities[label]:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
