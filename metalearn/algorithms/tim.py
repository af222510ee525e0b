"""TIM, Boudiaf et al. 2020 (arXiv 2008.11297), by gradient descent ("TIM-GD").

The network is trained as in supervised learning. A task has a vector w_k for each class, at first the mean of its
support features. The probability of class k for features z, of length 1, is a softmax over −τ/2 ‖z − w_k‖². All
queries of a task together move these vectors, by Adam on

    λ · cross-entropy of the support set − H(Y) + α · H(Y | X),

whatever the `loss` of training and evaluation.

H(Y) is the entropy of the mean of the queries' probabilities: it makes the classes equally frequent. H(Y | X) is the
mean of the entropies of each query: it makes predictions sure. So the learner is transductive, whatever the model.

Give all queries of a task in one call of `predict`. Where classes are not equally frequent the result is worse
(Veilleux et al. 2021, arXiv 2204.11181). A single query gets the nearest mean.

Differences from the authors' code:

- Theirs takes 1000 steps of rate 0.0001, ours 100 of 0.001, which take the vectors as far.
- Their "TIM-ADM" updates vectors and assignments in closed form, near to the minimum of the loss; descent is the loss
  itself.
- Their features come from ResNet-18 and others, trained with label smoothing, with running statistics.
"""

from collections.abc import Iterator

from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, squared_distances
from metalearn.algorithms.common.inner import adam, check_descent, descent, one_hot, pretrained
from metalearn.algorithms.common.losses import objective
from metalearn.errors import positive, real_number
from metalearn.types import Algorithm, Batch, Model, Params

VECTORS = "vectors"  # the classes' vectors of a task, [t, ways, d]
ADAM = adam(beta1=0.9, beta2=0.999, eps=1e-8)  # the authors'


def tim(
    *, model: Model, inner_lr: float, eval_steps: int, temperature: float, support_weight: float,
    conditional_weight: float, centred: bool = False,
) -> Algorithm:  # fmt: skip
    """Supervised learning, then the largest mutual information between the queries of a task and their classes. Raises
    ValueError for a rate or temperature that is not above 0, a negative weight or number of steps, a `centred` that is
    no bool, or a model without a linear head.

    Args:
        model: the network; its head has an output for every training class.
        inner_lr: the rate of Adam's steps on a task.
        eval_steps: Adam's steps in validation and test. A single query takes none: it has the nearest mean.
        temperature: τ, the factor of the squared distances.
        support_weight: λ, the weight of the support set's loss.
        conditional_weight: α, the weight of the entropy of each query's probabilities.
        centred: subtract the mean of the training features from all features.
    """
    check_descent(inner_lr=inner_lr, eval_steps=eval_steps)
    positive(temperature=temperature)
    real_number("support_weight", support_weight, at_least=0)
    real_number("conditional_weight", conditional_weight, at_least=0)

    def logits(z: Tensor, adapted: Params) -> Tensor:
        return -temperature / 2 * squared_distances(z, adapted[VECTORS], by_products=True)

    def path(examples: Tensor, queries: Tensor, support: Batch, steps: int) -> Iterator[Tensor]:
        def loss(adapted: Params, step: int) -> Tensor:
            marginal, conditional = entropies(logits(queries, adapted))
            of_support = objective(logits(examples, adapted), support.y)["loss"]
            return support_weight * of_support - marginal + conditional_weight * conditional

        start = {VECTORS: class_means(examples, one_hot(support, examples.dtype))}
        rate = inner_lr if queries.shape[1] > 1 else 0.0  # steps would make a single query as uncertain as it can be
        for adapted in descent(loss, start, optimizer=ADAM, rate=rate, steps=steps, order=0):
            yield logits(queries, adapted)

    return pretrained(model, path, eval_steps=eval_steps, centred=centred)._replace(transductive=True)


def entropies(logits: Tensor) -> tuple[Tensor, Tensor]:
    """H(Y) and H(Y | X), in nats, of each task [t], for the logits [t, n, ways] of its queries."""
    logs = logits.log_softmax(dim=2)
    mean_logs = logs.logsumexp(dim=1).log_softmax(dim=1)
    return -(mean_logs.exp() * mean_logs).sum(dim=1), -(logs.exp() * logs).sum(dim=2).mean(dim=1)
