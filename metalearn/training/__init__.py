"""The loop that meta-trains, and what it is made of."""
