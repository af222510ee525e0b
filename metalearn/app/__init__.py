"""The program: from a checked config to ranks that train. The only room where metalearn and distributed meet."""

from importlib.util import find_spec
from pathlib import Path

from metalearn.errors import ForeignPackageError

_OURS = "names of `torchopt.distributed`"
"""A piece of the first line of our `distributed/__init__.py`."""


def _check_distributed() -> None:
    """Raises ForeignPackageError where `import distributed` would find another package than ours. Imports nothing: that
    of Dask takes long, and fails where its files and ours lie in one folder."""
    spec = find_spec("distributed")
    origin = spec.origin if spec is not None else None
    if origin is not None and _OURS in Path(origin).read_text(encoding="utf-8", errors="replace"):
        return
    found = "is not installed" if spec is None else f"is another package, in {origin or 'a folder without __init__.py'}"
    raise ForeignPackageError(
        f"distributed: {found}; metalearn needs its own, and Dask's has the same name. Type pip uninstall -y "
        "distributed && pip install --force-reinstall --no-deps PATH_OF_METALEARN, or give metalearn an environment "
        "without Dask"
    )


_check_distributed()
