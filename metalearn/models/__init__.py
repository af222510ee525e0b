"""One network per file; each is a closure that returns a `Model`."""
