"""Measurements: what scripts/bench.py measures, and programs of their own."""
