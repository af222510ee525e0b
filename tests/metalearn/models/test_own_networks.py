"""Networks of one's own: what they draw in training, parameters that are fixed or not used, and layers of all kinds."""

import copy
import functools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torchvision.models import squeezenet1_1
from torchvision.ops import StochasticDepth

from distributed.reduce import tree_sum
from metalearn.algorithms.common.wrappers import with_fixed
from metalearn.algorithms.maml import maml
from metalearn.algorithms.protonet import protonet
from metalearn.errors import DataError
from metalearn.models.common.adapter import model_of
from metalearn.models.torchvision_classifier import torchvision_classifier
from metalearn.nn.layers import per_task
from metalearn.nn.surroundings import Part, PassSeeds, inputs_of, of_reals, surrounded
from metalearn.training.chunks import ChunkFunctions, chunk_functions
from metalearn.types import FIXED, Algorithm, Batch, Episode, Model, Params
from tests.metalearn.learners import FLOAT64, LEARNERS, SIZE, WAYS, Tasks, close, start_of, tasks
from tests.metalearn.own_network import Net
from tests.runs import slow

FAST = ("maml", "checkpointed", "maml_pp", "cavia", "meta_curvature", "reptile_carried", "imaml", "protonet", "r2d2",
        "finetune_whole", "tim_centred", "supervised")  # fmt: skip
"""Learners whose code on parameters and passes is their own."""

every_learner = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else slow) for name in LEARNERS]
)


def adapted(make: Callable[[], nn.Module], shape: tuple[int, ...] = (1, SIZE, SIZE), **options: Any) -> Model:
    return model_of(
        make, name="Net", inputs=of_reals(shape), advice="", **({"transductive": True, "dropout": True} | options)
    )


def functions_of(learner: Algorithm, seed: int = 1) -> ChunkFunctions:
    return chunk_functions(learner, Tasks(learner), torch.device("cpu"), FLOAT64, tree_sum, seed=seed)


# What is drawn in training


@every_learner
def test_what_is_drawn_follows_from_the_number_of_the_task(name: str) -> None:
    """A task's gradient is the same alone and beside others. Another seed or step gives another; tests draw none."""
    learner, plain = (LEARNERS[name](adapted(lambda p=p: Net(p=p))) for p in (0.4, 0.0))
    params, functions, numbers = start_of(learner), functions_of(learner), torch.tensor([4, 7, 5])
    whole = functions.map(params, numbers, 2)
    again = functions.map(params, numbers, 2)
    assert all(torch.equal(whole.grads[key], again.grads[key]) for key in whole.grads)
    for other in (functions.map(params, numbers, 3), functions_of(learner, seed=2).map(params, numbers, 2)):
        assert not torch.equal(other.metrics["loss"], whole.metrics["loss"])
    if learner.trained_on == "tasks":  # the samples of a micro-batch are normalised together
        alone = [functions.map(params, number.view(1), 2).grads for number in numbers]
        sums = {key: torch.stack([grads[key] for grads in alone]).sum(dim=0) for key in whole.grads}
        close(sums, whole.grads, atol=1e-8)
    values, wanted = (functions_of(one).evaluate(params, "test", numbers) for one in (learner, plain))
    assert all(torch.equal(values[key], wanted[key]) for key in values)


class Recorded(nn.Module):
    """Dropout whose masks are kept."""

    masks: list[Tensor] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.masks.append(2.0 * (torch.rand(x.shape, dtype=x.dtype) < 0.5))
        return x * self.masks[-1]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_meta_gradient_is_that_of_the_masks_that_were_drawn(checkpoint: bool) -> None:
    """MAML by torch.autograd alone, task by task, with the masks of each task and pass. Steps that are computed again
    for the derivative draw the same masks."""
    model = adapted(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Recorded(), nn.Linear(6, 1)), (4,))
    learner = maml(model=model, inner_lr=0.3, inner_steps=2, eval_steps=1, checkpoint_steps=checkpoint)
    params = start_of(learner)
    values = [torch.randn(2, 5, width, dtype=FLOAT64, generator=Generator().manual_seed(width)) for width in (4, 1)]
    episode = Episode(*(Batch(*(value + shift for value in values)) for shift in (0, 1)))
    Recorded.masks.clear()
    with surrounded(seeds=PassSeeds(1, 1, [3, 8])):
        result = learner.meta_grad(params, episode, 1)
    masks = list({mask.numpy().tobytes(): mask for mask in Recorded.masks}.values())
    assert len(masks) == 6  # three passes of two tasks, however often they are computed
    assert (len(Recorded.masks) > 6) == checkpoint

    def loss(theta: Params, batch: Batch, task: int, passed: int) -> Tensor:
        h = torch.tanh(F.linear(batch.x[task], theta["0.weight"], theta["0.bias"])) * masks[2 * passed + task]
        return (F.linear(h, theta["3.weight"], theta["3.bias"]) - batch.y[task]).square().mean()

    start = {name: value.clone().requires_grad_() for name, value in params.items()}
    total = torch.zeros((), dtype=FLOAT64)
    for task in range(2):
        theta = start
        for step in range(2):
            grads = torch.autograd.grad(
                loss(theta, episode.support, task, step), list(theta.values()), create_graph=True
            )
            theta = {name: value - 0.3 * g for (name, value), g in zip(theta.items(), grads, strict=True)}
        total = total + loss(theta, episode.query, task, 2)
    expected = torch.autograd.grad(total, list(start.values()))
    close(result.grads, dict(zip(start, expected, strict=True)), atol=1e-12)


