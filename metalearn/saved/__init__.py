"""What is kept for later: the one form on disk of checkpoints, learners, tasks, classifiers and tables."""
