"""Texts as tasks: windows of the files of a folder, byte by byte. Without a folder, Python's own library is read, which
every machine has (its license is that of the Python Software Foundation)."""

import hashlib
import logging
import sysconfig
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metalearn.errors import DataError, whole_number
from metalearn.tasks.common.episodes import SPLITS, SeededTasks, Seeds, reading_tasks
from metalearn.types import Episode

BYTES = 256

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
"""Folders of Python's library that hold other things than its code: packages of others, tests, and tables."""

log = logging.getLogger("metalearn")


class Texts(SeededTasks):
    """A source of windows of texts; see `texts`."""

    def __init__(self, root: Path | None, ending: str, lengths: dict[str, int], seeds: Seeds) -> None:
        super().__init__(seeds)
        self._root, self._ending, self._lengths = root, ending, lengths

    def classes(self, split: str) -> int:
        return BYTES

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self._splits[split])

    def episodes(self, split: str, indices: Tensor) -> Episode:
        return reading_tasks(torch.stack([self._window(split, number) for number in indices.tolist()]))

    def _window(self, split: str, number: int) -> Tensor:
        """Of training a window that each byte may begin; of validation and test one of each file."""
        rng, n, texts = self._seeds.generator(split, number), self._lengths[split] + 1, self._splits[split]
        if split == "train":
            number = int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))
        content = texts[number]
        start = int(rng.integers(len(content) - n + 1))
        return torch.frombuffer(bytearray(content[start : start + n]), dtype=torch.uint8).long()

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(content) - self._lengths["train"] for content in self._splits["train"]])

    @cached_property
    def _splits(self) -> dict[str, list[bytes]]:
        """The texts of each split. A content that several files have counts once, in the first of them."""
        root = self._root or Path(sysconfig.get_paths()["stdlib"])
        if not root.is_dir():
            raise DataError(f"dataset.root={root}: is no folder; type the folder of your texts, or null")
        splits: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        places: dict[bytes, tuple[str, str]] = {}
        left_out = {"short": 0, "no text": 0, "a copy": 0}
        across = []
        for path in sorted(root.rglob(f"*{self._ending}")):
            of_others = self._root is None and NOT_LIBRARY & set(path.relative_to(root).parts)
            if of_others or not path.is_file():
                continue
            name, content = str(path.relative_to(root)), path.read_bytes()
            split, mark = self._split_of(root, path), hashlib.sha256(content).digest()
            if mark in places:
                left_out["a copy"] += 1
                across += [f"{name} and {places[mark][1]}"] if places[mark][0] != split else []
            elif b"\0" in content:
                left_out["no text"] += 1
            elif len(content) <= self._lengths[split]:
                left_out["short"] += 1
            else:
                places[mark] = split, name
                splits[split].append(content)
        order = np.random.default_rng(0)  # so that the first test files are not all of one package
        splits = {split: [texts[i] for i in order.permutation(len(texts))] for split, texts in splits.items()}
        counts = ", ".join(f"{len(texts)} in {split}" for split, texts in splits.items())
        others = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        log.info("dataset: %s: texts %s%s", root, counts, f"; left out: {others}" if others else "")
        if across:
            log.warning("dataset: %d texts are in two splits, and count in the first: %s", len(across), across[0])
        least = {"train": 1, "val": 2, "test": 2}  # two, for the interval of a mean
        if few := [split for split, texts in splits.items() if len(texts) < least[split]]:
            split, count = few[0], len(splits[few[0]])
            raise DataError(
                f"dataset.root={root}: {count} of the files *{self._ending} of {split} have more than "
                f"{self._lengths[split]} bytes, and it needs {least[split]} ({others or 'there are no others'}); give "
                "more files, folders named train, val and test, or type dataset.length=256 dataset.eval_length=256, or "
                "dataset.ending=.txt for the files of another ending"
            )
        return splits

    def _split_of(self, root: Path, path: Path) -> str:
        """All files of an entry at the top of the folder are in one split: that of its name, or by a hash of it."""
        entry = path.relative_to(root).parts[0]
        if entry in SPLITS:
            return entry
        name = Path(entry).stem
        if self._root is None:  # _pydecimal is a part of decimal
            name = name.lstrip("_").removeprefix("py")
        tenth = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
        return "test" if tenth < 2 else "val" if tenth == 2 else "train"


def texts(*, root: str | None, ending: str, length: int, eval_length: int, seeds: Seeds) -> Texts:
    """Windows of texts, of which each byte is to be predicted. All files of an entry at the top of `root` are in one
    split: that of its name; else seven tenths of the entries are in train, one in val and two in test."""
    for name, value in (("length", length), ("eval_length", eval_length)):
        whole_number(name, value, at_least=1)
    lengths = {"train": length, "val": eval_length, "test": eval_length}
    return Texts(None if root is None else Path(root), ending, lengths, seeds)
