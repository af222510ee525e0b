"""What a run keeps: its folder, checkpoints, state, the classes it has seen, and its published form."""
