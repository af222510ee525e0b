"""Steps that stay on a device. The CPU stands for the GPU here: all but the recording of the graph is the same."""

import gc
import itertools
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_check.learners import training_of
from benchmarks.steps import RATE, advance_on_device, on_device, take_step, trainer_of
from distributed.reduce import tree_sum
from metalearn.algorithms.common.wrappers import with_fixed
from metalearn.algorithms.maml import maml
from metalearn.algorithms.maml_pp import maml_pp
from metalearn.algorithms.pfn import pfn
from metalearn.algorithms.protonet import protonet
from metalearn.errors import DataError, DivergedError, RunError
from metalearn.models.common.adapter import model_of
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.models.table import table
from metalearn.nn.surroundings import of_reals
from metalearn.reporting.logging import RunLog
from metalearn.runs.signals import Interrupted, Stops
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.glyphs import glyphs
from metalearn.tasks.priors.gp import gp_prior
from metalearn.tasks.priors.source import PriorTasks
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training import on_device as module
from metalearn.training.on_device import DeviceUpdater, DeviceWork, PicturesByNumber, WholeEpisodes, steps_on_device
from metalearn.training.optimizers import Rates, sgd
from metalearn.training.trainer import Average, HostUpdater, Stopped, Trainer, TrainState
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, NotFiniteError, Params, TaskSource

CPU, TASKS = torch.device("cpu"), 4


def characters(queries: int = 1) -> TaskSource:
    return glyphs(
        episode=EpisodeSpec(3, 1, queries), image_size=12, channels=1, rotations=True, seeds=Seeds(0, 0)
    )  # fmt: skip


def waves() -> TaskSource:
    return sinusoid(shots=5, queries=5, eval_queries=5, seeds=Seeds(0, 0))


def learner_of(source: TaskSource) -> Algorithm:
    if source.classes("train") is None:
        model, rate = mlp(inputs=1, outputs=1, hidden=(8,), activation="relu"), 0.01
    else:
        model, rate = conv4(ways=3, channels=1, image_size=12, filters=16, activation="relu"), 0.5
    return maml(model=model, inner_lr=rate, inner_steps=1, eval_steps=1)


def same(learner: TrainState, here: TrainState) -> None:
    for name, value in here.params.items():
        torch.testing.assert_close(learner.params[name], value, rtol=1e-4, atol=1e-6)


def compared(
    algorithm: Algorithm, source: TaskSource, steps: int, tasks: int = TASKS, chunk: int = TASKS
) -> tuple[TrainState, TrainState]:
    """The learner after steps on the device, which is that of the host, and one at its start."""
    host = trainer_of(algorithm, source, tasks, chunk, CPU)
    device, updater = on_device(algorithm, source, tasks, chunk, CPU, steps=steps, every=steps)
    advance_on_device(device, updater, 1, steps)
    updater.fetch()
    for step in range(1, steps + 1):
        take_step(host, step)
    same(device.state, host.state)
    return device.state, trainer_of(algorithm, source, tasks, chunk, CPU).state


@pytest.mark.parametrize(("source", "feed"), [(characters, PicturesByNumber), (waves, WholeEpisodes)])
@pytest.mark.parametrize("chunk", [TASKS, 2])
def test_steps_are_those_of_the_host(source: Callable[[], TaskSource], feed: type, chunk: int) -> None:
    algorithm, tasks = learner_of(source()), source()
    host = trainer_of(algorithm, tasks, TASKS, chunk, CPU)
    device, updater = on_device(algorithm, tasks, TASKS, chunk, CPU, steps=5, every=5)
    assert type(updater._feed) is feed
    taken = []
    for step in range(1, 6):
        wanted = take_step(host, step)
        (result,), figures = updater.advance([torch.arange((step - 1) * TASKS, step * TASKS)], step, RATE)
        taken.append((result.metrics["loss"], figures["gradient_norm"], sum(r.metrics["loss"] for r in wanted)))
    updater.settle()
    updater.fetch()
    for loss, norm, wanted_loss in taken:
        assert loss.item() == pytest.approx(float(wanted_loss), rel=1e-5) and norm > 0
    same(device.state, host.state)
    mine, wanted_state = (one.state.optimizer.state_dict()["state"][0] for one in (device, host))
    assert mine.keys() == wanted_state.keys() and mine["step"] == wanted_state["step"] == 5
    torch.testing.assert_close(mine["exp_avg"], wanted_state["exp_avg"], rtol=0.02, atol=1e-5)  # float32, kinks


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_cut() -> None:
    source, algorithm = characters(), learner_of(characters())
    whole, updater = on_device(algorithm, source, TASKS, TASKS, CPU, steps=6, every=6)
    advance_on_device(whole, updater, 1, 6)
    updater.fetch()
    trainer, updater = on_device(algorithm, source, TASKS, TASKS, CPU, steps=6, every=6)
    advance_on_device(trainer, updater, 1, 2)
    updater.fetch()
    trainer.state = TrainState.restored(trainer.state.snapshot({}, {}), trainer.outer.start)
    further = DeviceUpdater(trainer, work_of(algorithm, source, every=6))
    advance_on_device(trainer, further, 3, 4)
    further.fetch()
    assert all(trainer.state.params[name].equal(value) for name, value in whole.state.params.items())


