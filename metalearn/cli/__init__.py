"""The commands: a file each. Its `main(argv)` runs the command line and returns the exit code."""
