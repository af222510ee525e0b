"""Uses what a run has learned: loads it, adapts it to pictures of yours, publishes it, draws what it says."""
