"""Meta-steps that stay on a GPU: parameters, optimiser and pictures lie there, and a step is one CUDA graph.

The host draws the numbers of the next tasks meanwhile, and reads the figures of several steps at once. A step whose
loss or gradient is not finite is skipped by the GPU, and so is every later one; the host finds that when it reads.
"""

import gc
import logging
import multiprocessing
import os
import signal
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from metalearn.errors import RunError, first_line
from metalearn.nn.backends import on_gpu
from metalearn.nn.surroundings import PassSeeds, surrounded
from metalearn.runs.signals import PREEMPTIONS, end_with_parent
from metalearn.training.chunks import DATA_SECONDS, chunk_of, episodes_of, placing
from metalearn.training.optimizers import FlatOptimizer, joined
from metalearn.training.settings import AUTO, Chunk, Units, tasks_in_chunks
from metalearn.training.trainer import HostUpdater, Trainer, meta_gradient
from metalearn.types import (
    STATE,
    Algorithm,
    Batch,
    ChunkResult,
    ComesInGroups,
    DrawsByNumber,
    Episode,
    Metrics,
    NotFiniteError,
    Params,
    StepResult,
    TaskSource,
    Updater,
)

MOST_STEPS = 1000  # steps whose figures are kept on the device at most
SHARE = 0.25  # the part of the device's free memory that the pictures may take
ALL = "all weights"
ROWS = 256  # the rows in which the gradient's norm is computed
WARM_UP = 2  # steps before the graph is recorded: kernels are compiled, and libraries take their memory
T = TypeVar("T")

log = logging.getLogger("metalearn")


class DeviceWork(NamedTuple):
    """What is computed: the algorithm on the tasks of a source, on a device in a type. Figures are read every `every`
    steps. `add` adds up the results of tasks as the strategy does those of chunks; `only_adds`: the reducer needs
    only such sums. `pairs()`: tasks are added in pairs, so that chunks of 1, 2, 4, … tasks give the bits of one chunk.
    `draw_ahead` processes draw the tasks of later steps, or `auto`."""

    algorithm: Algorithm
    source: TaskSource
    device: torch.device
    dtype: torch.dtype
    add: Callable[[Sequence[ChunkResult]], ChunkResult]
    every: int
    only_adds: bool = True
    pairs: Callable[[], bool] = bool
    draw_ahead: int | str = AUTO


class NotRecordedError(Exception):
    """Why a step cannot be a graph."""


def steps_on_device(work: DeviceWork, trainer: Trainer) -> Updater:
    """The `Updater` of a run: one on the device, or, where a step cannot stay there, that of the host, which a line of
    the log explains. Where a chunk does not fit the device, the trainer gets smaller ones."""
    if trainer.settings.steps == 0:
        return HostUpdater(trainer)
    if trainer.strategy.shares is None:
        if work.draw_ahead not in (AUTO, 0):
            why = "has no effect, since steps of this strategy pass through the host"
            log.warning("trainer.draw_ahead=%s: %s", work.draw_ahead, why)
        return HostUpdater(trainer)
    while True:
        try:
            updater = DeviceUpdater(trainer, work)
        except NotRecordedError as reason:
            log.warning("every operation of a step is started by the host, which is slower: %s", reason)
            return HostUpdater(trainer)
        except torch.cuda.OutOfMemoryError as error:
            chunk = trainer.training.chunk
            if not isinstance(chunk, int):
                raise
            # About half as many tasks at once, where that changes no bit.
            stays = work.pairs() and (chunk >= trainer.settings.meta_batch_size or chunk.bit_count() == 1)
            smaller = 2 ** max(0, (chunk - 1).bit_length() - 1)
            what = f"{chunk} {trainer.training.unit} at once do not fit the memory of {work.device}"
            if not stays or smaller == chunk:
                advice = f"type trainer.task_chunk={smaller}" if smaller < chunk else "type a smaller model"
                raise RunError(f"{what} ({first_line(error)}); {advice}") from error
            log.warning("%s, so %d are computed at once; the parameters stay the same", what, smaller)
            trainer.training = trainer.training._replace(chunk=smaller)
        else:
            log.info("%s; the host reads figures every %d steps", updater.line, updater.every)
            return updater
        gc.collect()  # where the end of a recording has failed, its error keeps what did not fit, and itself
        if work.device.type == "cuda":  # now that nothing refers to it
            torch.cuda.empty_cache()


