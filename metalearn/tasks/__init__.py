"""Sources of tasks: each makes task number i of a split, and every process makes the same one.

The comments of a dataset's yaml in `conf/dataset/` explain the arguments of its factory. A factory raises ValueError
for a value that is not allowed. Its data are read for the first task, which raises DataError if they are missing,
damaged, or too few for an episode."""
