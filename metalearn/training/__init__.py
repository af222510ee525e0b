"""The loop that meta-trains, and its parts."""
