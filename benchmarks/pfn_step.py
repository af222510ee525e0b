"""How long a training step of a network of tables takes, what its products cost, and how fast tasks are drawn.

    python -m benchmarks.pfn_step [--beside FOLDER]
    python -m benchmarks.pfn_step --device cuda

32 tables of 150 rows and 5 features with two classes, 75 rows known, one thread: the sizes at which nanoTabPFN's own
code (width 96, 4 heads, 3 blocks, MLP 192) was measured. The variants take turns, and the median CPU time of each is
shown beside that of the first. FOLDER is a checkout of github.com/automl/nanoTabPFN, whose model then takes its turns,
too. On a GPU: the tables a second of steps of 32 tables and more, started by the host or as one CUDA graph, and how
many cores that draw tables feed it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import best_time
from benchmarks.nanotabpfn import network_of
from benchmarks.ways import GradientWay, recording
from metalearn.algorithms.common.functional import leaves
from metalearn.algorithms.pfn import pfn
from metalearn.config.build import build
from metalearn.config.compose import compose_config
from metalearn.models.table import table
from metalearn.nn.attention import products_attention
from metalearn.nn.precision import computing_with
from metalearn.nn.surroundings import surrounded
from metalearn.types import Batch, Episode

TABLES, ROWS, KNOWN, FEATURES = 32, 150, 75, 5


def step_of(form: str, precision: str, tables: int = TABLES, device: str = "cpu") -> GradientWay:
    """The gradient of one step."""
    algorithm = pfn(model=table(head="classes", form=form, width=96, heads=4, layers=3))
    start, generator = algorithm.init(torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    params = {name: value.to(device) for name, value in start.items()}
    x = torch.randn(tables, ROWS, FEATURES, generator=generator).to(device)
    y = (x.sum(dim=2) > 0).long()
    episode = Episode(Batch(x[:, :KNOWN], y[:, :KNOWN]), Batch(x[:, KNOWN:], y[:, KNOWN:]))

    def step() -> list[Tensor]:
        with computing_with(precision), surrounded(ways=2):
            return list(algorithm.meta_grad(params, episode, 1).grads.values())

    return step


def theirs(folder: Path) -> Callable[[], object]:
    """The gradient of one step by nanoTabPFN's own model.py."""
    network = network_of(folder, 2)
    x = torch.randn(TABLES, ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    y = (x.sum(dim=2) > 0).long()

    def step() -> None:
        logits = network((x, y[:, :KNOWN].float()), train_test_split_index=KNOWN)
        F.cross_entropy(logits.flatten(0, 1), y[:, KNOWN:].flatten()).backward()
        network.zero_grad()

    return step


def attention_of(kind: str, sequences: int, queries: int, keys: int) -> Callable[[], object]:
    """Attention of width 96 with 4 heads, forwards and backwards."""
    sizes = (queries, keys, keys)
    q, k, v = leaves({str(i): torch.randn(sequences, size, 96) for i, size in enumerate(sizes)}).values()

    def fused() -> Tensor:
        parts = (value.unflatten(2, (4, 24)).transpose(1, 2) for value in (q, k, v))
        return F.scaled_dot_product_attention(*parts).transpose(1, 2)

    compute = fused if kind == "fused" else partial(products_attention, q, k, v, 4)
    return lambda: torch.autograd.grad(compute().sum(), (q, k, v))


def compared(variants: dict[str, Callable[[], object]], rounds: int) -> None:
    """Prints the median CPU time of each variant. They take turns, so that a busy machine hurts all alike."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, run in variants.items():
            began = time.process_time()
            run()
            if round_:  # the first one warms up
                times[name].append(time.process_time() - began)
    base = statistics.median(next(iter(times.values())))
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:<44} {middle * 1e3:8.1f} ms   {middle / base:5.2f}")


def on_gpu() -> None:
    """Prints the tables a second that a GPU computes."""
    a_core = drawn("pfn_tables")
    print(f"a core draws {a_core:.0f} tables of pfn_tables a second")
    for form, precision, tables in product(("rows", "cells"), ("float32", "tf32", "bf16"), (32, 256, 2048)):
        step = step_of(form, precision, tables, "cuda")
        words = [f"{way}: {rate_of(step, tables, a_core, graph)}" for way, graph in (("host", False), ("graph", True))]
        print(f"form={form}, precision={precision}, {tables} tables; {'; '.join(words)}", flush=True)


def rate_of(step: GradientWay, tables: int, a_core: float, graph: bool) -> str:
    """The tables a second of a step that the host starts, or of a graph of it; and how many cores draw as many."""
    try:
        rate = tables / best_time(recording(step) if graph else step, "cuda", 0.5)
    except RuntimeError as error:  # no memory; or what cannot be a graph
        return str(error).splitlines()[0]
    return f"{rate:.0f} a second, as {rate / a_core:.1f} cores draw"


def drawn(experiment: str, seconds: float = 5.0) -> float:
    """Training tasks that a core draws in a second of CPU time."""
    source = build(compose_config([f"experiment={experiment}", "dataset.group=64"]).config, "dataset")
    began, groups = time.process_time(), 0
    while time.process_time() - began < seconds:
        source.episodes("train", torch.arange(64 * groups, 64 * (groups + 1)))
        groups += 1
    return 64 * groups / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where steps are computed (cpu)")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="a checkout of nanoTabPFN")
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    if options.device == "cuda":
        on_gpu()
        return
    steps = {"step of nanoTabPFN": theirs(options.beside)} if options.beside else {}
    steps |= {
        f"step, form={form}, precision={precision}": step_of(form, precision)
        for form, precision in product(("cells", "rows"), ("float32", "bf16"))
    }
    compared(steps, rounds)
    for experiment in ("pfn_tables", "pfn_gp"):
        print(f"{f'tasks of {experiment} that a core draws':<44} {drawn(experiment):8.0f} a second")
    for name, sizes in {"over rows": (TABLES * (FEATURES + 2), ROWS, KNOWN), "over columns": (4800, 7, 7)}.items():
        compared({f"attention {name}, {kind}": attention_of(kind, *sizes) for kind in ("fused", "products")}, rounds)


if __name__ == "__main__":
    main()
