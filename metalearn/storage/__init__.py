"""What is kept on disk beside runs: files written whole or not at all, locks, and the cache."""
