"""Learning while reading: a network goes on learning from the document that it reads. The field's term is test-time
training; with a network that was not trained for it, dynamic evaluation.

TTT-E2E, Tandon et al. 2025 (arXiv 2512.23675): a document is a task, and its chunks are the inner steps. Each chunk is
predicted by the network as the chunks before it have left it; then the MLPs of the last blocks take a step of descent
on the loss of that chunk. The outer loss is the mean loss of all symbols, each before its chunk is learned from. It is
differentiated through all steps: MAML (Finn et al. 2017) over a stream. Dynamic evaluation: Krause et al. 2018 (arXiv
1709.07432).

Differences from the paper:

- Its inner MLPs are further ones beside the static ones; ours are those of the last blocks.
- Each matrix learns the rate of its inner steps, a number of which the logarithm is a meta-parameter; theirs is 1, with
  the gradient clipped to norm 1.
"""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.inner import computed_again, from_outcome, graph_of
from metalearn.algorithms.common.losses import by_sample
from metalearn.errors import ConfigError, Invalid, counts, not_negative, positive, switches
from metalearn.nn.network import leaves
from metalearn.types import BITS, POSITIONS, Algorithm, Batch, Episode, Metrics, Model, Params, Past

LOG_RATE = "log_rate."  # the prefix of the names of the inner rates' logarithms, divided by `SPEED`
SPEED = 5.0  # how much faster than a weight these logarithms move, under an optimiser whose steps have one size for all
FIRST = 128  # where the second figure by position begins; later ones begin at twice the place of the one before


def reading(
    *, model: Model, chunk: int, blocks: int = 1, rate: float = 1.0, learn_rates: bool = True,
    first_order: bool = False, checkpoint_steps: bool = False,
) -> Algorithm:  # fmt: skip
    """Predicts the next symbol of a document, and learns from each chunk of it. Raises ValueError for a chunk below 1,
    a rate not above 0, more blocks than the network has, a model that does not read, or another loss than cross-entropy
    or metric than its own.

    Args:
        model: a network that reads, such as `model=decoder`.
        chunk: symbols between two inner steps.
        blocks: how many of the last blocks have MLPs that learn while reading; 0: a static network.
        rate: the rate of the inner steps, for the mean loss of a chunk; where rates are learned, that at the start.
        learn_rates: whether each matrix learns its rate.
        first_order: treat the inner gradients as constants.
        checkpoint_steps: keep no graph of the inner steps; the meta-gradient computes each step a second time.
    """
    counts(chunk=chunk)
    not_negative(blocks=blocks)
    positive(rate=rate)
    switches(learn_rates=learn_rates, first_order=first_order, checkpoint_steps=checkpoint_steps)
    reader = model.reader
    if reader is None:
        raise ConfigError("model: it reads no documents, and algorithm=reading needs one that does; type model=decoder")
    if model.loss is not None and not model.loss.compiled:
        reason = "this algorithm counts the bits of each symbol, and reports nothing beside them"
        raise Invalid("loss", model.loss.name, reason, "type loss=auto metric=auto", False)
    inner = reader.learns(blocks) if blocks else ()
    cut = max(blocks, 1)

    def init(generator: Generator) -> Params:
        rates = {LOG_RATE + name: torch.tensor(math.log(rate) / SPEED) for name in inner if learn_rates}
        return model.init(generator) | rates

    def read(params: Params, text: Batch, order: int, learned: int | None = None) -> Tensor:
        """The outputs [t, n, classes] of every symbol, before its chunk is learned from; with `learned`, only as many
        symbols are learned from."""
        t, n = text.x.shape[:2]
        slow, fast, rates = parted(params, t)
        if not inner:
            return model.apply(slow, text.x)
        (h, _), outputs = reader.body(slow, text.x, {}, 0, cut), list[Tensor]()
        past: Past = {}
        for start in range(0, n, chunk):
            part = h[:, start : start + chunk], text.y[:, start : start + chunk]
            moves = start + chunk < n if learned is None else start + chunk <= learned
            arguments = (*part, slow, fast, rates, past, start, order, moves)
            again = checkpoint_steps and order == 2 and torch.is_grad_enabled()
            answer, fast, past = computed_again(step, *arguments) if again else step(*arguments)
            outputs.append(answer)
        return torch.cat(outputs, dim=1)

    def parted(params: Params, documents: int) -> tuple[Params, Params, dict[str, Any]]:
        """The parameters that stay, those that each document changes, and the rates of these."""
        slow = {name: v for name, v in params.items() if not (name in inner or name.startswith(LOG_RATE))}
        fast = {name: params[name].expand(documents, *params[name].shape) for name in inner}
        return slow, fast, {name: (SPEED * params[LOG_RATE + name]).exp() if learn_rates else rate for name in inner}

    def step(
        h: Tensor, y: Tensor, slow: Params, fast: Params, rates: dict[str, Any], past: Past, start: int, order: int,
        moves: bool,
    ) -> tuple[Tensor, Params, Past]:  # fmt: skip
        """A chunk's outputs, the matrices after the step on it, and what later chunks attend to."""
        if not (moves and inner):
            answer, past = reader.tail(slow | fast, h, past, start, cut)
            return answer, fast, past
        at = leaves(fast) if order == 0 else fast
        with torch.enable_grad():
            answer, past = reader.tail(slow | at, h, past, start, cut)
            loss = by_sample(answer, y, model.loss)["loss"].mean(dim=1).sum()
            gradients = torch.autograd.grad(loss, list(at.values()), create_graph=order == 2, retain_graph=order > 0)
        with graph_of(order):
            pairs = zip(fast.items(), gradients, strict=True)
            moved = {name: value - rates[name] * gradient for (name, value), gradient in pairs}
        if order == 0:
            answer, past = answer.detach(), {i: (k.detach(), v.detach()) for i, (k, v) in past.items()}
        return answer, moved, past

    def outcome(params: Params, episode: Episode, number: int) -> Metrics:
        outputs = read(params, episode.query, 1 if first_order else 2)
        means = {name: v.mean(dim=1) for name, v in by_sample(outputs, episode.query.y, model.loss).items()}
        return means | {BITS: means["loss"] / math.log(2)}

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        losses = by_sample(read(params, episode.query, 0), episode.query.y, model.loss)["loss"]
        return by_position(losses.double())

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        """Reads the support set, and answers for what comes after it."""
        n = support.x.shape[1]

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            rest = torch.zeros(x.shape[:2], dtype=support.y.dtype, device=support.y.device)
            text = Batch(torch.cat([support.x, x], dim=1), torch.cat([support.y, rest], dim=1))
            return read(params, text, 0, learned=n)[:, n:]

        return predict

    def stream(params: Params) -> "OneDocument":
        slow, fast, rates = parted(params, 1)
        return OneDocument(
            lambda x, past, start: reader.body(slow, x, past, start, cut),
            lambda h, y, fast, past, start, moves: step(h, y, slow, fast, rates, past, start, 0, moves),
            lambda outputs, y: by_sample(outputs, y, model.loss)["loss"],
            fast, chunk, next(iter(params.values())).device,
        )  # fmt: skip

    return from_outcome(model, outcome, adapt, evaluate=evaluate, init=init)._replace(stream=stream)


