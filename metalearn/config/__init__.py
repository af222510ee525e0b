"""From the command line to checked config, and from config to objects."""
