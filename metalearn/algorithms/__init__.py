"""One meta-learner per file; each is a closure that returns an `Algorithm`."""
