"""The sweepers `async` and `pbt`, see the README. Hydra finds them below `hydra_plugins`, which must have no
__init__.py."""
