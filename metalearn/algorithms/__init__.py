"""One meta-learner a file, each a closure that returns an `Algorithm`."""
