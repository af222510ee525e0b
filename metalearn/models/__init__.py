"""One network a file, each a closure that returns a `Model`."""
