"""Checks a GPU machine in less than twelve minutes: right results, speed, memory. Writes a table.

    metalearn gpu-check                          all parts on the GPU
    metalearn gpu-check --only layers gradients
    metalearn gpu-check --device cpu --short     checks the check: tiny sizes, no GPU

Parts:
    machine     what is measured on
    layers      outputs, first and second derivatives beside the CPU's, in float64 and float32
    gradients   meta-gradients of every network and algorithm beside the CPU's, in float64 and float32
    algorithms  5 steps of every algorithm; the float64 parameters beside the CPU's
    resident    whole steps that stay on the GPU: speed, equal bits in another run and in other chunks, no wait
    photographs steps of MAML on ResNet-12, 84×84 pixels, in each precision, with the fraction of the GPU's own rate
    speed       meta-gradients as in metalearn bench, with the fraction of the device's own limit
    recipe      500 steps of MAML as Finn et al. 2017 trained it, the hours of 60,000 of them, and memory that stays
    worlds      train.py with strategy rpc and ddp (NCCL): one worker and, where there are two GPUs, two; needs Hydra

Every part runs in a process of its own and has a time limit. What fails is a row with its error, and the others go on.
The results are gpu_check.json and gpu_check.md in the folder of --output.

Exit codes: 0 all passed, or left out with a reason; 1 something failed; 2 usage.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu_check.check import PARTS, check, write_rows
from benchmarks.ways import ROOT
from metalearn.cli.arguments import command_name, make_output


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    options = options_of(arguments)
    if options.child is not None:
        write_rows(options.only[0], options.device, options.child, short=options.short)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way is ended, too
    passed = check(
        options.only, options.device, options.output, program=ROOT / "scripts/gpu_check.py", short=options.short
    )
    print((options.output / "gpu_check.md").read_text(), end="")
    return 0 if passed else 1


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        command_name("gpu-check"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is checked (cuda)")
    parser.add_argument("--short", action="store_true", help="tiny sizes: checks that the check works")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="of the parts above"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/gpu_check", help="folder of the results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU here; type --device cpu --short to try the check itself")
    if options.child is None:
        make_output(parser, options.output)
    return options
