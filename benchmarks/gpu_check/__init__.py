"""The check of a GPU machine: what `scripts/gpu_check.py` runs, one file for each kind of part."""
