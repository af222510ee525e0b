"""What a run shows: its log, metrics, figures, plots and report, and the loggers that the config chooses."""