class _NoSeeds(PassSeeds):
    """Stands for the seeds of a step, which a graph would repeat."""

    def of_pass(self, tasks: int) -> list[int]:
        raise NotRecordedError("the network draws random numbers in training, such as those of dropout")


def _refuse(*_: object) -> NoReturn:
    raise NotRecordedError("the algorithm depends on the number of the step")


OPERATIONS = """bool eq ne lt le gt ge int float index hash str format repr neg abs add radd sub rsub mul rmul
    floordiv rfloordiv truediv rtruediv mod rmod pow rpow divmod and rand or ror xor rxor lshift rshift getattr"""
"""What can be done with a number."""

_NoNumber = type("_NoNumber", (), {f"__{operation}__": _refuse for operation in OPERATIONS.split()})
"""Stands for the number of a step: a graph has none, so an algorithm that computes with it is found out."""


# Tasks of the next steps, drawn while the device computes: by a thread, or by processes

AHEAD = 16  # steps whose tasks a thread draws ahead; two for each process
MOST_PROCESSES = 16  # processes that draw with `trainer.draw_ahead=auto`
PATIENCE = 10
"""Seconds in which a process must have drawn the tasks of a step. Tasks on which it takes longer gain nothing by it."""

_NO_PROCESSES = "no processes draw tasks ahead, so the run draws them: %s"

Made = Callable[[int], list[Tensor]]  # the tasks of a step by its number, in tensors on the host


def processes_for(draw_ahead: int | str, *, pure: bool) -> int:
    """How many processes draw: as many as are wanted; with `auto` one for each core beside that of the run if the tasks
    are `pure`, functions of their numbers alone, else none."""
    if isinstance(draw_ahead, int):
        return draw_ahead
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1) if pure else 0


class Ahead:
    """Draws the tasks of the steps from `first` to `last`, which are asked for in order.

    With `processes`, forks of this process draw; if they are killed, this process draws, with a line in the log. With a
    `thread`, one thread does. Else tasks are drawn when they are asked for: a user's source may bear no thread.
    """

    def __init__(self, made: Made, first: int, last: int, *, processes: int = 0, thread: bool = False) -> None:
        self._made, self._next, self._last = made, first, last
        self._waiting: deque[Future[Any]] = deque()
        self._pool: Executor | None = None
        if processes:
            # Forks, since a source of the user's own may not be of use elsewhere. They only draw.
            context = multiprocessing.get_context("fork")
            try:
                self._pool = ProcessPoolExecutor(processes, context, _begin, (made, os.getpid()))
                self._pool.submit(int)  # starts them all
            except OSError as error:  # locks lie in /dev/shm, which may be full; or there may be no more processes
                log.warning(_NO_PROCESSES, error)
                self.stop()
        elif thread:
            self._pool = ThreadPoolExecutor(1, "tasks ahead")
        self._most = 2 * processes or AHEAD

    def of(self, step: int) -> list[Tensor]:
        """The tasks of a step."""
        forks = isinstance(self._pool, ProcessPoolExecutor)
        try:
            while self._pool and self._next <= self._last and len(self._waiting) < self._most:
                self._waiting.append(self._pool.submit(_drawn if forks else self._made, self._next))
                self._next += 1
            if self._pool and self._waiting:
                assert self._next - len(self._waiting) == step, "steps are taken in order"
                tasks = self._waiting.popleft().result(PATIENCE if forks else None)
                return [torch.from_numpy(value) for value in tasks] if forks else tasks
        except Exception as error:
            if not forks:
                raise
            if isinstance(error, BrokenExecutor | TimeoutError):  # they were killed, or stopped
                log.warning(_NO_PROCESSES, str(error) or f"none came within {PATIENCE} s")
                self.stop()
            # Else an error of the source: it is met again here. Not every error can be sent.
        return self._made(step)

    def stop(self) -> None:
        """No others are drawn."""
        pool, self._pool = self._pool, None
        if isinstance(pool, ProcessPoolExecutor):
            for process in list((pool._processes or {}).values()):
                process.kill()  # one that hangs would hold up the end of the run, which waits for its pools
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


