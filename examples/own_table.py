"""Learns from a table of one's own, here one that it draws: python examples/own_table.py [STEPS]

Each of 60 shops sells by its own laws: sales = base + a · price + b · weather. From five days of a new shop, the other
days are predicted.
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np

import metalearn


def write_table(file: Path) -> None:
    """Draws 30 days of each shop; a tenth of the weather is missing."""
    rng = np.random.default_rng(0)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["shop", "price", "weather", "sales"])
        for shop in range(60):
            base, a, b = rng.normal(0, 2), rng.normal(-2, 1), rng.normal(1, 1)
            for _ in range(30):
                price, weather = rng.uniform(1, 3), rng.uniform(0, 10)
                sales = base + a * (price - 2) + b * (weather - 5) / 3
                writer.writerow([f"shop {shop}", price, "" if rng.uniform() < 0.1 else weather, sales])


def main(steps: int = 300) -> None:
    """Trains, and evaluates on shops that the training has not seen."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sales.csv"
        write_table(file)
        learned = metalearn.train(
            metalearn.named("maml", inner_lr=0.1, inner_steps=3, eval_steps=3),
            metalearn.named("mlp", inputs=2, outputs=1),
            metalearn.named("table", file=str(file), task="shop", target="sales", missing="mean"),
            optimizer=metalearn.named("adam", lr=0.01), steps=steps, meta_batch_size=10, val_every=50,
        )  # fmt: skip
        by_step = learned.evaluate(count=200)["by_step"]
    print(
        f"mean squared error: {by_step['0']:.3f} before five days of a shop are learned from, {by_step['3']:.3f} after"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
