"""Learning while reading, and the network that does: both by other routes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.losses import cross_entropy, measured_by
from metalearn.algorithms.common.metrics import reporting, top_k
from metalearn.algorithms.reading import LOG_RATE, reading
from metalearn.errors import ConfigError, Invalid
from metalearn.models.decoder import decoder
from metalearn.models.mlp import mlp
from metalearn.nn.network import leaves
from metalearn.runs.metrics import figures_of
from metalearn.tasks.chains import chains
from metalearn.tasks.common.episodes import Seeds
from metalearn.types import Algorithm, Batch, Episode, Metric, Model, Params

SYMBOLS, LENGTH, CHUNK = 5, 23, 5
DOUBLE = torch.float64


def network(window: int | None = 4, layers: int = 2) -> Model:
    return decoder(vocabulary=SYMBOLS, width=8, layers=layers, heads=2, hidden=12, window=window)


def documents(count: int = 2) -> Episode:
    source = chains(symbols=SYMBOLS, alpha=0.2, length=LENGTH, eval_length=LENGTH, seeds=Seeds(0, 0))
    support, query = source.episodes("train", torch.arange(count))
    return Episode(Batch(support.x.double(), support.y), Batch(query.x.double(), query.y))


def start_of(algorithm: Algorithm) -> Params:
    return {name: value.to(DOUBLE) for name, value in algorithm.init(torch.Generator().manual_seed(0)).items()}


def by_hand(model: Model, params: Params, task: Batch, inner: list[str], rate: float) -> Tensor:
    """The losses [n] of one document: each chunk by the whole network on all that is before it, whose matrices have
    taken a step on each chunk before. It holds where no attention comes after a matrix that learns."""
    weights = {name: value.clone() for name, value in params.items()}
    losses = []
    for first in range(0, LENGTH, CHUNK):
        end = min(first + CHUNK, LENGTH)
        at = weights | {name: weights[name].detach().requires_grad_() for name in inner}
        outputs = model.apply(at, task.x[:, :end])[0, first:end]
        loss = F.cross_entropy(outputs, task.y[0, first:end], reduction="none")
        losses.append(loss.detach())
        for name, slope in zip(inner, torch.autograd.grad(loss.mean(), [at[n] for n in inner]), strict=True):
            weights[name] = weights[name] - rate * slope
    return torch.cat(losses)


def test_a_chunk_is_predicted_before_it_is_learned_from() -> None:
    model = network()
    algorithm = reading(model=model, chunk=CHUNK, rate=0.7)
    params, episode = start_of(algorithm), documents()
    assert {name for name in params if name.startswith(LOG_RATE)} == {LOG_RATE + "1.mlp.up", LOG_RATE + "1.mlp.down"}
    plain = {name: value for name, value in params.items() if not name.startswith(LOG_RATE)}
    expected = [
        by_hand(model, plain, Batch(x[None], y[None]), ["1.mlp.up", "1.mlp.down"], 0.7).mean()
        for x, y in zip(*episode.query, strict=True)
    ]
    figures = algorithm.evaluate(params, episode)
    torch.testing.assert_close(figures["loss"][:, -1], torch.stack(expected))
    torch.testing.assert_close(figures["bits"], figures["loss"] / math.log(2))
    assert algorithm.loss is not None
    torch.testing.assert_close(algorithm.loss(leaves(params), episode, 1).detach(), torch.stack(expected).sum())


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_meta_gradient_is_that_of_finite_differences(blocks: int) -> None:
    algorithm = reading(model=network(), chunk=CHUNK, blocks=blocks, rate=0.7)
    params, episode = start_of(algorithm), documents()
    result = algorithm.meta_grad(params, episode, 1)
    draw = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(p.shape, generator=draw, dtype=DOUBLE) for name, p in params.items()}
    along = sum(float((result.grads[name] * d).sum()) for name, d in direction.items())

    def loss_at(distance: float) -> float:
        assert algorithm.loss is not None
        moved = leaves({name: p + distance * direction[name] for name, p in params.items()})
        return float(algorithm.loss(moved, episode, 1).detach())

    assert along == pytest.approx((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, rel=1e-6)
    first = reading(model=network(), chunk=CHUNK, blocks=blocks, rate=0.7, first_order=True)
    of_first = first.meta_grad(params, episode, 1)
    assert of_first.metrics["loss"] == result.metrics["loss"]
    assert not torch.allclose(of_first.grads["1.mlp.up"], result.grads["1.mlp.up"], rtol=1e-3)


def test_steps_that_are_computed_again_give_the_same() -> None:
    plain, again = (
        reading(model=network(), chunk=CHUNK, blocks=2, rate=0.7, checkpoint_steps=kept) for kept in (False, True)
    )
    params, episode = start_of(plain), documents()
    ours, theirs = (one.meta_grad(params, episode, 1) for one in (again, plain))
    assert ours.metrics["loss"] == theirs.metrics["loss"]
    for name, value in theirs.grads.items():
        torch.testing.assert_close(ours.grads[name], value, rtol=1e-12, atol=1e-14)


def test_a_network_that_learns_nothing_is_static() -> None:
    model = network()
    params, episode = start_of(reading(model=model, chunk=CHUNK)), documents()
    static = reading(model=model, chunk=CHUNK, blocks=0).evaluate(params, episode)["loss"]
    slow = reading(model=model, chunk=CHUNK, rate=1e-12, learn_rates=False).evaluate(params, episode)["loss"]
    torch.testing.assert_close(slow, static, rtol=1e-9, atol=0)
    expected = F.cross_entropy(model.apply(params, episode.query.x).transpose(1, 2), episode.query.y)
    torch.testing.assert_close(static[:, -1].mean(), expected)


def test_what_comes_after_a_text_is_predicted_by_what_it_taught() -> None:
    model = network()
    algorithm = reading(model=model, chunk=CHUNK, rate=0.7)
    params, (_, query) = start_of(algorithm), documents(1)
    text, rest = (Batch(query.x[:, part], query.y[:, part]) for part in (slice(2 * CHUNK), slice(2 * CHUNK, 3 * CHUNK)))
    outputs = algorithm.adapt(params, text)(rest.x)
    losses = F.cross_entropy(outputs[0], rest.y[0], reduction="none")
    plain = {name: value for name, value in params.items() if not name.startswith(LOG_RATE)}
    expected = by_hand(model, plain, query, ["1.mlp.up", "1.mlp.down"], 0.7)[2 * CHUNK : 3 * CHUNK]
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("pieces", [[24], [1, 3, 5, 2, 13], [1] * 24])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_document_in_pieces_is_read_as_the_whole(blocks: int, pieces: list[int]) -> None:
    algorithm = reading(model=network(), chunk=CHUNK, blocks=blocks, rate=0.7)
    params, (_, query) = start_of(algorithm), documents(1)
    assert algorithm.stream is not None
    stream, text = algorithm.stream(params), torch.cat([query.x[0, :1, 0].long(), query.y[0]])
    losses = torch.cat([stream.read(piece) for piece in text.split(pieces)])
    torch.testing.assert_close(losses.mean()[None], algorithm.evaluate(params, Episode(query, query))["loss"][:, -1])
    other = stream.copy()
    expected = F.cross_entropy(stream.scores()[None], torch.tensor([2]), reduction="none")
    assert not expected.requires_grad
    torch.testing.assert_close(other.read(torch.tensor([2])), expected)
    torch.testing.assert_close(stream.read(torch.tensor([2])), expected)  # the copy has changed nothing


def test_a_document_is_read_on_the_device_of_its_parameters() -> None:
    """A device without values stands for a GPU: nothing may come from, or go to, the processor."""
    algorithm = reading(model=network(), chunk=CHUNK, rate=0.7)
    assert algorithm.stream is not None
    stream = algorithm.stream({name: value.to("meta") for name, value in start_of(algorithm).items()})
    losses = stream.read(torch.zeros(2 * CHUNK + 3, dtype=torch.int64, device="meta"))
    assert losses.shape == (2 * CHUNK + 2,) and {losses.device.type, stream.scores().device.type} == {"meta"}


# The network


@pytest.mark.parametrize("window", [3, 4, 100, None])
def test_attention_in_a_window_is_that_of_a_mask(window: int | None) -> None:
    """Block by block, for lengths that are no multiple of the window: beside scores of all pairs."""
    model = network(window, layers=1)
    params = {n: p.to(DOUBLE) for n, p in model.init(torch.Generator().manual_seed(0)).items()}
    x = documents(2).query.x

    def normed(h: Tensor) -> Tensor:
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    h = params["embed"][x[..., 0].long()]
    q, k, v = (normed(h) @ params["0.attention.in"]).view(2, LENGTH, 3, 2, 4).permute(2, 0, 3, 1, 4)
    turn = torch.arange(LENGTH, dtype=DOUBLE)[:, None] * torch.tensor([1.0, 0.1], dtype=DOUBLE)
    turned = [torch.polar(torch.ones_like(turn), turn) * torch.complex(*part.split(2, -1)) for part in (q, k)]
    scores = (turned[0].unsqueeze(3) * turned[1].unsqueeze(2).conj()).real.sum(-1) / 2
    ahead = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    hidden = (ahead > 0) | (ahead <= -(window or LENGTH))
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    h = h + mixed.transpose(1, 2).flatten(2) @ params["0.attention.out"]
    h = h + F.gelu(normed(h) @ params["0.mlp.up"]) @ params["0.mlp.down"]
    torch.testing.assert_close(model.apply(params, x), normed(h) @ params["head"])


@pytest.mark.parametrize("window", [4, None])
def test_chunk_by_chunk_is_as_the_whole(window: int | None) -> None:
    model = network(window)
    assert model.reader is not None
    params = {n: p.to(DOUBLE) for n, p in model.init(torch.Generator().manual_seed(0)).items()}
    x, past, parts = documents().query.x, {}, []
    h, _ = model.reader.body(params, x, {}, 0, 2)
    for start in range(0, LENGTH, CHUNK):
        answer, past = model.reader.tail(params, h[:, start : start + CHUNK], past, start, 2)
        parts.append(answer)
    torch.testing.assert_close(torch.cat(parts, dim=1), model.apply(params, x))


def test_a_window_reaches_no_further_than_it_says() -> None:
    model = network(window=4)
    params = {n: p.to(DOUBLE) for n, p in model.init(torch.Generator().manual_seed(0)).items()}
    assert model.reach == 2 * 3 + 1
    x = documents(1).query.x
    before = model.apply(params, x)
    for place, changes in ((LENGTH - 1 - model.reach, False), (LENGTH - model.reach, True)):
        other = x.clone()
        other[:, place] = (other[:, place] + 1) % SYMBOLS
        assert torch.equal(model.apply(params, other)[:, -1], before[:, -1]) != changes


def test_each_document_may_have_weights_of_its_own() -> None:
    model = network()
    x = documents(2).query.x
    each = [{n: p.to(DOUBLE) for n, p in model.init(torch.Generator().manual_seed(i)).items()} for i in range(2)]
    together = model.apply({name: torch.stack([one[name] for one in each]) for name in each[0]}, x)
    for number, params in enumerate(each):
        torch.testing.assert_close(together[number : number + 1], model.apply(params, x[number : number + 1]))


# What is refused, and figures


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"blocks": 3}, "from 1 to 2"), ({"chunk": 0}, "at least 1"), ({"rate": 0}, "above 0")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as raised:
        reading(model=network(), **{"chunk": CHUNK} | settings)
    assert message in raised.value.text("algorithm")


def test_a_model_that_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="type model=decoder"):
        reading(model=mlp(inputs=1, outputs=2), chunk=4)


@pytest.mark.parametrize("metric", [None, top_k(k=3)], ids=["loss", "metric"])
def test_another_loss_or_metric_is_refused(metric: Metric | None) -> None:
    """Its bits would be none, and validations would be without the metric."""
    source = chains(symbols=SYMBOLS, alpha=0.2, length=8, eval_length=8, seeds=Seeds(0, 0))
    loss = reporting(cross_entropy(smoothing=0.0 if metric else 0.1), metric, source)
    with pytest.raises(Invalid, match="type loss=auto metric=auto"):
        reading(model=measured_by(network(), loss), chunk=4)
    reading(model=measured_by(network(), cross_entropy()), chunk=4)


def test_figures_by_position_stand_beside_the_optimum() -> None:
    source = chains(symbols=SYMBOLS, alpha=0.2, length=8, eval_length=300, seeds=Seeds(0, 0))
    model = network()
    algorithm = reading(model=model, chunk=50)
    params = algorithm.init(torch.Generator().manual_seed(0))
    values = algorithm.evaluate(params, source.episodes("test", torch.arange(3)))
    figures = figures_of(values, source, "test", reach=model.reach)
    assert [*figures["bits_by_position"]] == [*figures["optimum_by_position"]] == ["0", "128", "256"]
    spans = [*zip([128, 128, 44], figures["bits_by_position"].values(), strict=True)]
    assert figures["bits"] == pytest.approx(sum(count * bits for count, bits in spans) / 300)
    assert figures["by_step"] == {"0": figures["bits"]}
    for place, best in figures["optimum_by_position"].items():
        assert best < figures["window_optimum_by_position"][place] and best < figures["bits_by_position"][place]
