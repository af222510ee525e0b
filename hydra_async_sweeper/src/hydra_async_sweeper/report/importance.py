"""How much each parameter matters for the objective."""

import logging
import math
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

    from hydra_async_sweeper.study import Study


_FEWEST, _FEWEST_TOP = 10, 5
"""Importances need so many completed trials; at least so many of them count as the top ones."""

log = logging.getLogger("hydra_async_sweeper")


def importances(study: "Study") -> dict[str, float] | None:
    """The importances of a study's parameters, as `importances_of` computes them."""
    return importances_of(study.optuna_study())


def importances_of(study: "optuna.Study") -> dict[str, float] | None:
    """How much each parameter decides whether a trial is among the best tenth, with the sum 1, the largest first.

    None with fewer than 10 completed trials, with several objectives, or where no parameter matters.
    Watanabe et al. 2023, "PED-ANOVA" (arXiv 2304.10255). With few trials the best five take the place of the tenth.
    """
    import optuna

    completed = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(study.directions) > 1 or len(completed) < _FEWEST:
        return None
    top = max(0.1, _FEWEST_TOP / len(completed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=top)
            raw = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
        except Exception as error:  # a plot less must not end a sweep
            log.warning("no importances: %s: %s", type(error).__name__, error)
            return None
    total = sum(raw.values())
    if not (math.isfinite(total) and total > 0):
        return None
    ranked = sorted(raw.items(), key=lambda item: (-item[1], item[0]))
    return {key: value / total for key, value in ranked}