# Layers of all kinds


class Last(nn.Module):
    """The last outputs of a sequence."""

    def forward(self, x: Any) -> Tensor:
        return x[0][:, -1]  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x)[0]).mean(dim=1)  # type: ignore[no-any-return]


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x) if self.training else x


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, WAYS))
    network[2].weight = network[0].weight
    return network


def between(*layers: nn.Module) -> nn.Module:
    """A perceptron with these layers inside."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *layers, nn.Linear(8, WAYS))


def recurrent(kind: type[nn.LSTM | nn.GRU]) -> nn.Module:
    return nn.Sequential(kind(3, 5, num_layers=2, batch_first=True, dropout=0.3), Last(), nn.Linear(5, WAYS))


def convolved(layer: nn.Module, dropout: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), dropout, nn.Flatten(), nn.Linear(width, WAYS))


Kind = tuple[tuple[int, ...], Callable[[], nn.Module]]

KINDS: dict[str, Kind] = {
    "lstm": ((4, 3), lambda: recurrent(nn.LSTM)),
    "gru": ((4, 3), lambda: recurrent(nn.GRU)),
    "attention": ((4, 8), lambda: nn.Sequential(Attention(), nn.Linear(8, WAYS))),
    "transformer": (
        (4, 8),
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 12, 0.2, F.gelu, batch_first=True), Mean(), nn.Linear(8, WAYS)
        ),
    ),
    "group_norm_2d": (
        (2, 6, 6),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Softplus(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, WAYS)
        ),
    ),
    "dropout_1d": ((2, 8), lambda: convolved(nn.Conv1d(2, 4, 3), nn.Dropout1d(0.3), 24)),
    "dropout_3d": ((1, 4, 4, 4), lambda: convolved(nn.Conv3d(1, 3, 3), nn.Dropout3d(0.3), 24)),
    "dropout": ((6,), lambda: between(nn.LayerNorm(8), nn.Dropout(0.3, inplace=True))),
    "alpha_dropout": ((6,), lambda: between(nn.AlphaDropout(0.3))),
    "feature_alpha_dropout": ((6,), lambda: between(nn.FeatureAlphaDropout(0.3))),
    "function": ((6,), lambda: between(ByFunction())),
    "noise": ((6,), lambda: between(Noise())),
    "rrelu": ((6,), lambda: between(nn.RReLU())),
    "stochastic_depth": ((6,), lambda: between(StochasticDepth(0.4, "row"))),
    "tied": ((6,), tied),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_meta_gradient_is_a_finite_difference(kind: str) -> None:
    """Second-order MAML, in tests and in training, where the same seeds draw the same numbers."""
    shape, make = KINDS[kind]
    learner = maml(model=adapted(make, shape), inner_lr=0.5, inner_steps=2, eval_steps=2)
    params, generator = start_of(learner), Generator().manual_seed(3)
    x = torch.randn(4, 6, *shape, dtype=FLOAT64, generator=generator)
    y = torch.arange(WAYS).repeat(2, 2)
    episode = Episode(Batch(x[:2], y), Batch(x[2:], y))
    direction = {name: torch.randn(p.shape, dtype=FLOAT64, generator=generator) for name, p in params.items()}
    assert learner.loss is not None

    def at(distance: float, training: bool) -> Tensor:
        theta = {name: (p + distance * direction[name]).requires_grad_() for name, p in params.items()}
        with surrounded(seeds=PassSeeds(1, 1, [3, 4])) if training else nullcontext():
            return learner.loss(theta, episode, 1).detach()  # type: ignore[misc]

    state, h = torch.get_rng_state(), 1e-5
    for training in (False, True):
        with surrounded(seeds=PassSeeds(1, 1, [3, 4])) if training else nullcontext():
            grads = learner.meta_grad(params, episode, 1).grads
        along = sum(float((grads[name] * direction[name]).sum()) for name in params)
        assert along == pytest.approx(float(at(h, training) - at(-h, training)) / (2 * h), rel=1e-6, abs=1e-8)
    assert at(0, True) != at(0, False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.thorough
def test_a_compiled_network_is_computed_eagerly() -> None:
    """torch.compile gives functions without a second derivative. Nothing is compiled here."""

    def inside() -> nn.Module:
        network = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
        network[1] = torch.compile(network[1], backend="eager")  # type: ignore[assignment]
        return network

    def in_place() -> nn.Module:
        network = nn.Linear(4, 2)
        network.compile(backend="eager")
        return network

    for make, names in (
        (lambda: torch.compile(nn.Linear(4, 2), backend="eager"), ["weight", "bias"]),
        (inside, ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]),
        (in_place, ["weight", "bias"]),
    ):
        model = adapted(make, (4,))  # type: ignore[arg-type]
        params, batch = model.init(Generator().manual_seed(0)), Batch(torch.ones(1, 2, 4), torch.tensor([[0, 1]]))
        assert list(params) == names
        assert model.cautions == ("Net: is computed without torch.compile, whose functions have no second derivative",)
        learner = maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1)
        result = learner.meta_grad(params, Episode(batch, batch), 1)
        assert all(grad.isfinite().all() for grad in result.grads.values())


def test_torchvisions_networks_drop_nothing_out_unless_asked_to() -> None:
    model, dropping = (
        torchvision_classifier(name="squeezenet1_1", ways=3, channels=3, image_size=32, dropout=dropout)
        for dropout in (False, True)
    )
    drawn, x = model.init(Generator().manual_seed(0)), torch.rand(1, 2, 3, 32, 32)
    params, plain = per_task(drawn, 1), squeezenet1_1(num_classes=3)
    plain.load_state_dict(drawn)
    with surrounded(seeds=PassSeeds(1, 1, [0])):
        still, dropped = (one.apply(params, x) for one in (model, dropping))
    torch.testing.assert_close(still[0], plain.eval()(x[0]), rtol=1e-4, atol=1e-5)
    assert torch.equal(still, dropping.apply(params, x)) and not torch.equal(still, dropped)


# Parameters that are fixed, and those that are not used


@every_learner
def test_a_fixed_parameter_is_as_a_constant(name: str) -> None:
    """The gradients and values are those of the network that has it as a buffer. It has no gradient of its own."""
    fixed, constant = (adapted(lambda first=first: Net(first=first, p=0.2)) for first in ("fixed", "buffer"))
    learner, reference = with_fixed(LEARNERS[name](fixed), fixed), LEARNERS[name](constant)
    start = start_of(reference)
    drawn = learner.init(Generator().manual_seed(0))
    assert drawn.keys() - start.keys() == {f"{FIXED}first"}
    params, numbers = start | {f"{FIXED}first": drawn[f"{FIXED}first"].double()}, torch.arange(3)
    ours = functions_of(learner).map(params, numbers, 2)
    theirs = functions_of(reference).map(start, numbers, 2)
    assert ours.grads.keys() == theirs.grads.keys() == start.keys()
    assert all(torch.equal(ours.grads[key], theirs.grads[key]) for key in start)
    values = functions_of(learner).evaluate(params, "test", numbers)
    wanted = functions_of(reference).evaluate(start, "test", numbers)
    assert all(torch.equal(values[key], wanted[key]) for key in wanted)
    if learner.evaluated_on == "tasks":
        (support, query) = tasks(1)
        predictors = (learner.adapt(params, support), reference.adapt(start, support))
        assert torch.equal(*(predict(query.x) for predict in predictors))


@every_learner
def test_an_unused_parameter_has_no_gradient(name: str) -> None:
    learner, reference = (LEARNERS[name](adapted(lambda spare=spare: Net(spare=spare))) for spare in (True, False))
    start = start_of(reference)
    own = {key: value.double() for key, value in learner.init(Generator().manual_seed(0)).items()}
    params, numbers = {**own, **start}, torch.arange(2)
    ours, theirs = functions_of(learner).map(params, numbers, 2), functions_of(reference).map(start, numbers, 2)
    assert not ours.grads["spare"].any()
    close({key: ours.grads[key] for key in start}, theirs.grads, atol=1e-12)


def test_unused_parts_of_a_network_are_named() -> None:
    def taught() -> nn.Module:
        network = Net(spare=True)
        network.norm2.running_mean += 1  # type: ignore[operator]
        return network

    assert adapted(taught).cautions == (
        "Net: batch norm normalises by its batch or support set, not by its running statistics: norm2",
        "Net: no output for random inputs depends on spare; unless others do (a branch on the data), only weight decay "
        "changes that",
    )
    model = adapted(lambda: Net(first="fixed", p=0.1))
    assert model.note == (
        "Net: dropout, or what else its training mode changes, is on in training and off in tests; "
        "Net: 1 of its 9 parameters are fixed, and do not learn"
    )
    assert adapted(Net).note == "" and adapted(Net).cautions == () and adapted(Net).fixed is None
    assert adapted(lambda: Net(p=0.1), dropout=False).note == ""


class Embedded(nn.Module):
    """Classes by the mean embedding of token ids; outputs may be in a dictionary."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.named = nn.Embedding(20, 6), nn.Linear(6, 3), named

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids).mean(dim=1))
        return {"logits": logits} if self.named else logits


