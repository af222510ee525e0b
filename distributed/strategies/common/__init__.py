"""What the strategies share: the work on a chunk, how chunks are dealt out, the cost of a step."""