def work_of(algorithm: Algorithm, source: TaskSource, every: int = 4, **others: Any) -> DeviceWork:
    return DeviceWork(algorithm, source, CPU, torch.float32, tree_sum, every, **others)


def test_momentum_and_an_average_stay_on_the_device_too() -> None:
    source, algorithm = waves(), learner_of(waves())
    outer = sgd(rates=Rates(RATE), momentum=0.9)
    start = algorithm.init(torch.Generator().manual_seed(0))
    trainers = [trainer_of(algorithm, source, TASKS, TASKS, CPU) for _ in range(2)]
    for trainer in trainers:
        trainer.outer, trainer.settings = outer, replace(trainer.settings, steps=4)
        trainer.state = TrainState.new(start, outer.start)
        trainer.state.average = Average(0.5, trainer.state.params, steps=1)
    updater, host = DeviceUpdater(trainers[0], work_of(algorithm, source)), HostUpdater(trainers[1])
    learner, here = (trainer.state for trainer in trainers)
    for step in range(1, 5):
        tasks = [torch.arange((step - 1) * TASKS, step * TASKS)]
        for one in (updater, host):
            one.advance(tasks, step, RATE)
        updater.settle()
    updater.fetch()
    assert learner.average is not None and here.average is not None
    assert learner.average.steps == here.average.steps == 5
    for name, value in here.average.params.items():
        torch.testing.assert_close(learner.params[name], here.params[name], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(learner.average.params[name], value, rtol=1e-5, atol=1e-7)
        assert not value.equal(here.params[name]) and not value.equal(start[name])


class Poisoned:
    """A source one of whose tasks has a number that is not finite."""

    def __init__(self, source: TaskSource, task: int) -> None:
        self._source, self._task = source, task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def episodes(self, split: str, indices: Tensor) -> Episode:
        support, query = self._source.episodes(split, indices)
        y = torch.where((indices == self._task).view(-1, 1, 1), math.inf, query.y)
        return Episode(support, Batch(query.x, y))


def test_a_step_that_is_not_finite_is_named_and_skipped() -> None:
    source = Poisoned(waves(), task=9)
    algorithm = learner_of(waves())
    trainer, updater = on_device(algorithm, source, TASKS, TASKS, CPU, steps=8, every=8)
    advance_on_device(trainer, updater, 1, 2)
    updater.fetch()
    learner = trainer.state
    before = {name: value.clone() for name, value in learner.params.items()}
    with pytest.raises(NotFiniteError, match="step 3") as raised:
        advance_on_device(trainer, updater, 3, 3)
    updater.fetch()
    assert raised.value.step == 3
    assert all(learner.params[name].equal(value) for name, value in before.items())
    assert learner.optimizer.state_dict()["state"][0]["step"] == 2


class Noted(RunLog):
    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []

    def step(self, step: int, values: Any) -> None:
        self.steps.append((step, dict(values)))


def whole_run(source: TaskSource, steps: int, every: int) -> tuple[Noted, Trainer]:
    algorithm, log = learner_of(waves()), Noted()
    trainer = trainer_of(algorithm, source, TASKS, TASKS, CPU)
    trainer.settings, trainer.log = replace(trainer.settings, steps=steps, val_every=100), log
    trainer.updates = partial(steps_on_device, work_of(algorithm, source, every)) if every else None
    return log, trainer


def test_the_loop_logs_every_step_in_its_turn() -> None:
    (log, device), (of_host, host) = whole_run(waves(), 7, 3), whole_run(waves(), 7, 0)
    device.fit()
    host.fit()
    assert [step for step, _ in log.steps] == [step for step, _ in of_host.steps] == list(range(1, 8))
    for (_, ours), (_, theirs) in zip(log.steps, of_host.steps, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    assert device.state.step == host.state.step == 7
    assert device.state.seconds == pytest.approx(sum(v["step_seconds"] for _, v in log.steps), rel=0.9)


def test_a_wait_for_tasks_is_cut_and_earlier_steps_saved() -> None:
    """By a request that comes while the tasks of step 6 are drawn; figures are read each 4 steps."""
    waits = itertools.count(1)

    @contextmanager
    def interruptible() -> Iterator[None]:
        if next(waits) == 6:
            raise Interrupted
        yield

    (log, stopped), (_, short) = whole_run(waves(), 9, 4), whole_run(waves(), 5, 4)
    stopped.stops = Stops(lambda: False, interruptible)
    with pytest.raises(Stopped, match="stopped after step 5, which is saved"):
        stopped.fit()
    assert stopped.state.step == 5 and [step for step, _ in log.steps] == [1, 2, 3, 4, 5]
    short.fit()
    assert all(stopped.state.params[name].equal(value) for name, value in short.state.params.items())


def test_the_loop_names_the_task_of_a_step_that_it_reads_later() -> None:
    log, trainer = whole_run(Poisoned(waves(), task=9), 8, 8)
    with pytest.raises(DivergedError, match=r"step 3: task 9, on worker0") as raised:
        trainer.fit()
    assert raised.value.step == 3 and [step for step, _ in log.steps] == [1, 2]


def taken_by_host(caplog: pytest.LogCaptureFixture, algorithm: Algorithm, source: TaskSource, **others: Any) -> str:
    """Why the host takes the steps of a run."""
    trainer = trainer_of(algorithm, source, TASKS, TASKS, CPU)
    with caplog.at_level("WARNING", "metalearn"):
        assert type(steps_on_device(work_of(algorithm, source, **others), trainer)) is HostUpdater
    return caplog.text


def own_network(p: float) -> Algorithm:
    """MAML on a network of one's own, with dropout and a fixed first layer."""

    def make() -> nn.Module:
        network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 1))
        network[0].requires_grad_(False)
        return network

    model = model_of(make, name="Net", inputs=of_reals((1,)), transductive=True, advice="", dropout=True)
    return with_fixed(maml(model=model, inner_lr=0.01, inner_steps=1, eval_steps=1), model)


