"""In-context learners: attention over a set beside torch's, and what a set and a query must not depend on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from metalearn.algorithms.in_context import in_context, label_tokens
from metalearn.models.mlp import mlp
from metalearn.nn.attention import draw_transformer, set_attention, transformer
from metalearn.types import Algorithm, Batch, Episode, Params
from tests.metalearn.learners import FLOAT64, LEARNERS, network, random, start_of, tasks


def of_numbers() -> Algorithm:
    return in_context(model=mlp(inputs=1, outputs=2, hidden=(6,), activation="tanh"), width=8, heads=2, layers=2)


def numbers(count: int, *, seed: int) -> Batch:
    return Batch(random(3, count, 1, seed=seed), random(3, count, 2, seed=seed + 1))


def mask_of(samples: int, known: int) -> Tensor:
    """Whom each sample sees: the known samples and itself."""
    mask = torch.eye(samples, dtype=torch.bool)
    mask[:, :known] = True
    return mask


@pytest.mark.parametrize("known", [0, 1, 4, 7])
def test_attention_is_torchs_under_a_mask(known: int) -> None:
    q, k, v = (random(2, 3, 7, 5, seed=seed) for seed in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(7, known))
    torch.testing.assert_close(set_attention(q, k, v, known), expected, rtol=0, atol=1e-12)


def drawn(width: int, layers: int) -> Params:
    values = draw_transformer(width, layers, Generator().manual_seed(0)).items()
    return {name: value.double() + 0.1 * random(*value.shape, seed=i) for i, (name, value) in enumerate(values)}


def test_the_transformer_is_torchs_with_the_same_weights() -> None:
    params, x = drawn(8, 2), random(3, 6, 8, seed=1)
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True, dtype=FLOAT64)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8, dtype=FLOAT64), enable_nested_tensor=False)
    zeros = {"self_attn.in_proj_bias": torch.zeros(24), "self_attn.out_proj.bias": torch.zeros(8)}
    names = {
        "attention.in": "self_attn.in_proj_weight", "attention.out": "self_attn.out_proj.weight", "mlp.in": "linear1",
        "mlp.out": "linear2",
    }  # fmt: skip
    weights = {"norm.weight": params["norm.weight"], "norm.bias": params["norm.bias"]}
    for number in range(2):
        weights |= {f"layers.{number}.{name}": value for name, value in zeros.items()}
        for name, value in params.items():
            block, _, rest = name.partition(".")
            if block == f"block{number}":
                for our, their in names.items():
                    rest = rest.replace(our, their)
                weights[f"layers.{number}.{rest}"] = value
    theirs.load_state_dict(weights)
    expected = theirs(x, mask=~mask_of(6, 4))
    torch.testing.assert_close(transformer(params, x, context_size=4, heads=2, layers=2), expected, rtol=0, atol=1e-12)


def test_the_gradients_are_finite_differences() -> None:
    q, k, v = (random(2, 1, 4, 2, seed=seed).requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(lambda *parts: set_attention(*parts, 2), (q, k, v))
    params = {name: value.requires_grad_() for name, value in drawn(4, 1).items()}
    x = random(1, 3, 4, seed=1).requires_grad_()

    def outputs(x: Tensor, *values: Tensor) -> Tensor:
        return transformer(dict(zip(params, values, strict=True)), x, context_size=2, heads=2, layers=1)

    assert torch.autograd.gradcheck(outputs, (x, *params.values()))


def test_the_scores_of_a_set_begin_symmetric() -> None:
    """Queries and keys are equal at first, so that a sample attends to those that are like it."""
    queries, keys, values = draw_transformer(8, 1, Generator().manual_seed(0))["block0.attention.in"].chunk(3)
    assert torch.equal(queries, keys) and not torch.equal(queries, values)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_prediction_depends_on_no_other_query(kind: str) -> None:
    """Other queries in the same places change no bit of it; without other queries it is the same to 1e-12."""
    if kind == "numbers":
        learner, support, queries, others = of_numbers(), numbers(5, seed=1), random(3, 4, 1, seed=3), 9.0
    else:
        learner, episode, others = LEARNERS["in_context"](network(transductive=False)), tasks(3), 2.0
        support, queries = episode.support, episode.query.x
    predict = learner.adapt(start_of(learner), support)
    first = predict(queries)[:, :1]
    replaced = torch.cat([queries[:, :1], others + queries[:, 1:].flip(1)], dim=1)
    assert torch.equal(predict(replaced)[:, :1], first)
    assert (predict(replaced)[:, 1:] - predict(queries)[:, 1:]).abs().max() > 1e-3
    torch.testing.assert_close(predict(queries[:, :1]), first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_labels_count_and_the_order_of_the_support_does_not(kind: str) -> None:
    if kind == "numbers":
        learner, support, queries = of_numbers(), numbers(6, seed=1), random(3, 4, 1, seed=3)
    else:
        learner, episode = LEARNERS["in_context"](network()), tasks(3)
        support, queries = episode.support, episode.query.x
    params, order = start_of(learner), [4, 2, 0, 5, 1, 3]
    expected = learner.adapt(params, support)(queries)
    turned = Batch(support.x[:, order], support.y[:, order])
    torch.testing.assert_close(learner.adapt(params, turned)(queries), expected, rtol=0, atol=1e-12)
    mislabelled = learner.adapt(params, support._replace(y=support.y[:, order]))(queries)
    assert (mislabelled - expected).abs().max() > 1e-3


def test_what_a_token_is_told_of_its_label() -> None:
    classes = Batch(torch.zeros(1, 3, 1), torch.tensor([[2, 0, 1]]))
    assert label_tokens(classes, 2, 3, FLOAT64).tolist() == [
        [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    ]
    values = Batch(torch.zeros(1, 2, 1), torch.tensor([[[0.5], [-4.0]]]))
    assert label_tokens(values, 1, 1, torch.float32).tolist() == [[[0.5, 0], [-4.0, 0], [0, 1]]]


def test_it_learns_lines_through_two_points() -> None:
    """y = a x + b: an answer of zero has the error 1 + 1/3, the meta-learner soon far less on new lines."""
    learner = in_context(model=mlp(inputs=1, outputs=1, hidden=(16,)), width=16, heads=2, layers=2)
    params = {name: value.requires_grad_() for name, value in learner.init(Generator().manual_seed(0)).items()}
    outer = torch.optim.Adam(params.values(), lr=3e-3)

    def lines(seed: int) -> Episode:
        x = 2 * torch.rand(64, 6, 1, generator=Generator().manual_seed(seed)) - 1
        a, b = random(2, 64, 1, 1, seed=seed).float()
        y = a * x + b
        return Episode(Batch(x[:, :2], y[:, :2]), Batch(x[:, 2:], y[:, 2:]))

    for step in range(100):
        grads = learner.meta_grad({k: v.detach() for k, v in params.items()}, lines(step), step).grads
        for name, value in params.items():
            value.grad = grads[name] / 64
        outer.step()
    end = {name: value.detach() for name, value in params.items()}
    assert learner.evaluate(end, lines(1000))["mse"].mean() < 0.6


def test_targets_of_another_size_are_refused() -> None:
    learner, support = of_numbers(), Batch(random(1, 4, 1, seed=1), random(1, 4, 3, seed=2))
    with pytest.raises(ValueError, match=r"type model\.outputs=3"):
        learner.adapt(start_of(learner), support)(support.x)
