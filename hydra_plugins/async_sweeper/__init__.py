"""The sweeper `async`, see docs/sweeps.md. Hydra finds it below `hydra_plugins`, which must have no __init__.py."""
