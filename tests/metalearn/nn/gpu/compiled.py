"""Compiles every GPU kernel of a recipe for a compute capability, without a GPU; prints a JSON line of their
registers, shared memory and occupancy.

python -m tests.metalearn.nn.gpu.compiled 90 [photographs [tf32|bf16]] [KERNEL …]

`photographs`: the products of the layers of ResNet-12, in TF32 by default. Rows have their tiles (rows, columns, more
columns, numbers of a step), count and name the instructions of tensor cores, and list the sizes of asynchronous copies.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

os.environ["METALEARN_KERNELS"] = "triton"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.ways import PLAIN, RECIPES, Recipe, algorithm_of, problem
from metalearn.nn.attention import attention
from metalearn.nn.backends import triton_ops as launch
from metalearn.nn.surroundings import compute_with

SHARED = {80: 164 << 10}
"""Bytes of shared memory of a multiprocessor, by compute capability; from 90 on it is 228 KiB."""

TYPES = {torch.float32: "fp32", torch.int64: "i64", torch.uint8: "u8"}
KINDS = ("STAGE", "PAIRS", "ADD", "CLASSES", "SECOND")
"""What kernels of one name differ by; one of each kind is compiled."""


def calls_of(recipe: Recipe) -> dict[tuple[str, str], tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """One call of every kind that a meta-gradient makes, a gathering of pictures, and attention with its derivatives,
    of heads of 64 numbers. Nothing is computed."""
    calls: dict[tuple[str, str], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def noted(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        kind = ", ".join(f"{name} {options[name]}" for name in KINDS if name in options)
        calls.setdefault((kernel.__name__, kind), (kernel, args, options))

    JITFunction.run = noted
    given = problem(recipe, PLAIN[recipe.kind])
    algorithm_of(recipe, PLAIN[recipe.kind]).meta_grad(given.params, given.episode, 1)
    numbers = torch.zeros(2, 5, 3, dtype=torch.int64)
    pictures, turns = torch.zeros(40, 784, dtype=torch.uint8), torch.zeros(4, 784, dtype=torch.int64)
    launch.gathered(pictures, turns, torch.zeros(256), numbers, 1, (28, 28, 1))
    q = torch.zeros(1, 4, 512, 64, requires_grad=True)
    (slope,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    torch.autograd.grad(slope.sum(), q)
    return calls


WIDTHS = {64: 84, 160: 42, 640: 10}
"""Channels of ResNet-12, and the pixels of a side. 320 have the tiles of 160."""


def photograph_calls() -> dict[tuple[str, str], tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The products of layers of as many inputs as outputs on 100 pictures; and sums of two products."""
    calls: dict[tuple[str, str], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def noted(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        calls[(kernel.__name__, f"{width} channels, PAIRS {options.get('PAIRS')}")] = kernel, args, options

    JITFunction.run = noted
    for width, side in WIDTHS.items():
        sizes = launch.ConvolutionSizes(side, side, width, side, side, width, 3, 3, 1, 1)
        pictures = launch.Tasks(torch.zeros(1), 100 * side**2 * width)
        weights = launch.Tasks(torch.zeros(9 * width**2), 0)
        for second in (None, (pictures, weights)):
            launch.product(1, 100, sizes, sizes.dense, pictures, weights, pictures, second=second)
            launch.input_gradient(1, 100, sizes, pictures, weights, pictures, second=second, add=second is not None)
            twice = second and (pictures, pictures)
            launch.weight_gradient(1, 100, sizes, sizes.dense, pictures, pictures, weights, second=twice)
    return {key: call for key, call in calls.items() if key[0] != "sum_splits"}


def source_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """The kernel with the types of its arguments, as Triton specialises it."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in options.items() if k in kernel.arg_names
    }
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        aligned = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if signature[name] not in ("constexpr", "fp32") and aligned % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def resources(ptx: str, capability: int) -> tuple[int, int]:
    """The registers of a kernel, and the bytes that it spills, by the assembler that Triton brings."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def occupancy(capability: int, warps: int, registers: int, shared: int) -> int:
    """The warps that a multiprocessor holds, of 64: it has 65,536 registers, and reserves 1 KiB a program."""
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED.get(capability, 228 << 10) // (shared + 1024)
    return warps * min(64 // warps, by_registers, by_shared, 32)


def main(capability: int, only: list[str]) -> list[dict[str, Any]]:
    recipe = next(recipe for recipe in RECIPES if recipe.name == "20w1s")._replace(tasks=2)
    rows = []
    if only[:1] == ["photographs"]:
        compute_with(only[1] if only[1:] else "tf32")
        calls, only = photograph_calls(), only[2:]
    else:
        calls = calls_of(recipe)
    for (name, kind), (kernel, args, options) in calls.items():
        if only and name not in only:
            continue
        sizes = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
        source, target = source_of(kernel, args, options), GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options=sizes)
        ptx = made.asm["ptx"]
        registers, spilled = resources(ptx, capability)
        held = occupancy(capability, made.metadata.num_warps, registers, made.metadata.shared)
        rows.append({
            "kernel": name, "of": kind, "registers": registers, "spilled": spilled, "shared": made.metadata.shared,
            "warps": held, "tensor": len(re.findall(r"mma[\w.:]*\.(tf32\.tf32|bf16\.bf16)", ptx)),
            "tile": [options[key] for key in ("BM", "BN", "MORE", "BK") if key in options],
            "instructions": sorted(set(re.findall(r"(wgmma(?=\.mma)|mma\.sync)", ptx))),
            "copies": sorted({int(size, 16) for size in re.findall(r"cp\.async\.c[ag].*?\], (0x\w+)", ptx)}),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
