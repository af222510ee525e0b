"""`metalearn bench`: the program is benchmarks/bench.py of a checkout."""

from metalearn.cli.checkout import main_of

main = main_of("bench")
