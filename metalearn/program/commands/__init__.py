"""What users start: a file for each command. Its `main(argv)` runs the command line and returns the exit code."""
