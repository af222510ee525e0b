"""Sets that are built: packages by a registry's client, whatever it does; drawn in any number of attempts, alike."""

import errno
import hashlib
import io
import logging
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from metalearn.datasets import drawing
from metalearn.datasets.designs import CHARACTER_SIDE, draw_characters
from metalearn.datasets.drawing import (
    APT,
    NPM,
    Design,
    Drawings,
    Listed,
    Package,
    SetRecipe,
    fetched,
    first_of_copies,
    members,
)
from metalearn.errors import ConfigError, DataError, DiskError, RunError
from metalearn.tasks.common.stored import PICTURES, DrawnClass, read_pictures, read_set

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def archive(path: Path, files: dict[str, bytes]) -> str:
    """Writes a package of npm; returns its SHA-256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that a program in the place of npm and apt-get gives. It notes what it is asked for, and
    says what is in `answer`."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in ("npm", "apt-get"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
            f"cp {folder}/*.tgz {folder}/*.deb . 2>/dev/null; cat {folder}/answer 2>/dev/null\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return folder


def test_the_same_command_fetches_missing_packages(registry: Path, tmp_path: Path) -> None:
    first = Package("@iconify-json/one", "1.0.0", archive(registry / "iconify-json-one-1.0.0.tgz", {"a": b"1"}))
    second = Package("@iconify-json/two", "2.0.0", archive(tmp_path / "iconify-json-two-2.0.0.tgz", {"a": b"2"}))
    (registry / "answer").write_text("npm error code ECONNREFUSED")
    with pytest.raises(RunError, match=r"1 of 2 packages did not come; .*two, version 2\.0\.0 .*ECONNREFUSED"):
        fetched([first, second], NPM, tmp_path / "work")
    shutil.copy(tmp_path / "iconify-json-two-2.0.0.tgz", registry)
    files = fetched([first, second], NPM, tmp_path / "work")
    asked = (registry / "asked").read_text().splitlines()
    assert "one@1.0.0" in asked[0] and "one@" not in asked[-1] and "--ignore-scripts" in asked[-1]
    assert [members(files[package.name], ["a"])["a"] for package in (first, second)] == [b"1", b"2"]


def test_another_file_of_a_version_is_refused_with_both_digests(registry: Path, tmp_path: Path) -> None:
    got = archive(registry / "iconify-json-one-1.0.0.tgz", {"a": b"other"})
    with pytest.raises(DataError, match=rf"one, version 1\.0\.0 with SHA-256 {'f' * 12}…; .*tgz .* {got[:12]}…"):
        fetched([Package("@iconify-json/one", "1.0.0", "f" * 64)], NPM, tmp_path / "work")


def test_a_missing_client_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm is not installed, .* type apt-get install npm"):
        fetched([Package("a", "1", "0" * 64)], NPM, tmp_path / "work")


def test_a_client_that_hangs_is_ended(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin" / "npm").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(drawing, "SECONDS", 0.2)
    with pytest.raises(RunError, match=r"npm has not answered within 0\.2 s"):
        fetched([Package("a", "1", "0" * 64)], NPM, tmp_path / "work")


def test_what_is_no_package_and_what_it_does_not_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    for name in ("wanted", "absent"):
        with pytest.raises(DataError, match=r"a\.tgz: "):
            members(path, [name])
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="is no package that can be opened"):
        members(path, ["wanted"])


def recipe(package: Path, letters: str = "abcdefghijkr", copies: bool = False) -> SetRecipe:
    """Letters in one font, as drawn by two designs."""
    classes = [
        Listed(DrawnClass(letter, letter, ("train", "val", "test")[number % 3], ()), {}, "")
        for number, letter in enumerate(letters)
    ]
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    designs = [
        Design(name, "fonts-one", "1-1", digest, "free", "who", "./usr/share/fonts/one.ttf") for name in ("one", "two")
    ]

    def draw(design: Design, path: Path, classes: Sequence[Listed]) -> Drawings:
        numbers, pictures = draw_characters(design, path, classes)
        return numbers, pictures if copies or design.name == "one" else pictures[:, ::-1, ::-1]

    return SetRecipe(
        "letters", "FreeType", (CHARACTER_SIDE, CHARACTER_SIDE), APT, designs, classes, draw, True, "packages"
    )


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of Debian with matplotlib's font."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    folder = tmp_path_factory.mktemp("deb")
    (folder / "root/usr/share/fonts").mkdir(parents=True)
    shutil.copy(FONT, folder / "root/usr/share/fonts/one.ttf")
    (folder / "root/DEBIAN").mkdir()
    (folder / "root/DEBIAN/control").write_text(
        "Package: fonts-one\nVersion: 1-1\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: a font\n"
    )
    path = folder / "fonts-one_1-1_all.deb"
    subprocess.run(["dpkg-deb", "-b", "-Zgzip", "-z1", folder / "root", path], check=True, capture_output=True)
    return path


def test_a_set_is_the_same_whenever_its_build_was_cut(
    deb: Path, registry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(deb, registry)
    whole = recipe(deb)
    made = whole.build(tmp_path / "whole")
    drawn = []

    def full(design: Design, path: Path, classes: Sequence[Listed]) -> Drawings:
        drawn.append(design.name)
        if drawn == ["one", "two"]:
            raise OSError(errno.ENOSPC, "No space left on device", "a file")
        return whole.draw(design, path, classes)

    with pytest.raises(OSError, match="No space left"):
        replace(whole, draw=full).build(tmp_path / "cut")
    assert not (tmp_path / "cut" / "index.json").exists()
    again = replace(whole, draw=full).build(tmp_path / "cut")
    assert drawn == ["one", "two", "one", "two"]
    assert again == made and [len(one.drawers) for one in made.classes] == [2] * 12
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {".lock", "index.json", PICTURES, "ATTRIBUTION.txt"}
    assert "| one | who | free | fonts-one 1-1 | 12 |" in (tmp_path / "cut" / "ATTRIBUTION.txt").read_text()
    with caplog.at_level(logging.INFO):
        assert whole.build(tmp_path / "cut") == made
    assert "is there already" in caplog.text and len((registry / "asked").read_text().splitlines()) == 2
    with pytest.raises(DataError, match="holds 12 classes of letters, and not these; remove"):
        recipe(deb, "abcdef").build(tmp_path / "cut")


def test_published_digests_are_compared(
    deb: Path, registry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(deb, registry)
    whole = recipe(deb)
    made = whole.build(tmp_path / "first")
    pictures = read_pictures(tmp_path / "first", made, "")
    pairs = [pictures[2 * number : 2 * number + 2].tobytes() for number in range(12)]
    digests = [hashlib.sha256(pair).hexdigest()[:16] for pair in pairs]
    right = [one._replace(digest=digest) for one, digest in zip(whole.classes, digests, strict=True)]
    caplog.set_level(logging.INFO)
    replace(whole, classes=right).build(tmp_path / "right")
    assert "the pictures of all classes are the published ones" in caplog.text
    right[3] = right[3]._replace(digest="0" * 16)
    replace(whole, classes=right).build(tmp_path / "other")
    assert "the pictures of 1 of 12 classes are not the published ones, bit for bit; the first is d" in caplog.text


def test_what_is_damaged_or_drawn_twice_is_refused(deb: Path, registry: Path, tmp_path: Path) -> None:
    shutil.copy(deb, registry)
    with pytest.raises(DataError, match="letters: 1 drawings of a, and 2 are needed"):
        recipe(deb, copies=True).build(tmp_path / "copies")
    recipe(deb).build(tmp_path / "set")
    content = bytearray((tmp_path / "set" / PICTURES).read_bytes())
    content[-100] ^= 255
    (tmp_path / "set" / PICTURES).write_bytes(content)
    with pytest.raises(DataError, match=r"pictures\.npy is damaged"):
        recipe(deb).build(tmp_path / "set")
    index = (tmp_path / "set" / "index.json").read_text()
    (tmp_path / "set" / "index.json").write_text(index.replace('"split": "val"', '"split": "train"', 1))
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        read_set(tmp_path / "set", "")


def test_a_build_that_ends_early_goes_on(
    deb: Path, registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a disk that fills while the set is put together; or killed."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def killed(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    shutil.copy(deb, registry)
    whole, cut = recipe(deb), tmp_path / "cut"
    made = whole.build(tmp_path / "whole")
    places: list[tuple[object, str, Any, type[BaseException], str | None]] = [
        (os, "fsync", full, DiskError, r"pictures\.npy.* No space left on device"),
        (drawing, "write_set", killed, KeyboardInterrupt, None),
    ]
    for module, name, fails, error, message in places:
        with monkeypatch.context() as patched, pytest.raises(error, match=message):
            patched.setattr(module, name, fails)
            whole.build(cut)
        assert not (cut / "index.json").exists()
    (half,) = (cut / ".work").glob("*.package")
    half.write_bytes(half.read_bytes()[:-100])
    (cut / PICTURES).write_bytes(b"half")
    assert whole.build(cut) == made
    assert {path.name for path in cut.iterdir()} == {".lock", "index.json", PICTURES, "ATTRIBUTION.txt"}


def test_a_font_without_the_characters_shows_those_that_it_has(
    deb: Path, registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recipe(deb, "a鬱bΩc가")
    numbers, pictures = draw_characters(whole.designs[0], deb, whole.classes)
    assert list(numbers) == [0, 2, 3, 4] and pictures.shape == (4, CHARACTER_SIDE, CHARACTER_SIDE)
    numbers, _ = draw_characters(whole.designs[0]._replace(name="cwfs"), deb, recipe(deb, "afƒb").classes)
    assert list(numbers) == [0, 3]  # f and ƒ are left out of this font
    numbers, pictures = draw_characters(whole.designs[0], deb, recipe(deb, "鬱가").classes)
    assert not numbers and pictures.shape == (0, CHARACTER_SIDE, CHARACTER_SIDE)
    shutil.copy(deb, registry)
    with pytest.raises(DataError, match="letters: 0 drawings of 鬱, and 2 are needed"):
        whole.build(tmp_path / "set")


def test_copies_are_found_by_their_ink() -> None:
    ink = np.zeros((4, 20, 20), np.uint8)
    ink[:3, 5:15, 5:15] = 255
    ink[1, 5, 5:8] = 0  # 3% of the ink
    ink[2, 5, 5:15] = 0  # 10%
    ink[3, :, 3] = 255
    assert first_of_copies(ink) == [0, 2, 3]