class OneDocument:
    """A document that a network reads piece by piece, and learns from. `body` and `step` are those of the reader
    and of `reading` under parameters that stay, and `losses` those of outputs and symbols, [1, n]. `fast` are the
    matrices that learn, at the start, `chunk` the symbols between two steps, and `device` is that of the symbols."""

    def __init__(
        self, body: Callable[[Tensor, Past, int], tuple[Tensor, Past]],
        step: Callable[[Tensor, Tensor, Params, Past, int, bool], tuple[Tensor, Params, Past]],
        losses: Callable[[Tensor, Tensor], Tensor], fast: Params, chunk: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._body, self._step, self._losses, self._fast, self._chunk = body, step, losses, fast, chunk
        self._place, self._last = 0, torch.empty(0, dtype=torch.int64, device=device)
        self._of_body: Past = {}
        self._of_tail: Past = {}  # at the start of the present chunk, of which these are the tail's inputs and symbols
        self._h, self._y = torch.empty(1, 0, 0, device=device), torch.empty(1, 0, dtype=torch.int64, device=device)

    def copy(self) -> "OneDocument":
        """One that goes on by itself from here."""
        return copy(self)  # what changes is replaced as a whole

    @torch.no_grad()
    def read(self, symbols: Tensor) -> Tensor:
        """Reads further symbols [n]; returns the loss of each, predicted by those before it, in nats: [n], or [n − 1]
        at the beginning, where the first one cannot be predicted."""
        text, losses = torch.cat([self._last, symbols]), [torch.empty(0, device=symbols.device)]
        self._last = text[-1:]
        first = 0
        while first < len(text) - 1:
            end = min(len(text) - 1, first + self._chunk - self._y.shape[1])
            x, y = text[first:end], text[first + 1 : end + 1][None]
            self._h, self._of_body = self._tail_inputs(x)
            self._y = torch.cat([self._y, y], dim=1)
            start, whole = self._place + len(x) - self._y.shape[1], self._y.shape[1] == self._chunk
            outputs, fast, past = self._step(self._h, self._y, self._fast, self._of_tail, start, whole)
            losses.append(self._losses(outputs[:, -len(x) :], y)[0])
            self._place += len(x)
            if whole:
                self._fast, self._of_tail, self._h, self._y = fast, past, self._h[:, :0], self._y[:, :0]
            first = end
        return torch.cat(losses)

    def _tail_inputs(self, x: Tensor) -> tuple[Tensor, Past]:
        """Those of the present chunk with further symbols, and the body's past after them."""
        h, past = self._body(x.view(1, -1, 1), self._of_body, self._place)
        return torch.cat([self._h, h], dim=1) if self._h.shape[1] else h, past

    @torch.no_grad()
    def scores(self) -> Tensor:
        """The outputs [d] for the next symbol; at least one must have been read."""
        h, _ = self._tail_inputs(self._last)
        start = self._place - self._y.shape[1]
        return self._step(h, self._y, self._fast, self._of_tail, start, False)[0][0, -1]


def by_position(loss: Tensor) -> Metrics:
    """The figures of documents from the loss of each symbol [t, n]: its means from place 0, 128, 256, 512, … to the
    next, and at last over the whole document."""
    n = loss.shape[1]
    starts = [0, *(FIRST << doubling for doubling in range(n.bit_length()) if FIRST << doubling < n)]
    spans = [loss[:, start:end].mean(dim=1) for start, end in zip(starts, [*starts[1:], n], strict=True)]
    table = torch.stack([*spans, loss.mean(dim=1)], dim=1)
    return {"loss": table, BITS: table / math.log(2), POSITIONS: torch.tensor([*starts, n]).expand(len(loss), -1)}
