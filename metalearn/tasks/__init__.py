"""Sources of tasks: each makes task number i of a split, and every process makes the same one."""
