"""What a run writes and reads: its folder, checkpoints, logs, metrics and plots."""
