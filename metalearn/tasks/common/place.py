"""The place of a dataset's files."""

from typing import NamedTuple


class DataPlace(NamedTuple):
    """The files of a dataset lie in the folder `root`. With `download`, torchvision fetches them if they are missing or
    cannot be read. If `shards` names a folder that metalearn shard has written, the pictures come from there, and
    `root` is not read."""

    root: str
    download: bool
    shards: str | None = None
