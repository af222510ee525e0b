"""What the task sources share: drawing of episodes and samples, reading of files, the cache."""
