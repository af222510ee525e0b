"""Imports what trials need, so that a trial that is forked from here starts at once. Computes nothing, asks no GPU."""

import importlib
import pkgutil

import matplotlib
import torch.utils.tensorboard
import torchvision

import metalearn.algorithms
import metalearn.models
import metalearn.tasks
from metalearn.app import evaluation, ranks

matplotlib.use("Agg")
import matplotlib.pyplot

__all__ = ["evaluation", "ranks", "torch", "torchvision"]

for package in (metalearn.algorithms, metalearn.models, metalearn.tasks):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
for name in ("metalearn.training.optimizers", "metalearn.algorithms.common.inner", "distributed.strategies.ddp",
             "distributed.strategies.rpc_autograd", "distributed.strategies.split"):  # fmt: skip
    importlib.import_module(name)