@pytest.mark.parametrize("named", [False, True])
def test_a_network_of_whole_numbers_has_its_last_layer_as_head(named: bool) -> None:
    ids = torch.arange(10).reshape(1, 2, 5)
    model = model_of(
        lambda: Embedded(named), name="Net", inputs=inputs_of(ids), transductive=True, advice="", dropout=False
    )
    assert model.head is not None and model.head.params == ("head.weight", "head.bias")
    params = {name: value.unsqueeze(0) for name, value in model.init(Generator().manual_seed(0)).items()}
    assert model.features is not None
    features = model.features(params, ids.float())
    close({"": model.head.apply(params, features, 0)}, {"": model.apply(params, ids.float())}, atol=1e-6)


class Calls(nn.Module):
    """Layers, and how a pass uses them."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.use = nn.ModuleDict(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, **self.layers)


WRITTEN_TWO_WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "in_place": (
        lambda: Calls(lambda x, head: head(F.relu(x.sub_(0.5), inplace=True)), head=nn.Linear(4, 2)),
        lambda: Calls(lambda x, head: head(F.relu(x - 0.5)), head=nn.Linear(4, 2)),
    ),
    "sparse": (
        lambda: Calls(lambda x, table: table(x.long()).sum(dim=1), table=nn.Embedding(9, 2, sparse=True)),
        lambda: Calls(lambda x, table: table(x.long()).sum(dim=1), table=nn.Embedding(9, 2)),
    ),
}


@pytest.mark.parametrize("name", WRITTEN_TWO_WAYS)
def test_in_place_and_sparse_operations_are_as_the_plain_ones(name: str) -> None:
    x, results = torch.arange(16.0).view(2, 2, 4).remainder(9), []
    for make in WRITTEN_TWO_WAYS[name]:
        model, before = adapted(make, (4,)), x.clone()
        params = {key: value.requires_grad_() for key, value in model.init(Generator().manual_seed(0)).items()}
        outputs = model.apply(per_task(params, 2), x)
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), list(params.values()))])
        assert torch.equal(x, before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


HEADLESS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "twice": (lambda x, body, head, back: head(body(x) + back(head(body(x)))), "layers.head is used twice"),
    "tied": (lambda x, body, head, back: head(body(x).relu()), "layers.head.weight is also layers.body.weight"),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_a_last_layer_that_is_no_head_is_named(name: str) -> None:
    forward, reason = HEADLESS[name]

    def make() -> nn.Module:
        outputs = 4 if name == "tied" else 2
        network = Calls(forward, body=nn.Linear(4, 4), head=nn.Linear(4, outputs), back=nn.Linear(outputs, 4))
        if name == "tied":
            network.layers["head"].weight = network.layers["body"].weight
        return network

    model = adapted(make, (4,))
    with pytest.raises(ValueError, match=f"this one has none .{reason}"):
        LEARNERS["anil"](model)
    start_of(LEARNERS["maml"](model))


def test_an_operation_without_second_derivative_is_named() -> None:
    model = adapted(lambda: Calls(lambda x, bag: bag(x.long()), bag=nn.EmbeddingBag(9, 3)), (4,))
    x, y = torch.ones(1, 3, 4), torch.arange(3).unsqueeze(0)
    params = model.init(Generator().manual_seed(0))
    with pytest.raises(ValueError, match="_embedding_bag_backward"):
        maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1).meta_grad(params, Episode(*[Batch(x, y)] * 2), 1)
    with pytest.raises(ValueError, match="no loss of this algorithm depends on"):
        bare = adapted(lambda: nn.Linear(4, 3), (4,))
        protonet(model=bare).meta_grad({}, Episode(*[Batch(x, y)] * 2), 1)


def test_a_function_gets_the_second_derivative_that_torch_lacks() -> None:
    class Sigmoids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(SIZE * SIZE, 8), nn.Linear(8, WAYS)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(F.hardsigmoid(self.inner(x.flatten(1))))

    model = adapted(Sigmoids)
    params = {name: value.unsqueeze(0).double() for name, value in model.init(Generator().manual_seed(0)).items()}
    x = torch.rand(1, 4, 1, SIZE, SIZE, dtype=torch.float64)

    def loss(weight: Tensor) -> Tensor:
        return model.apply(params | {"inner.weight": weight}, x, 0).square().sum()

    assert torch.autograd.gradgradcheck(loss, params["inner.weight"].requires_grad_())


class OfNumpy(nn.Module):
    """Draws by numpy and Python, as torchvision's Inception does by scipy."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.layer = nn.Flatten(), nn.Linear(SIZE * SIZE, WAYS)
        with torch.no_grad():
            self.layer.weight.copy_(torch.from_numpy(np.random.randn(WAYS, SIZE * SIZE)) * random.random())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.flatten(x))