_made: Made | None = None  # in a process that draws: how


def _begin(made: Made, starter: int) -> None:
    """The first that a fork does. The run saves on these signals; a fork ends with the run."""
    global _made
    end_with_parent()
    if os.getppid() != starter:  # it died before the line above
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, *PREEMPTIONS):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _made = made


def _drawn(step: int) -> list[Any]:
    assert _made is not None
    return [value.numpy() for value in _made(step)]


# The tasks
#
# `drawn(step)` makes the tasks of a step on the host; `buffers` are the tensors on the device that they are copied to;
# `tasks()` is what a step computes with, from these tensors: an episode, or one for each task. `ways_of(drawn)` is the
# number of classes of each of these tasks, or None: they differ, or targets are numbers; `ways` that of `buffers`.


class NotAsNumbersError(Exception):
    """Why the tasks of a source are not gathered by the numbers of their pictures."""


class PicturesByNumber:
    """The pictures of all training classes lie on the device as bytes; a step gets their numbers."""

    def __init__(self, work: DeviceWork, batch: int, share: range) -> None:
        source, tasks = work.source, len(share)
        assert isinstance(source, DrawsByNumber)
        shots = source.shots_of("train")
        assert shots is not None  # else `feed_of` has taken `WholeEpisodes`
        self._source, self._batch, self._share, self._shots = source, batch, share, shots
        pictures = source.pictures_of("train")
        side, width, *colours = pictures.shape[1:]
        if side != width:
            raise NotAsNumbersError(f"its pictures have {side}×{width} pixels, and only squares are turned")
        self._shape = (side, side, colours[0] if colours else 1)
        self._pictures = pictures.flatten(1).to(work.device)
        places = torch.arange(side * side).view(side, side)
        turns = torch.stack([torch.rot90(places, quarters).flatten() for quarters in range(4)])
        self._turns = turns.to(work.device)
        # Not a division on the device: it rounds otherwise than that of the host.
        self._values = (torch.arange(256, dtype=torch.float32) / 255).to(work.device, work.dtype)
        kernels = on_gpu() if work.device.type == "cuda" else None
        self._gathered = None if kernels is None else kernels.gathered
        first = self.drawn(1)
        self.buffers, self.ways = [first[0].to(work.device)], self.ways_of(first)
        ways = first[0].shape[1]
        labels = torch.arange(ways, device=work.device).view(1, ways, 1)
        per_class = first[0].shape[2] - 1
        self._labels = [
            labels.expand(tasks, ways, count).flatten(1).contiguous()
            for count in (self._shots, per_class - self._shots)
        ]
        expected = episodes_of(source, "train", torch.arange(share.start, share.stop), work.algorithm.computes)
        for ours, theirs in zip(*self.tasks(), expected, strict=True):
            if not (ours.x.cpu().equal(theirs.x.to(work.dtype)) and ours.y.cpu().equal(theirs.y)):
                raise NotAsNumbersError("its episodes are others than the pictures of its numbers")

    def drawn(self, step: int) -> list[Tensor]:
        first = (step - 1) * self._batch
        return [self._source.numbers("train", torch.arange(first + self._share.start, first + self._share.stop))]

    def ways_of(self, drawn: list[Tensor]) -> int | None:
        return int(drawn[0].shape[1])

    def tasks(self) -> list[Episode]:
        (numbers,) = self.buffers
        tasks, ways, per_class = numbers.shape[0], numbers.shape[1], numbers.shape[2] - 1
        if self._gathered is not None:
            pictures = self._gathered(self._pictures, self._turns, self._values, numbers, self._shots, self._shape)
            return [Episode(*(Batch(x, y) for x, y in zip(pictures, self._labels, strict=True)))]
        raw = self._pictures[numbers[:, :, 1:]].view(tasks, ways, per_class, -1, self._shape[2])
        turns = self._turns[numbers[:, :, 0]].view(tasks, ways, 1, -1, 1).expand_as(raw)
        values = self._values[raw.gather(3, turns).int()]
        images = values.view(tasks, ways, per_class, *self._shape).movedim(5, 3)
        parts = (images[:, :, : self._shots], images[:, :, self._shots :])
        batches = (Batch(part.flatten(1, 2).contiguous(), y) for part, y in zip(parts, self._labels, strict=True))
        return [Episode(*batches)]


