"""Prior-fitted networks as estimators of tables, without training a run."""