def test_the_seed_draws_what_numpy_and_python_draw() -> None:
    model, before = adapted(OfNumpy), (random.getstate(), np.random.get_state()[1].tolist())
    first, again, other = (model.init(Generator().manual_seed(seed))["layer.weight"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class Cast(OfNumpy):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_wrappers_of_torch_are_taken_off_or_named() -> None:
    assert adapted(lambda: nn.DataParallel(OfNumpy())).init(Generator()).keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(ValueError, match=r"gives torch.bfloat16, .*; leave out torch.autocast"):
        adapted(Cast)
    with pytest.raises(ValueError, match=r"is compiled by torch\.jit; give the module that was compiled"):
        adapted(lambda: torch.jit.trace(OfNumpy(), torch.rand(1, 1, SIZE, SIZE)))


def test_a_sequence_of_one_item_stays_one() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, WAYS)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sum(1))

    model = adapted(Summed, (5, 4))
    params = {name: value.unsqueeze(0) for name, value in model.init(Generator()).items()}
    x = torch.rand(1, 3, 1, 4)
    wanted = F.linear(x[0, :, 0], params["layer.weight"][0], params["layer.bias"][0])
    torch.testing.assert_close(model.apply(params, x, 0)[0], wanted)


def test_a_batch_norm_without_parameters_is_computed() -> None:
    def make(affine: bool) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1, affine=affine), nn.Flatten(), nn.Linear(SIZE**2, WAYS))

    x = torch.randn(1, 4, 1, SIZE, SIZE, generator=Generator().manual_seed(0))
    bare, usual = (adapted(lambda affine=affine: make(affine), transductive=False) for affine in (False, True))
    params = {name: value.unsqueeze(0) for name, value in usual.init(Generator().manual_seed(0)).items()}
    wanted = usual.apply(params, x[:, :2], x[:, 2:])  # its weight is 1, and its bias 0
    params = {name: value for name, value in params.items() if not name.startswith("0.")}
    close({"": bare.apply(params, x[:, :2], x[:, 2:])}, {"": wanted}, atol=1e-6)


