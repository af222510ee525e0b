"""What the strategies share: what is computed of a chunk, how chunks are dealt out, what a step costs."""
