"""`metalearn gpu-check`: the program is benchmarks/gpu_check/command.py of a checkout."""

from metalearn.cli.checkout import main_of

main = main_of("gpu-check")
