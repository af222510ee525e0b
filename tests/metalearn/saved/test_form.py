"""The one saved form: what is loaded is what was saved, and what is damaged or does not fit its schema is named."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from metalearn.errors import ConfigError
from metalearn.saved.form import MANIFEST, META, TENSORS, Kind, NotSavedError, fill, kind_of, load, replacing
from metalearn.storage.files import whole_folder
from tests.saved import forge

KIND = Kind("table", 3, {"names": [str], "rate": float | None, "of": {"steps": int}, "more": object})
CONTENT: dict[str, Any] = {"names": ["a  b", "[c,\n d]"], "rate": 2.5, "of": {"steps": 1}, "more": [[1, 2], [3, 4]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    with whole_folder("path", path) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner/more.txt").write_text("more")
        # A view, and one that is not contiguous.
        fill(temporary, KIND, {"x": torch.arange(6.0).view(2, 3).T, "none": torch.empty(0)}, CONTENT)
    return path


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    tensors, meta, place = load(folder, KIND)
    assert meta == {"kind": "table", "version": 3} | CONTENT and place == folder and kind_of(folder) == "table"
    assert tensors["x"].tolist() == [[0, 3], [1, 4], [2, 5]] and tensors["none"].shape == (0,)
    assert "    [1, 2],\n" in (folder / META).read_text()  # a row a line
    assert json.loads((folder / MANIFEST).read_text()).keys() == {TENSORS, META, "inner/more.txt"}
    (folder / "README.md").write_text("anything")  # people may edit it
    load(folder, KIND)


def test_who_may_read_the_facts_may_read_the_tensors(folder: Path) -> None:
    assert len({(folder / name).stat().st_mode for name in (TENSORS, META, MANIFEST)}) == 1


@pytest.mark.parametrize("name", [TENSORS, META, MANIFEST, "inner/more.txt"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff" * 99, None])
def test_a_damaged_or_missing_file_is_named(content: bytes | None, name: str, folder: Path) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(NotSavedError, match=name):
        load(folder, KIND)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda meta: meta.pop("rate"), "has no field rate"),
        (lambda meta: meta.update(rate="2"), "rate=2: must be"),
        (lambda meta: meta.update(names="a"), "names=a: must be a list"),
        (lambda meta: meta["names"].append(3), "names=3: must be str"),
        (lambda meta: meta["of"].update(steps=True), "of: steps=True: must be int"),
        (lambda meta: meta.update(version=4), "version=4 is not 3"),
        (lambda meta: meta.update(kind="learner"), "is a learner; type metalearn adapt"),
        (lambda meta: meta.update(kind=["x"]), "no table: kind="),
    ],
)
def test_what_does_not_fit_the_schema_is_named(change: Callable[[Any], Any], named: str, folder: Path) -> None:
    forge(folder, change)
    with pytest.raises(NotSavedError, match=named):
        load(folder, KIND)


def test_a_whole_number_is_a_real_one_and_none_is_allowed(folder: Path) -> None:
    for change in ({"rate": 1}, {"rate": None}):
        forge(folder, partial(dict.update, **change))
        assert load(folder, KIND).meta["rate"] == change["rate"]


def test_what_fails_while_it_is_replaced_leaves_the_old_one(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"path=.*saved: cannot be written: full"), replacing("path", folder, KIND):
        raise OSError(28, "full")
    assert load(folder, KIND).meta["rate"] == 2.5
    with replacing("path", folder, KIND) as temporary:
        fill(temporary, KIND, {}, CONTENT | {"rate": None})
    assert load(folder, KIND).meta["rate"] is None and not (folder / "inner").exists()
    assert (folder / "notes.txt").read_text() == "mine" and [path.name for path in folder.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("moved", [True, False], ids=["before the second rename", "after it"])
def test_what_a_kill_left_of_a_replacement_is_made_good(moved: bool, folder: Path) -> None:
    left = folder.with_name(".saved.old")
    (folder.rename if moved else partial(shutil.copytree, folder))(left)
    for rate in (1.5, 0.5):
        with replacing("path", folder, KIND) as temporary:
            fill(temporary, KIND, {}, CONTENT | {"rate": rate})
        assert load(folder, KIND).meta["rate"] == rate and not left.exists()


def test_a_name_is_never_missing_and_killed_ones_are_swept_up(folder: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    left, fresh, others = (folder.with_name(f".saved.{name}.tmp") for name in (ended.pid, "99999999", "me"))
    for path in (left, fresh, others):
        path.mkdir()
    os.utime(left, (0, 0))
    missing, over = list[str](), threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                (folder / META).stat()
            except FileNotFoundError:
                missing.append("was missing")

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for _ in range(30):
            with replacing("path", folder, KIND) as temporary:
                fill(temporary, KIND, {}, CONTENT)
    finally:
        over.set()
        reader.join()
    assert not missing and sorted(path.name for path in folder.parent.iterdir()) == [fresh.name, others.name, "saved"]


def test_links_beside_what_is_replaced_stay_links(folder: Path) -> None:
    (folder / "gone").symlink_to(folder.parent / "nowhere")
    (folder / "data").symlink_to(folder.parent)
    with replacing("path", folder, KIND) as temporary:
        fill(temporary, KIND, {}, CONTENT)
    assert (folder / "gone").is_symlink() and (folder / "data").is_symlink()