def test_fixed_parameters_stay_as_they_are() -> None:
    learner, start = compared(own_network(0.0), waves(), 2)
    for name, value in learner.params.items():
        assert torch.equal(value, start.params[name]) == name.startswith("state.fixed.")


def times(factor: Callable[[Any], Any]) -> Algorithm:
    """MAML whose gradients are multiplied by a function of the number of the step."""
    exact = learner_of(waves())

    def scaled(params: Params, episode: Episode, step: int) -> ChunkResult:
        result = exact.meta_grad(params, episode, step)
        return result._replace(grads={name: g * factor(step) for name, g in result.grads.items()})

    return exact._replace(meta_grad=scaled)


DRAWS, TORCH_DRAWS = random.Random(0), torch.Generator().manual_seed(0)
STEP, OTHER = "depends on the number of the step", "another gradient the second time"
BY_HOST: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "a table by step": (lambda: times(lambda step: {1: 0.5}.get(step, 1.0)), STEP),
    "bits of the step": (lambda: times(lambda step: 1.0 if step & 1 else 0.5), STEP),
    "a tensor of the step": (lambda: times(lambda step: torch.full((), step)), "_NoNumber"),
    "maml_pp": (
        lambda: maml_pp(
            model=conv4(ways=3, channels=1, image_size=12, filters=16, activation="relu"), inner_lr=0.5, inner_steps=2,
            eval_steps=2, multi_step_until=10, first_order_until=5, learned_rates=True, per_step_norm=False,
        ), STEP),
    "random": (lambda: times(lambda step: DRAWS.random()), OTHER),
    "a generator": (lambda: times(lambda step: torch.rand((), generator=TORCH_DRAWS)), OTHER),
    "dropout": (lambda: own_network(0.5), "draws random numbers in training"),
    "a reducer": (lambda: learner_of(waves()), "the reducer does more than add"),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HOST)
