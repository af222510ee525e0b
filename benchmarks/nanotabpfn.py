"""nanoTabPFN, trained by its own recipe on our prior, as a learner of tables.

    pip install schedulefree
    python -m benchmarks.nanotabpfn FOLDER OUTPUT.pt --minutes 8

FOLDER is a checkout of github.com/automl/nanoTabPFN. Its recipe (train.py): width 96, 4 heads, MLP 192, 3 blocks,
AdamWScheduleFree at 0.004, 32 tables a step, gradients of at most norm 1; here with ten outputs, and on
`dataset=table_prior`, whose 32 tables of a step have one shape. Gaps of a table are filled with the means of its
columns. The minutes are CPU time of the whole step, with the drawing of the tables, as those of our trainings are.
`benchmarks.pfn_tables --beside FOLDER OUTPUT.pt` then measures it beside the others.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.config.build import build
from metalearn.config.compose import compose_config

TABLES, CLASSES = 32, 10


def model_of(folder: Path) -> Any:
    """Its module model.py."""
    sys.path.insert(0, str(folder))
    return importlib.import_module("model")


def network_of(folder: Path, outputs: int) -> Any:
    """Its network, at the size of its recipe."""
    return model_of(folder).NanoTabPFNModel(96, 4, 192, 3, outputs)


def filled(x: Tensor) -> Tensor:
    """Tables [t, n, d] with the mean of its column in place of what is missing, or 0 where all is."""
    return torch.where(x.isnan(), x.nanmean(dim=1, keepdim=True).nan_to_num(), x)


def train(folder: Path, output: Path, minutes: float) -> None:
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(0)
    keys = ["experiment=pfn_tables", f"dataset.group={TABLES}"]
    source = build(compose_config(keys).config, "dataset")
    network, began, step = network_of(folder, CLASSES), time.process_time(), 0
    optimizer = AdamWScheduleFree(network.parameters(), lr=4e-3, weight_decay=0.0)
    optimizer.train()
    while (spent := time.process_time() - began) < 60 * minutes:
        support, query = source.episodes("train", torch.arange(TABLES * step, TABLES * (step + 1)))
        x = filled(torch.cat([support.x, query.x], dim=1))
        logits = network((x, support.y.float()), train_test_split_index=support.y.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), query.y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"step {step}  loss {float(loss.detach()):.4f}  {spent:.0f} s of a core", flush=True)
    optimizer.eval()
    torch.save(network.state_dict(), output)


class NanoTabPFN:
    """Its own estimator, with the weights of `train`, for labels of any kind, and rows that `numbers` makes numbers."""

    def __init__(self, folder: Path, weights: Path, numbers: Any) -> None:
        network = network_of(folder, CLASSES)
        network.load_state_dict(torch.load(weights, weights_only=True))
        made = model_of(folder).NanoTabPFNClassifier
        self._numbers, self._estimator = numbers, made(network.eval(), torch.device("cpu"))

    def fit(self, x: Any, y: Any) -> "NanoTabPFN":
        self.classes_, places = np.unique(y, return_inverse=True)
        self._estimator.fit(self._numbers.fit_transform(x), places)
        return self

    def predict_proba(self, x: Any) -> Any:
        return self._estimator.predict_proba(self._numbers.transform(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of nanoTabPFN")
    parser.add_argument("output", type=Path, help="where its weights go")
    parser.add_argument("--minutes", type=float, default=8.0, help="CPU time of the training (default: 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.folder, options.output, options.minutes)


if __name__ == "__main__":
    main()