class WholeEpisodes:
    """Tasks of any other kind: the host makes them, and copies them. `numbers(step)` are those of a step's tasks, in
    parts that share their shape where tasks come in groups."""

    def __init__(self, work: DeviceWork, numbers: Callable[[int], list[Tensor]]) -> None:
        self._source, self._numbers, self._loss = work.source, numbers, work.algorithm.computes
        self._cast = placing(torch.device("cpu"), work.dtype)
        first = self.drawn(1)
        self.buffers, self.ways = [value.to(work.device) for value in first], self.ways_of(first)

    def ways_of(self, drawn: list[Tensor]) -> int | None:
        labels = drawn[1::4]
        if any(y.dim() != 2 or y.is_floating_point() for y in labels):
            return None
        most = {number for y in labels if y.shape[1] for number in y.amax(dim=1).tolist()}
        return most.pop() + 1 if len(most) == 1 else None

    def drawn(self, step: int) -> list[Tensor]:
        chunks = (chunk_of(self._source, "train", part, self._loss, first=step == 1) for part in self._numbers(step))
        return [value for tasks in chunks for task in tasks for batch in self._cast(task) for value in batch]

    def tasks(self) -> list[Episode]:
        batches = [Batch(*pair) for pair in zip(self.buffers[::2], self.buffers[1::2], strict=True)]
        return [Episode(*pair) for pair in zip(batches[::2], batches[1::2], strict=True)]


Feed = PicturesByNumber | WholeEpisodes


def feed_of(work: DeviceWork, batch: int, share: range, chunk: Chunk) -> Feed:
    """The tasks by the numbers of pictures that lie on the device, where the source has such and they fit: of the
    `batch` tasks of a step those of this rank's `share`."""
    source, at_once = work.source, len(share) if isinstance(chunk, int) else chunk

    def numbers(step: int) -> list[Tensor]:
        return tasks_in_chunks((step - 1) * batch + share.start, len(share), at_once)

    # The class that makes the episodes must also draw their numbers: a class around it may change them.
    makes = next((kind for kind in type(source).__mro__ if "episodes" in vars(kind)), None)
    if (
        makes is None or "numbers" not in vars(makes) or not isinstance(source, DrawsByNumber)
        or source.shots_of("train") is None
    ):  # fmt: skip
        return WholeEpisodes(work, numbers)
    free = 2**34
    if work.device.type == "cuda":  # also what torch keeps for later
        kept = torch.cuda.memory_reserved(work.device) - torch.cuda.memory_allocated(work.device)
        free = torch.cuda.mem_get_info(work.device)[0] + kept
    try:
        if source.bytes_of("train") > SHARE * free:
            raise NotAsNumbersError(f"its pictures take {source.bytes_of('train') / 2**30:.1f} GiB")
        return PicturesByNumber(work, batch, share)
    except NotAsNumbersError as reason:
        log.info("the host makes every task and copies it, since of this dataset %s", reason)
        return WholeEpisodes(work, numbers)


def drawing(feed: Feed, work: DeviceWork, first: int, last: int) -> Ahead:
    """What draws the tasks of the steps from `first` to `last`."""
    if isinstance(feed, PicturesByNumber):
        return Ahead(lambda step: pinned(feed.drawn(step), work.device), first, last, thread=True)
    processes = processes_for(work.draw_ahead, pure=isinstance(work.source, ComesInGroups)) if first <= last else 0
    if processes:
        log.info("%d processes draw the tasks of later steps", processes)
    return Ahead(feed.drawn, first, last, processes=processes)


def pinned(values: list[Tensor], device: torch.device) -> list[Tensor]:
    """The values where a GPU reads them without a wait of the host."""
    return [value.pin_memory() if device.type == "cuda" and not value.is_pinned() else value for value in values]


