"""Second-order derivatives through a transformer.

python -m benchmarks.transformer [INNER_STEPS]

4 layers of width 128 with 4 heads, 4 sequences of 128 tokens; one thread. Each row is a process of its own: the CPU
time of a derivative, and the memory that it adds. The first row is a meta-gradient of MAML with one inner step, and its
largest error beside float64, relative to the largest derivative. The others are the derivative of the end of a descent
(`metalearn.bilevel`) by its start; `all` of more than 10 steps is that of 5 and 10, carried on.
"""

import json
import os
import resource
import subprocess
import sys
import time

LAYERS, WIDTH, HEADS, LENGTH, SEQUENCES = 4, 128, 4, 128, 4


def main() -> None:
    longest = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print("way    steps  seconds       MiB     error")
    measured("maml", 1)
    short, long = (measured("all", steps) for steps in (5, 10))
    saving = measured("points", longest)
    for key in ("seconds", "mebibytes"):
        naive = long[key] + (long[key] - short[key]) / 5 * (longest - 10)
        print(f"{longest} steps, all: {naive:.1f} {key}; points {saving[key]:.1f}, {saving[key] / naive:.3f} of it")


def measured(way: str, steps: int) -> dict[str, float]:
    """One row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transformer", way, str(steps)]
    said = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    row: dict[str, float] = json.loads(said.splitlines()[-1])
    print(f"{way:6} {steps:5} {row['seconds']:8.3f} {row['mebibytes']:9.0f} {row.get('error', 0):9.1e}", flush=True)
    return row


def compute(way: str, steps: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from torch import Generator, Tensor, nn
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from metalearn.algorithms.maml import maml
    from metalearn.bilevel import descent
    from metalearn.models.common.adapter import model_of
    from metalearn.types import Batch, Episode, Params

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.body(x).mean(dim=1))
            return y

    model = model_of(Reader, name="Reader", shape=(LENGTH, WIDTH), transductive=True, advice="")
    params = model.init(Generator().manual_seed(0))
    x = torch.randn(2, 1, SEQUENCES, LENGTH, WIDTH, generator=Generator().manual_seed(1))
    y = torch.arange(SEQUENCES)

    def of_maml(params: Params, length: int) -> Params:
        episode = Episode(*(Batch(part[:, :, :length].to(params["head.bias"]), y.unsqueeze(0)) for part in x))
        return maml(model=model, inner_lr=0.01, inner_steps=steps, eval_steps=steps).meta_grad(params, episode, 1).grads

    def of_descent(params: Params, length: int) -> Params:
        network, start = Reader(), {name: value.clone().requires_grad_() for name, value in params.items()}

        def inner(w: Params, outer: Params, step: int) -> Tensor:
            return F.cross_entropy(functional_call(network, w, x[0, 0, :, :length]), y)

        with sdpa_kernel(SDPBackend.MATH):
            end = descent(inner, start, {}, steps=steps, rate=0.01, memory=way)
            query = F.cross_entropy(functional_call(network, end, x[1, 0, :, :length]), y)
            return dict(zip(start, torch.autograd.grad(query, list(start.values())), strict=True))

    derivative = of_maml if way == "maml" else of_descent
    torch.backends.mha.set_fastpath_enabled(False)  # it has no derivatives
    derivative(params, 8)  # what is loaded by the first call
    before, began = peak(), time.process_time()
    grads = derivative(params, LENGTH)
    row = {"seconds": time.process_time() - began, "mebibytes": peak() - before}
    if way == "maml":
        exact = derivative({name: value.double() for name, value in params.items()}, LENGTH)
        largest = max(float(value.abs().max()) for value in exact.values())
        row["error"] = max(float((grads[name].double() - exact[name]).abs().max()) for name in exact) / largest
    return row


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(compute(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
