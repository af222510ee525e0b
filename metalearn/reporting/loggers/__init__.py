"""The loggers, one per file, each a `Logger`. They get a run's points besides train.log and metrics.jsonl."""
