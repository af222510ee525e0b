"""The sweepers `async` and `pbt`, see docs/sweeps.md. Hydra finds them below `hydra_plugins`, which must have no
__init__.py."""
