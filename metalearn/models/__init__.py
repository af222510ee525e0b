"""One network per file; each is a closure that returns a `Model`. The comments of its yaml in `conf/model/` explain its
arguments."""