def test_a_fixed_head_is_none() -> None:
    def make() -> nn.Module:
        network = Net()
        network.head.requires_grad_(False)
        return network

    assert adapted(make).head is None
    with pytest.raises(ValueError, match=r"one linear layer \(nn.Linear\) that learns, and this one has none"):
        LEARNERS["protonet"](adapted(make))


# The tasks of a chunk at once


class Looked(nn.Module):
    """Rows of a table for whole numbers, one of which stands for nothing."""

    def __init__(self, look: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.table, self.head, self.look = nn.Embedding(7, 6, padding_idx=2), nn.Linear(6, 2), look

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids) if self.look is None else self.look(ids, self.table)
        return self.head(torch.tanh(rows.mean(1)))


def convolutions() -> nn.Module:
    norms = (nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    first = [nn.Conv2d(1, 4, 3, padding=1), norms[0], nn.Softplus()]
    return nn.Sequential(*first, nn.Conv2d(4, 4, 3, groups=2), norms[1], nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32, 2))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lstm(ids[..., None].float())[0][:, -1]


AT_ONCE = {
    "convolutions": (convolutions, of_reals((1, 6, 6))),
    "encoder": (encoder, of_reals((4, 8))),
    "rows": (Looked, (Part("", (5,), "whole"),)),
}


