"""Priors: rules that draw tasks. A model that is trained on their tasks learns to infer, for any such task, what the
rule would have drawn (prior-fitted networks, Müller et al. 2022, arXiv 2112.10510)."""

from metalearn.tasks.priors.source import Prior, PriorTasks, Shape, mixture, of_tables, tasks_of

__all__ = ["Prior", "PriorTasks", "Shape", "mixture", "of_tables", "tasks_of"]
