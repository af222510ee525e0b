"""Second-order derivatives through a transformer.

python -m benchmarks.transformer [INNER_STEPS]

4 layers of width 128 with 4 heads, 4 sequences; one thread. Each row is a process of its own: the CPU time of a
derivative, the least of several, and the memory that it adds. The first rows are of the attention alone, of 16
sequences: its first and its second derivative. Then meta-gradients of MAML with one inner step. Both are by our
attention and by torch's plain one, with their largest error beside float64, relative to the largest derivative. The
others are the derivative of the end of a descent (`metalearn.bilevel`) by its start, on sequences of 128; `all` of more
than 10 steps is that of 5 and 10, carried on.
"""

import json
import os
import resource
import subprocess
import sys
import time

LAYERS, WIDTH, HEADS, SEQUENCES = 4, 128, 4, 4


def main() -> None:
    longest = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print("way        by      length  steps  seconds       MiB     error")
    for way in ("attention", "maml"):
        for length in (128, 512, 2048):
            if way == "attention" or length < 2048:
                ours, torchs = (measured(way, 1, length, by) for by in ("ours", "torch"))
                print(f"{torchs['seconds'] / ours['seconds']:.2f} times as fast")
    short, long = (measured("all", steps) for steps in (5, 10))
    saving = measured("points", longest)
    for key in ("seconds", "mebibytes"):
        naive = long[key] + (long[key] - short[key]) / 5 * (longest - 10)
        print(f"{longest} steps, all: {naive:.1f} {key}; points {saving[key]:.1f}, {saving[key] / naive:.3f} of it")


def measured(way: str, steps: int, length: int = 128, by: str = "ours") -> dict[str, float]:
    """One row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transformer", way, str(steps), str(length), by]
    said = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    row: dict[str, float] = json.loads(said.splitlines()[-1])
    print(
        f"{way:10} {by:7} {length:6} {steps:6} {row['seconds']:8.3f} {row['mebibytes']:9.0f} {row.get('error', 0):9.1e}"
    )
    return row


def compute(way: str, steps: int, length: int, by: str) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from torch import Generator, Tensor, nn
    from torch.func import functional_call

    from metalearn.algorithms.maml import maml
    from metalearn.bilevel import descent
    from metalearn.models.common.adapter import model_of
    from metalearn.nn import twice
    from metalearn.nn.inputs import of_reals
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

    if by == "torch":
        twice.attention = twice.torchs_attention
    torch.backends.mha.set_fastpath_enabled(False)  # it has no derivatives
    model = model_of(Reader, name="Reader", inputs=of_reals((length, WIDTH)), transductive=True, advice="")
    params = model.init(Generator().manual_seed(0))
    x = torch.randn(2, 1, SEQUENCES, length, WIDTH, generator=Generator().manual_seed(1))
    y = torch.arange(SEQUENCES)

    def of_maml(params: Params, length: int) -> Params:
        episode = Episode(*(Batch(part[:, :, :length].to(params["head.bias"]), y.unsqueeze(0)) for part in x))
        return maml(model=model, inner_lr=0.01, inner_steps=steps, eval_steps=steps).meta_grad(params, episode, 1).grads

    def of_descent(params: Params, length: int) -> Params:
        network, start = Reader(), {name: value.clone().requires_grad_() for name, value in params.items()}

        def inner(w: Params, outer: Params, step: int) -> Tensor:
            return F.cross_entropy(functional_call(network, w, x[0, 0, :, :length]), y)

        end = descent(inner, start, {}, steps=steps, rate=0.01, memory=way)
        query = F.cross_entropy(functional_call(network, end, x[1, 0, :, :length]), y)
        return dict(zip(start, torch.autograd.grad(query, list(start.values())), strict=True))

    parts = torch.randn(7, 4 * SEQUENCES, HEADS, length, WIDTH // HEADS, generator=Generator().manual_seed(2))

    def of_attention(params: Params, length: int) -> Params:
        given = parts[:, :, :, :length].to(params["head.bias"])
        q, k, v, u, *cotangents = (part.contiguous().requires_grad_() for part in given)
        with twice.second_order_attention():
            grads = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), u, create_graph=True)
        return dict(zip("qkvu", torch.autograd.grad(grads, (q, k, v, u), cotangents), strict=True))

    derivative = {"maml": of_maml, "attention": of_attention}.get(way, of_descent)
    derivative(params, 8)  # what is loaded by the first call
    before, seconds = peak(), []
    for _ in range({of_attention: 9, of_maml: 3}.get(derivative, 1)):
        began = time.process_time()
        grads = derivative(params, length)
        seconds.append(time.process_time() - began)
    row = {"seconds": min(seconds), "mebibytes": peak() - before}
    if derivative != of_descent and length <= 512:
        exact = derivative({name: value.double() for name, value in params.items()}, length)
        largest = max(float(value.abs().max()) for value in exact.values())
        row["error"] = max(float((grads[name].double() - exact[name]).abs().max()) for name in exact) / largest
    return row


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(compute(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    else:
        main()
