"""The program: from a checked config to ranks that train. The only room where metalearn and distributed meet."""

from importlib.util import find_spec
from pathlib import Path

from metalearn.errors import ForeignPackageError

# Looked for, not imported: Dask's takes long, and fails where its files and ours lie in one folder.
_spec = find_spec("distributed")
if _spec is None or not Path(_spec.origin or "").with_name("as_torchopt.py").is_file():
    _place = _spec.origin or "a folder without __init__.py" if _spec else "nowhere"
    raise ForeignPackageError(
        f"distributed: metalearn needs its own, and finds that in {_place}; Dask's has the same name. Type pip "
        "uninstall -y distributed && pip install --force-reinstall --no-deps /path/to/metalearn, or give metalearn an "
        "environment without Dask"
    )
