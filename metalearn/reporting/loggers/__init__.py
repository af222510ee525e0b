"""Where the points of a run go, besides train.log and metrics.jsonl: one logger per file, each a `Logger`."""