class Saturated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(1, 4, 5, 3), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(2 * torch.tanh(self.norm(self.body(x))).flatten(1))


def test_the_way_of_computing_does_not_depend_on_the_weights() -> None:
    """A bias before a norm has no gradient but rounding, which differs from way to way."""
    for seed in range(8):
        torch.manual_seed(seed)
        network = Saturated()
        model = adapted(functools.partial(copy.deepcopy, network), (1, 12, 12), vectorize="auto")
        assert model.at_once, f"{seed}: {model.note}"


@pytest.mark.parametrize("transductive", [True, False])
@pytest.mark.parametrize("kind", AT_ONCE)
def test_tasks_at_once_have_the_gradients_of_one_by_one(kind: str, transductive: bool) -> None:
    make, inputs = AT_ONCE[kind]
    shape, g = inputs[0].shape, Generator().manual_seed(0)
    together, alone = (
        model_of(make, name="Net", inputs=inputs, transductive=transductive, advice="", vectorize=vectorize)
        for vectorize in (True, False)
    )
    assert "at once" in together.note and together.at_once and not alone.at_once

    def batch(n: int) -> Batch:
        x = torch.randint(7, (3, n, *shape), generator=g) if kind == "rows" else torch.randn(3, n, *shape, generator=g)
        return Batch(x.double(), torch.randint(2, (3, n), generator=g))

    episode, results, values = Episode(batch(4), batch(6)), [], []
    for model in (together, alone):
        learner = maml(model=model, inner_lr=0.3, inner_steps=2, eval_steps=2)
        params = {name: p.double() for name, p in learner.init(Generator().manual_seed(1)).items()}
        results.append(learner.meta_grad(params, episode, 0).grads)
        values.append(learner.evaluate(params, episode)["loss"])
    close(*results, atol=1e-12)
    torch.testing.assert_close(*values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Reads, "lstm"),
        (lambda: Looked(lambda ids, table: torch.embedding(table.weight, ids)), "too large"),
        (lambda: Looked(lambda ids, table: F.one_hot(ids, 7).float() @ table.weight), "too large"),
        (lambda: Looked(lambda ids, table: table.weight[ids] * (2 if ids.sum() > 9 else 1)), "data-dependent"),
    ],
)
def test_what_torch_cannot_compute_at_once_goes_one_by_one(make: Callable[[], nn.Module], reason: str) -> None:
    options: dict[str, Any] = {"name": "Net", "inputs": (Part("", (5,), "whole"),), "transductive": True, "advice": ""}
    model = model_of(make, **options, vectorize="auto")
    assert "one by one" in model.note and reason in model.note and not model.at_once
    with pytest.raises(ValueError, match="cannot be computed at once"):
        model_of(make, **options, vectorize=True)


def test_a_large_number_does_not_read_rows_of_another_task() -> None:
    model = model_of(
        Looked, name="Net", inputs=(Part("", (5,), "whole"),), transductive=True, advice="", vectorize=True
    )
    params = per_task(model.init(Generator().manual_seed(0)), 2)
    with pytest.raises(DataError, match="whole numbers run from 0 to 7"):
        model.apply(params, torch.tensor([0.0, 1, 2, 3, 7]).expand(2, 1, 5))


class LessItsMean(nn.Module):
    """Outputs less their mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE * SIZE, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.flatten(1))
        return outputs - outputs.mean(0)


@pytest.mark.parametrize(
    ("make", "together"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LazyLinear(WAYS)), False),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(WAYS)), True),
        (LessItsMean, True),
    ],
    ids=["group norm", "batch norm", "mean"],
)
def test_a_network_without_a_batch_norm_is_not_transductive(make: Any, together: bool) -> None:
    def called() -> nn.Module:
        network = make()
        with torch.no_grad():
            network(torch.rand(2, 1, SIZE, SIZE))
        return network

    assert adapted(called).transductive is together
