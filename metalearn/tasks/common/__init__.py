"""What the task sources share: they draw episodes and samples, read files, and use the cache."""
