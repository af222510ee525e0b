"""Learns: tasks, models, algorithms and the loop that trains them. Knows nothing of processes."""
