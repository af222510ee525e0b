"""Run by a Python that has easyfsl, which this program does not need: answers from features, by its methods.

Each file of sys.argv has `known` [n, d], `labels` [n] and `asked` [m, d]. Prints JSON: for each, answers by
method.
"""

import json
import sys

import numpy as np
import torch
from easyfsl.methods import Finetune, PrototypicalNetworks, SimpleShot  # type: ignore[import-not-found]

found = []
for path in sys.argv[1:]:
    with np.load(path, allow_pickle=False) as file:
        known, labels, asked = (torch.from_numpy(file[name]) for name in ("known", "labels", "asked"))
    options = {"feature_centering": known.mean(dim=0), "feature_normalization": 2.0}
    methods = {
        "PrototypicalNetworks": PrototypicalNetworks(),
        "SimpleShot": SimpleShot(**options),
        "Finetune": Finetune(**options),
    }
    answers = {}
    for name, method in methods.items():
        method.process_support_set(known, labels)
        answers[name] = method(asked).argmax(dim=1).tolist()
    found.append(answers)
print(json.dumps(found))