def test_what_a_graph_cannot_repeat_is_computed_by_the_host(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = BY_HOST[name]
    source = characters() if name == "maml_pp" else waves()
    assert reason in taken_by_host(caplog, make(), source, only_adds=name != "a reducer")


@pytest.mark.parametrize("chunk", [8, 2])
def test_samples_come_in_the_micro_batches_of_the_host(chunk: int) -> None:
    algorithm, source, _ = training_of("supervised")
    compared(algorithm, source, 2, tasks=8, chunk=chunk)


class ByNumber:
    """A source around another."""

    def __init__(self) -> None:
        self.inside = characters()
        for name in ("classes", "unit", "shots_of", "bytes_of"):
            setattr(self, name, getattr(self.inside, name))

    def pictures_of(self, split: str) -> Tensor:
        return self.inside.pictures_of(split)  # type: ignore[attr-defined,no-any-return]

    def numbers(self, split: str, indices: Tensor) -> Tensor:
        return self.inside.numbers(split, indices)  # type: ignore[attr-defined,no-any-return]

    def episodes(self, split: str, indices: Tensor) -> Episode:
        return self.inside.episodes(split, indices)


def test_a_source_around_another_keeps_its_own_episodes() -> None:
    class Brighter(ByNumber):
        def episodes(self, split: str, indices: Tensor) -> Episode:
            return Episode(*(Batch(x + 1, y) for x, y in self.inside.episodes(split, indices)))

    feed = module.feed_of(work_of(learner_of(characters()), Brighter()), TASKS, range(TASKS), TASKS)  # type: ignore[arg-type]
    assert type(feed) is WholeEpisodes and feed.tasks()[0].support.x.min() >= 1


@pytest.mark.parametrize(("what", "reason"), [("brighter", "its episodes are others"), ("wide", "12×24 pixels")])
def test_only_the_episodes_pictures_are_gathered(what: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    class Other(ByNumber):
        def pictures_of(self, split: str) -> Tensor:
            pictures: Tensor = self.inside.pictures_of(split)  # type: ignore[attr-defined]
            return torch.cat([pictures, pictures], dim=2) if what == "wide" else 255 - pictures

        numbers, episodes = ByNumber.numbers, ByNumber.episodes

    with caplog.at_level("INFO", "metalearn"):
        feed = module.feed_of(work_of(learner_of(characters()), Other()), TASKS, range(TASKS), TASKS)  # type: ignore[arg-type]
    assert type(feed) is WholeEpisodes and reason in caplog.text


def test_a_run_that_ends_early_ends_its_thread() -> None:
    source = characters()
    trainer, updater = on_device(learner_of(source), source, TASKS, TASKS, CPU, steps=10_000, every=2)
    advance_on_device(trainer, updater, 1, 2)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tasks ahead")]
    assert threads
    del updater
    gc.collect()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


class Small(DeviceUpdater):
    """A device that computes two tasks at once, and no more."""

    def __init__(self, trainer: Trainer, work: DeviceWork) -> None:
        if not isinstance(trainer.training.chunk, int) or trainer.training.chunk > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        super().__init__(trainer, work)


def started_as(
    kind: type[DeviceUpdater], monkeypatch: pytest.MonkeyPatch, chunk: int = 6, pairs: bool = True
) -> list[int]:
    """The sizes of the chunks of a step of six tasks, where what takes it is of such a class."""
    source, algorithm = waves(), learner_of(waves())
    trainer = trainer_of(algorithm, source, 6, chunk, CPU)
    monkeypatch.setattr(module, "DeviceUpdater", kind)
    assert isinstance(steps_on_device(work_of(algorithm, source, pairs=lambda: pairs), trainer), kind)
    return [len(tasks) for tasks in trainer.tasks_of(1)]


def test_what_does_not_fit_the_memory_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert started_as(Small, monkeypatch) == [2, 2, 2]
    for chunk in (4, 2):
        assert f"so {chunk} are computed at once; the parameters stay the same" in caplog.text


@pytest.mark.parametrize(("pairs", "chunk", "advice"), [(False, 6, 4), (True, 3, 2)])
def test_what_does_not_fit_is_named_if_halves_change_bits(
    pairs: bool, chunk: int, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=rf"{chunk} tasks at once do not fit .*3\.00 GiB.*trainer.task_chunk={advice}"):
        started_as(Small, monkeypatch, chunk, pairs)


class Card:
    """Streams and graphs of a GPU that is not there. The end of a recording fails after an error in it, as torch's does
    where a stream was not joined or an operation was not allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording, self.current, card = False, "usual", self

        class Stream:
            def __init__(self, *_: object, name: str = "of the recording", **__: object) -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None: ...

        class Recording:
            def __init__(self, graph: object, stream: Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                card.recording, card.current = True, self.stream.name

            def __exit__(self, kind: type | None, *_: object) -> None:
                card.recording = False
                if kind is not None:
                    raise RuntimeError("CUDA error: capturing stream has unjoined work")
                card.current = "usual"

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", Recording)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(name=self.current))
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream.name))


class Recorded(DeviceUpdater):
    """It records its graph on such a card, and `fails(chunk)` in the recording."""

    card: Card
    fails: Callable[[Any], None]
    kept: tuple[weakref.ref[Tensor], ...] = ()

    def __init__(self, *others: Any) -> None:
        assert self.card.current == "usual" and not any(value() is not None for value in self.kept)
        super().__init__(*others)
        self.graph = self._recorded()

    def _whole_step(self) -> None:
        if self.card.recording:
            type(self).fails(self._trainer.training.chunk)
        super()._whole_step()


def test_what_does_not_fit_in_a_recording_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(chunk: int) -> None:
        if chunk > 2:
            large = torch.zeros(1)
            Recorded.kept = (*Recorded.kept, weakref.ref(large))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    Recorded.card, Recorded.fails, Recorded.kept = Card(monkeypatch), fails, ()
    assert started_as(Recorded, monkeypatch) == [2, 2, 2] and len(Recorded.kept) == 2
    assert "so 2 are computed at once; the parameters stay the same" in caplog.text


def test_the_first_error_of_a_recording_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(chunk: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    Recorded.card = card = Card(monkeypatch)
    Recorded.fails = fails
    monkeypatch.setattr(module, "DeviceUpdater", Recorded)
    assert "operation not permitted" in taken_by_host(caplog, learner_of(waves()), waves())
    assert card.current == "usual"


def test_the_host_computes_the_chunks_that_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Neither(Small):
        def __init__(self, trainer: Trainer, work: DeviceWork) -> None:
            super().__init__(trainer, work)
            raise module.NotRecordedError("it cannot be recorded")

    log, trainer = whole_run(waves(), 1, 1)
    counts, computed = [], trainer.strategy.map
    monkeypatch.setattr(module, "DeviceUpdater", Neither)
    monkeypatch.setattr(
        trainer.strategy, "map",
        lambda params, tasks, step: counts.append([len(t) for t in tasks]) or computed(params, tasks, step),
    )  # fmt: skip
    trainer.updates = partial(steps_on_device, work_of(learner_of(waves()), waves(), pairs=lambda: True))
    trainer.fit()
    assert counts == [[2, 2]] and len(log.steps) == 1


class Growing:
    """Tasks whose support sets grow after the first ones."""

    def __init__(self, first: int = 2 * TASKS) -> None:
        self._first = first

    classes, unit = staticmethod(lambda split: None), staticmethod(lambda split: "tasks")

    def episodes(self, split: str, indices: Tensor) -> Episode:
        shots = 5 if int(indices[0]) < self._first else 6
        return sinusoid(shots=shots, queries=5, eval_queries=5, seeds=Seeds(0, 0)).episodes(split, indices)


@pytest.mark.parametrize(
    "source",
    [Growing(), sinusoid(shots=[2, 4], queries=3, eval_queries=3, seeds=Seeds(0, 0))],
    ids=["from step to step", "within a step"],
)
def test_tasks_of_another_shape_are_computed_without_the_graph(source: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "metalearn"):
        compared(learner_of(waves()), source, 4)
    assert caplog.text.count("tasks differ in their shapes") == 1


class FewerClasses:
    """Tasks that have three classes in the first two steps, then two in as many samples."""

    classes, unit = staticmethod(lambda split: 3), staticmethod(lambda split: "tasks")

    def episodes(self, split: str, indices: Tensor) -> Episode:
        support, query = characters(queries=2).episodes(split, indices)
        if int(indices[0]) < 2 * TASKS:
            return Episode(support, query)
        return Episode(*(Batch(part.x, part.y.clamp(max=1)) for part in (support, query)))


def test_labels_are_not_looked_at_for_the_number_of_classes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU the host would wait for it. Where the number changes, the host starts the operations of the step."""
    looked: list[int] = []
    by_torch = torch.nn.functional.one_hot
    monkeypatch.setattr(torch.nn.functional, "one_hot", lambda y, ways: looked.append(ways) or by_torch(y, ways))
    algorithm = protonet(model=conv4(ways=3, channels=1, image_size=12, filters=16, activation="softplus"))
    source: Any = FewerClasses()
    with caplog.at_level("INFO", "metalearn"):
        compared(algorithm, source, 4)
    assert looked == [-1] * 4 and caplog.text.count("shapes or classes") == 1  # by the host's four steps alone


def test_tasks_of_different_ways_have_no_class_count() -> None:
    feed = WholeEpisodes.__new__(WholeEpisodes)
    x, three = torch.zeros(2, 3, 1), torch.tensor([[0, 1, 2]] * 2)
    assert feed.ways_of([x, three, x, three]) == 3
    assert feed.ways_of([x, torch.tensor([[0, 1, 2], [0, 1, 1]]), x, three]) is None
    assert feed.ways_of([x, three.float(), x, three.float()]) is None
    assert feed.ways_of([x[:, :0], three[:, :0], x, three]) is None


def functions() -> PriorTasks:
    """Groups of two tasks, of one to five known points."""
    return gp_prior(
        kernel="rbf", length=0.3, noise=0.1, features=1, rows=9, known=[1, 5], group=2, seeds=Seeds(0, 0)
    )  # fmt: skip


def test_tasks_that_come_in_groups_stay_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """A step of four tasks has two groups, of two shapes. The host starts the operations."""
    source = functions()
    algorithm = pfn(model=table(head="gaussian", form="rows", width=8, heads=2, layers=1, frequency=2.0))

    def end(split: str, task: int) -> int:
        return task + 2 - task % 2

    device, host = (trainer_of(algorithm, source, TASKS, 2, CPU) for _ in range(2))
    for trainer in (device, host):
        trainer.training = trainer.training._replace(chunk=end)
        trainer.settings = replace(trainer.settings, steps=6)
    with caplog.at_level("INFO", "metalearn"):
        updater = steps_on_device(work_of(algorithm, source)._replace(every=3), device)
    assert isinstance(updater, DeviceUpdater)
    assert "stay on the device; tasks differ in shape, so the host starts the operations" in caplog.text
    shapes = set()
    for step in range(1, 7):
        tasks = [torch.arange(first, first + 2) for first in range((step - 1) * TASKS, step * TASKS, 2)]
        shapes |= {tuple(source.episodes("train", part).support.x.shape) for part in tasks}
        updater.advance(tasks, step, RATE)
        if step % 3 == 0:
            updater.settle()
        HostUpdater(host).advance(tasks, step, RATE)
    updater.fetch()
    assert len(shapes) > 2 and "differ in their shapes or classes" not in caplog.text
    same(device.state, host.state)


@pytest.mark.parametrize("kind", [DataError, RuntimeError])
def test_an_error_of_a_later_step_comes_out_as_it_is(kind: type[Exception]) -> None:
    """In a step whose tasks have another shape, which the host starts."""
    exact = learner_of(waves())

    def failing(params: Params, episode: Episode, step: int) -> ChunkResult:
        if episode.support.x.shape[1] > 5:
            raise kind("model.classes=10: a task has 11 classes")
        return exact.meta_grad(params, episode, step)

    algorithm, source = exact._replace(meta_grad=failing), Growing()
    trainer, updater = on_device(algorithm, source, TASKS, TASKS, CPU, steps=4, every=4)  # type: ignore[arg-type]
    advance_on_device(trainer, updater, 1, 2)
    with pytest.raises(kind, match=r"^model\.classes=10: a task has 11 classes$"):
        advance_on_device(trainer, updater, 3, 3)


@pytest.mark.parametrize(("shots", "seed", "tasks"), [([1, 2], 1, 1), ([1, 5], 0, 2), ("meta_dataset", 0, 4)])
def test_tasks_of_differing_shapes_are_made_by_the_host(shots: Any, seed: int, tasks: int) -> None:
    """Task 0 of the first source happens to have the largest number of shots."""
    spec = EpisodeSpec(2, shots, 3)
    source = glyphs(episode=spec, image_size=8, channels=1, rotations=False, seeds=Seeds(seed, 1))
    work = work_of(learner_of(waves()), source)
    assert isinstance(module.feed_of(work, tasks, range(tasks), tasks), WholeEpisodes)
