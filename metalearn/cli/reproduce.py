"""`metalearn reproduce`: the program is benchmarks/reproduce.py of a checkout."""

from metalearn.cli.checkout import main_of

main = main_of("reproduce")