class DeviceUpdater:
    """The `Updater` of a process whose steps stay on its device. `graph` is the CUDA graph of a step; None on a CPU."""

    def __init__(self, trainer: Trainer, work: DeviceWork) -> None:
        """Raises NotRecordedError: a step cannot stay on the device."""
        if not work.only_adds:
            raise NotRecordedError("the reducer does more than add, so it gets the gradients on the host")
        if work.dtype == torch.float64:
            raise NotRecordedError("precision=float64 takes its rates in float64, and torch's fused Adam does not")
        state = trainer.state
        if not isinstance(state.optimizer, FlatOptimizer):
            raise NotRecordedError("the optimiser is none of metalearn.training.optimizers")
        self.every = min(work.every, MOST_STEPS)
        self._trainer, self._work = trainer, work
        device, batch = work.device, trainer.settings.meta_batch_size
        self._names = [name for name in state.params if not name.startswith(STATE)]
        values = {name: value.detach().to(device) for name, value in state.params.items()}
        self._flat = joined([values[name] for name in self._names]) if self._names else torch.empty(0, device=device)
        self._params = self._with_weights(self._flat, values)
        self._average = state.average
        self._averaged = self._flat
        if self._average is not None:
            self._averaged = joined(self._average.params[name].to(device) for name in self._names)
        self._weight = torch.zeros((), device=device)
        self._optimizer = trainer.outer.start(self._params)
        self._optimizer.load_state_dict(state.optimizer.state_dict())
        self._grads = torch.zeros(-(-self._flat.numel() // ROWS) * ROWS, device=device, dtype=work.dtype)
        self._rate, self._rate_was = torch.zeros((), device=device), 0.0
        self._bad = torch.ones((), device=device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._first, self._taken = 0, 0
        self._ahead: Ahead | None = None
        shares = trainer.strategy.shares
        assert shares is not None
        self._shares, self._batch, chunk = shares, batch, trainer.training.chunk
        if shares.ranks > 1 and not isinstance(chunk, int):
            raise NotRecordedError("tasks differ in shape, and several ranks share a step")
        self._by_host = not isinstance(chunk, int) or shares.through_host
        self._varies = False
        chunks = tasks_in_chunks(0, batch, chunk)
        self._count, run = len(chunks), shares.run(len(chunks))
        first, end = (sum(map(len, chunks[:number])) for number in (run.start, run.stop))
        self._feed = self._on_all_ranks(lambda: feed_of(work, batch, range(first, end), chunk))
        self._on_all_ranks(self._terms)  # the first ones bring constants to the device
        self.graph: Any = None
        self._try_out()

    def _try_out(self) -> None:
        """Takes a step on trial, twice, and records one. From here on ranks wait for each other, so one that runs out
        of memory cannot begin again by itself."""
        device = self._work.device
        try:
            with _trying():
                figures = self._figures_of_step()
                if not self._by_host:
                    before = self._grads.clone()
                    with without_waits(device):
                        self._figures_of_step()
                    if not before.view(torch.int32).equal(self._grads.view(torch.int32)):
                        why = "the same tasks gave another gradient the second time; a graph would repeat one"
                        raise NotRecordedError(why)
            self._metrics = [name for name in figures if name not in ("finite", "norm")]
            self._columns = [*self._metrics, "norm", "finite"]
            self._ring = torch.zeros(self.every, len(self._columns), dtype=torch.float64, device=device)
            self._read = torch.zeros(self.every, len(self._columns), dtype=torch.float64)
            if device.type == "cuda" and not self._by_host:
                self.graph = self._on_all_ranks(self._recorded)
        except torch.cuda.OutOfMemoryError as error:
            if self._shares.ranks == 1:
                raise
            raise RunError(
                f"the sum of all ranks does not fit the memory of {device} ({first_line(error)}); type a smaller "
                "trainer.task_chunk, or strategy=rpc"
            ) from error

    def _on_all_ranks(self, attempt: Callable[[], T]) -> T:
        """What the attempt gives. Where it fails on a rank, all raise what the first of these has met: ranks that
        computed in other ways, or in other chunks, would not meet in a sum."""
        failure: Exception | None = None
        try:
            with _trying():
                made = attempt()
        except (NotRecordedError, torch.cuda.OutOfMemoryError) as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__} {first_line(failure)}"
        for rank, met in enumerate(self._shares.agree(text)):
            if met:
                name, _, line = met.partition(" ")
                kind = torch.cuda.OutOfMemoryError if name == "OutOfMemoryError" else NotRecordedError
                raise kind(line if self._shares.ranks == 1 else f"rank {rank}: {line}") from failure
        return made

    @property
    def line(self) -> str:
        """What a step is, and where its tasks come from."""
        why = "sums pass through the host" if self._shares.through_host else "tasks differ in shape"
        by_host = f"parameters and optimiser stay on the device; {why}, so the host starts the operations"
        resident = isinstance(self._feed, PicturesByNumber)
        tasks = "the pictures lie on the device" if resident else "the host makes the tasks"
        return f"{by_host if self._by_host else 'a step is one CUDA graph'}; {tasks}"

    def advance(self, tasks: Sequence[Tensor], step: int, rate: float) -> StepResult:
        if self._ahead is None:  # the first step: those of the recording were marked as bad
            self._bad.zero_()
            self._slot.zero_()
            self._first = step
            self._ahead = drawing(self._feed, self._work, step, self._trainer.last)
            weakref.finalize(self, self._ahead.stop)  # a run that ends early lets go of its pictures
        began = time.perf_counter()
        with self._trainer.stops.interruptible():  # another process may take its time, or hang
            drawn = self._ahead.of(step)
        waited = time.perf_counter() - began
        feed = self._feed
        usual = feed.buffers, feed.ways
        alike = [buffer.shape for buffer in feed.buffers] == [value.shape for value in drawn]
        if alike and feed.ways_of(drawn) == feed.ways:
            for buffer, value in zip(feed.buffers, pinned(drawn, self._work.device), strict=True):
                buffer.copy_(value, non_blocking=True)
            self._take(rate)
        else:
            if not (self._varies or self._by_host):
                log.info(
                    "tasks differ in their shapes or classes; the host starts the operations of those that are not as "
                    "the first"
                )
                self._varies = True
            feed.buffers, feed.ways = [value.to(self._work.device) for value in drawn], feed.ways_of(drawn)
            try:
                self._take(rate, recorded=False)
            finally:
                feed.buffers, feed.ways = usual
        self._shares.started()
        row = self._read[self._taken]
        self._taken += 1
        metrics = {name: row[column] for column, name in enumerate(self._metrics)}
        if self._shares.ranks == 1:  # the figure is the sum over all workers
            metrics[DATA_SECONDS] = torch.tensor(waited, dtype=torch.float64)
        result = ChunkResult({}, metrics, self._batch)
        return [result], {"update_seconds": 0.0, "gradient_norm": row[-2]}  # type: ignore[dict-item]

    def _take(self, rate: float, *, recorded: bool = True) -> None:
        if rate != self._rate_was:
            self._rate.fill_(rate)
            self._rate_was = self._optimizer.param_groups[0]["lr"] = rate
        if self._average is not None:
            self._weight.fill_(self._average.next_weight())
        if self.graph is None or not recorded:
            self._whole_step()
        else:
            self.graph.replay()

    def settle(self) -> None:
        self._shares.wait()
        taken, self._taken = self._taken, 0
        self._read[:taken].copy_(self._ring[:taken])
        self._slot.zero_()
        first, self._first = self._first, self._first + taken
        wrong = (self._read[:taken, -1] == 0).nonzero()
        if len(wrong):
            raise NotFiniteError(first + int(wrong[0]))

    def fetch(self) -> None:
        with torch.no_grad():
            for name, value in self._trainer.state.params.items():
                value.copy_(self._params[name])
            if self._average is not None:
                averages = self._with_weights(self._averaged, self._params)
                for name, value in self._average.params.items():
                    value.copy_(averages[name])
        self._trainer.state.optimizer.load_state_dict(self._optimizer.state_dict())

    def _with_weights(self, flat: Tensor, params: Params) -> Params:
        """The parameters with views of `flat` in the place of the weights; state stays."""
        parts = flat.split([params[name].numel() for name in self._names])
        return params | {name: part.view_as(params[name]) for name, part in zip(self._names, parts, strict=True)}

    def _terms(self) -> list[tuple[Params, Metrics]]:
        """The gradients and figures of this rank's chunks, or of its tasks where these differ in shape and come in
        groups."""
        no_number: Any = _NoNumber()
        tasks, size = self._feed.tasks(), self._trainer.training.chunk
        with surrounded(seeds=_NoSeeds(0, 0, ()), ways=self._feed.ways):
            parts = [
                self._work.algorithm.meta_grad(self._params, chunk, no_number)
                for chunk in _chunks_of(tasks, self._trainer.training)
            ]
        if len(tasks) > 1 and isinstance(size, int):  # they differ in shape, so each is an episode of its own
            parts = [self._work.add(parts[first : first + size]) for first in range(0, len(parts), size)]
        return [(part.grads, part.metrics) for part in parts]

    def _figures_of_step(self) -> dict[str, Tensor]:
        """Computes a step, and changes the parameters unless it is bad."""
        result = ChunkResult(*self._shares.add(self._terms(), self._count), self._batch)
        states = {name: value for name, value in result.grads.items() if name.startswith(STATE)}
        as_one = {ALL: joined(result.grads[name] for name in self._names), **states}
        gradient, change = meta_gradient(self._trainer.reduce, [result._replace(grads=as_one)])
        self._grads[: self._flat.numel()] = gradient[ALL]
        numbers = self._grads[: self._flat.numel()]
        # In two steps: torch gives a sum of all to few multiprocessors. In float64 nothing finite overflows.
        norm = torch.linalg.vector_norm(self._grads.view(ROWS, -1), dim=1, dtype=torch.float64).square().sum().sqrt()
        finite = (norm + result.metrics["loss"]).isfinite()
        for value in change.values():
            finite = finite & value.isfinite().all()
        self._bad.copy_(torch.where(finite, self._bad, 1.0))
        self._optimizer.step_of_device(self._flat, numbers, self._rate, self._bad)  # type: ignore[attr-defined]
        for name, value in change.items():
            self._params[name].sub_(torch.where(self._bad > 0, 0.0, value))
        if self._average is not None:
            self._averaged.lerp_(self._flat, torch.where(self._bad > 0, 0.0, self._weight))
        return result.metrics | {"norm": norm, "finite": finite}

    def _whole_step(self) -> None:
        """A step, with its figures in the ring."""
        figures = self._figures_of_step()
        row = torch.stack([figures[name].double() for name in self._columns])
        self._ring.index_copy_(0, self._slot, row.unsqueeze(0))
        self._slot.add_(1).remainder_(self.every)

    def _recorded(self) -> Any:
        """The graph of a step. Before it, steps run that are marked as bad, so that they change nothing."""
        stream = torch.cuda.Stream(self._work.device, priority=-1)  # before what nothing waits for
        usual = torch.cuda.current_stream()
        stream.wait_stream(usual)
        graph = torch.cuda.CUDAGraph()
        try:
            with _trying():
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP):
                        self._whole_step()
                usual.wait_stream(stream)
                with torch.cuda.graph(graph, stream=stream), _trying():
                    self._whole_step()
        finally:
            torch.cuda.set_stream(usual)  # torch.cuda.graph leaves its own where the end of a recording fails
        return graph


def _chunks_of(tasks: list[Episode], units: Units) -> list[Episode]:
    """The tasks of an episode in chunks; or its samples, which are the queries of one task without a support set. Tasks
    that differ in shape are computed one by one."""
    size = units.chunk
    if len(tasks) > 1 or not isinstance(size, int):
        return tasks
    (episode,) = tasks
    along = 0 if units.unit == "tasks" else 1

    def cut(batch: Batch) -> list[Batch]:
        return [Batch(*part) for part in zip(*(value.split(size, along) for value in batch), strict=True)]

    queries = cut(episode.query)
    supports = cut(episode.support) if units.unit == "tasks" else [episode.support] * len(queries)
    return [Episode(*pair) for pair in zip(supports, queries, strict=True)]


@contextmanager
def _trying() -> Iterator[None]:
    """Before the first step, an error is why there is no graph: the host meets it too, or computes. Later errors come
    out as they are. After an error within a recording its end may fail, too; then the first one counts, which may be
    that of the memory."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NotRecordedError | torch.cuda.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is error:
            raise
        line = first_line(error)
        waits = f"the algorithm waits for the device ({line})"
        reason = waits if "synchroniz" in line else f"{type(error).__name__}: {line}"
        raise cause or NotRecordedError(reason) from error


@contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it may overlook a wait: then the recording fails
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
