"""Pictures in folders: real files, whole, damaged and of odd kinds. Their pixels tell class and number."""

import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import metalearn
from metalearn.app.job import script, to_job
from metalearn.app.parts import assemble
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError, DataError
from metalearn.tasks.image_folder import image_folder
from metalearn.training.chunks import check_compatible
from metalearn.types import Batch, Episode, GivesSamples, TaskSource, Unit
from tests.metalearn.flat import source_of
from tests.runs import ROOT, Program, Start, slow

Pixels = NDArray[np.uint8]
Known = dict[bytes, tuple[str, int]]

SIZE = 12
SPLITS = ("train", "val", "test")
GIVEN: dict[str, Any] = {
    "split": [0.5, 0.25, 0.25], "ways": 2, "shots": 1, "queries": 2, "image_size": SIZE, "channels": 3,
    "rotations": False, "seed": 0, "eval_seed": 1,
}  # fmt: skip
ANIMALS = {"cat": 4, "dog": 3, "cow": 7, "pig": 5, "birds/wren": 3, "birds/owl": 6, "fox": 4, "hen": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METALEARN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def drawing(name: str, number: int) -> Pixels:
    """Noise, different for each name and number: [SIZE, SIZE, 3]."""
    return np.random.default_rng([number, *name.encode()]).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def put(root: Path, classes: Mapping[str, int]) -> Known:
    """Writes the pictures of the classes; returns pixels → (class, number)."""
    known = {}
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = drawing(name, number)
            Image.fromarray(pixels).save(root / name / f"{number:03}.png")
            known[pixels.tobytes()] = (name, number)
    return known


def source(root: Path, **given: Any) -> TaskSource:
    return source_of(image_folder, root=str(root), **GIVEN | given)


def pixels_of(batch: Batch, task: int) -> list[Pixels]:
    return list(batch.x[task].permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).numpy())


def shown(batch: Batch, task: int, known: Known) -> list[tuple[str, int]]:
    return [known[pixels.tobytes()] for pixels in pixels_of(batch, task)]


def classes_shown(tasks: TaskSource, split: str, known: Known, count: int = 40) -> set[str]:
    episode = tasks.episodes(split, torch.arange(count))
    return {name for task in range(count) for name, _ in shown(episode.support, task, known)}


def same(a: Episode, b: Episode) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


# What a task holds


def test_episodes_hold_what_they_should(tmp_path: Path) -> None:
    known = put(tmp_path / "animals", ANIMALS)
    tasks = source(tmp_path / "animals", train_ways=4)
    used: dict[str, set[str]] = defaultdict(set)
    numbers: dict[str, set[int]] = defaultdict(set)
    for split in SPLITS:
        ways = 4 if split == "train" else 2
        support, query = tasks.episodes(split, torch.arange(60))
        assert support.x.shape == (60, ways, 3, SIZE, SIZE) and query.x.shape == (60, 2 * ways, 3, SIZE, SIZE)
        assert tasks.classes(split) == ways and tasks.size(split) is None
        for task in range(60):
            supports, queries = shown(support, task, known), shown(query, task, known)
            assert support.y[task].tolist() == list(range(ways))
            assert query.y[task].tolist() == [label for label in range(ways) for _ in range(2)]
            assert len(set(supports + queries)) == 3 * ways
            names = [name for name, _ in supports]
            assert len(set(names)) == ways
            assert [name for name, _ in queries] == [name for name in names for _ in range(2)]
            used[split] |= set(names)
            for name, number in supports + queries:
                numbers[name].add(number)
    assert [len(used[split]) for split in SPLITS] == [4, 2, 2]
    assert set().union(*used.values()) == set(ANIMALS)
    assert {name: len(seen) for name, seen in numbers.items()} == ANIMALS


# How classes are divided


def test_the_division_is_the_same_for_every_seed(tmp_path: Path) -> None:
    known = put(tmp_path / "many", {f"class{number:02}": 3 for number in range(25)})
    tasks = [source(tmp_path / "many", split=[0.64, 0.16, 0.2], seed=s, eval_seed=s) for s in (0, 9)]
    first, second = ([classes_shown(each, split, known, 150) for split in SPLITS] for each in tasks)
    assert first == second and [len(classes) for classes in first] == [16, 4, 5]
    assert len(set().union(*first)) == 25
    assert first[0] != {f"class{number:02}" for number in range(16)}


LISTED = {"train": ["cow", "birds/owl"], "val": ["fox", "hen"], "test": ["birds/wren", "cat", "dog"]}


@pytest.mark.parametrize("place", ["inside", "absolute"])
def test_lists_say_which_class_is_where(place: str, tmp_path: Path) -> None:
    known = put(tmp_path / "animals", ANIMALS)
    lists = tmp_path / "animals" / "lists" if place == "inside" else tmp_path / "elsewhere"
    lists.mkdir()
    (lists / "train.txt").write_text("cow\n\n  birds/owl/ \n")
    (lists / "val.csv").write_text("\ufefffox\r\n./hen\r\n")
    (lists / "test.txt").write_text("birds/wren\ncat\ndog")
    (lists / "test.csv").write_text("pig")  # test.txt is read instead
    tasks = source(tmp_path / "animals", split="lists" if place == "inside" else str(lists))
    for split, classes in LISTED.items():
        assert classes_shown(tasks, split, known) == set(classes)


def test_a_list_may_write_accents_in_another_form(tmp_path: Path) -> None:
    known = put(tmp_path / "animals", ANIMALS | {"kr\u00e4he": 5})
    for split, classes in LISTED.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(classes + ["kra\u0308he"] * (split == "val")))
    tasks = source(tmp_path / "animals", split=str(tmp_path))
    assert classes_shown(tasks, "val", known) == {*LISTED["val"], "kr\u00e4he"}


def test_list_order_and_folder_do_not_change_a_task(tmp_path: Path) -> None:
    episodes = []
    for place, step in (("here", 1), ("there", -1)):
        put(tmp_path / place / "animals", ANIMALS)
        for split, classes in LISTED.items():
            (tmp_path / place / f"{split}.txt").write_text("\n".join(classes[::step]))
        tasks = source(tmp_path / place / "animals", split=str(tmp_path / place))
        episodes.append([tasks.episodes(split, torch.arange(5)) for split in SPLITS])
    assert all(same(one, other) for one, other in zip(*episodes, strict=True))


def test_a_table_says_which_picture_is_of_which_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "folders", ANIMALS)
    files = sorted((tmp_path / "folders").rglob("*.png"))
    (tmp_path / "flat").mkdir()
    lines = ["path,class,by"]
    for number, file in enumerate(files):
        (tmp_path / "flat" / f"{number}.png").write_bytes(file.read_bytes())
        lines.append(f"{number}.png,{file.parent.relative_to(tmp_path / 'folders').as_posix()},me")
    (tmp_path / "flat" / "labels.csv").write_text("\n".join(lines))
    of_table, of_folders = source(tmp_path / "flat", table="labels.csv"), source(tmp_path / "folders")
    tasks = torch.arange(20)
    for split in ("train", "test"):
        assert same(of_table.episodes(split, tasks), of_folders.episodes(split, tasks))
    assert "the columns by are not read" in caplog.text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("file,class\n", "path"), ("path,class\na.png,\n", "a.png,"), ("path,class\n../a.png,x\n", "../a.png,x"),
        ("path,class\na.png,x\na.png,y\n", "a.png,y"), ("path,class\na.png,x\n.//a.png,y\n", "a.png,y"),
        ("path,class\na.png,gull, herring\n", "a.png"), ("path,class,by\na.png,x\n", "a.png"),
        ("path,class,class\na.png,x,y\n", "class 2 times"), ('path,class\na.png,"x\nb.png,x\n', "end of data"),
        ("path,class\n", "no rows"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named(text: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        source(tmp_path, table="labels.csv").episodes("train", torch.arange(2))
    named(str(caught.value), ["dataset.table=labels.csv", place])


def test_a_name_in_two_forms_of_unicode_is_one_class(tmp_path: Path) -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    put(tmp_path / "a", {composed: 2, apart: 2, "dog": 2})
    message = refusal(tmp_path / "a")
    named(message, ["two folders have the name caf", r"'caf\xe9'", r"'cafe\u0301'", "put their pictures into one"])
    for part, name in (("train", composed), ("val", "cow"), ("test", apart)):
        put(tmp_path / "b" / part, {name: 4, f"{part} too": 4})
    with pytest.raises(DataError, match="the class caf\u00e9 is in 'train' and in 'test'"):
        source(tmp_path / "b", split="folders").episodes("train", torch.arange(2))


def test_folders_say_which_class_is_where(tmp_path: Path) -> None:
    known = {}
    for split, classes in LISTED.items():
        known |= put(tmp_path / "all" / split, dict.fromkeys(classes, 3))
    put(tmp_path / "all", {"left out": 1})
    tasks = source(tmp_path / "all", split="folders")
    for split, classes in LISTED.items():
        assert classes_shown(tasks, split, known) == set(classes)


def test_files_that_systems_leave_behind_are_ignored(tmp_path: Path) -> None:
    known = put(tmp_path / "animals", ANIMALS)
    plain = source(tmp_path / "animals").episodes("train", torch.arange(5))
    for name in (".DS_Store", "Thumbs.db", "._000.png", "desktop.ini", "Icon\r"):
        (tmp_path / "animals" / "cat" / name).write_bytes(b"?")
    for name in (".cache", "@eaDir", "__MACOSX"):
        (tmp_path / "animals" / name).mkdir()
        (tmp_path / "animals" / name / "x.png").write_bytes(b"?")
    (tmp_path / "animals" / "README.txt").write_text("not in a class folder")
    assert same(source(tmp_path / "animals").episodes("train", torch.arange(5)), plain)
    assert classes_shown(source(tmp_path / "animals"), "test", known) <= set(ANIMALS)


# The cache


def stored(cache: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_mtime_ns) for path in cache.glob("*.npy"))


def test_only_a_changed_folder_is_decoded_again(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "animals"
    known = put(root, ANIMALS)
    before = source(root).episodes("train", torch.arange(20))
    first = stored(cache)
    assert len(first) == 1 and first[0][0].startswith("image_folder-")
    assert same(source(root).episodes("train", torch.arange(20)), before)
    source(root, split=[0.25, 0.25, 0.5], rotations=True, ways=2, seed=3).episodes("test", torch.arange(2))
    assert stored(cache) == first

    for name, count in ANIMALS.items():
        for number in range(count):
            Image.fromarray(255 - drawing(name, number)).save(root / name / f"{number:03}.png")
    after = source(root).episodes("train", torch.arange(20))
    assert torch.allclose(after.support.x, 1 - before.support.x, atol=1e-6)
    assert len(stored(cache)) == 2

    file = root / "cat" / "000.png"
    changed = file.stat()
    os.utime(file, ns=(changed.st_atime_ns, changed.st_mtime_ns + 1))
    source(root).episodes("train", torch.tensor([0]))
    source(root, channels=1).episodes("train", torch.tensor([0]))
    source(root, image_size=10).episodes("train", torch.tensor([0]))
    assert len(stored(cache)) == 5

    # Programs that keep the time of change: rsync -t, exiftool -P.
    status = (root / "fox/000.png").stat()
    content = (root / "fox/000.png").read_bytes()
    (root / "fox/000.png").write_bytes(content[::-1])
    (root / "fox/000.png").write_bytes(content)
    os.utime(root / "fox/000.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    source(root).episodes("train", torch.tensor([0]))
    assert len(stored(cache)) == 6

    file.rename(root / "dog" / "new.png")
    known[(255 - drawing("cat", 0)).tobytes()] = ("dog", 3)
    known |= {(255 - np.frombuffer(pixels, np.uint8)).tobytes(): who for pixels, who in list(known.items())}
    names = set().union(*(classes_shown(source(root), split, known) for split in SPLITS))
    assert names == set(ANIMALS) and len(stored(cache)) == 7


def test_the_same_names_in_another_folder_are_other_pictures(tmp_path: Path) -> None:
    for folder, flip in (("one", 0), ("two", 255)):
        for name in "abcdef":
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(3):
                file = tmp_path / folder / name / f"{number}.bmp"  # bitmaps are all of one size
                Image.fromarray(drawing(name, number) ^ np.uint8(flip)).save(file)
                os.utime(file, (1, 1))
    one, two = (
        source(tmp_path / folder, split=[0.34, 0.33, 0.33]).episodes("train", torch.arange(3))
        for folder in ("one", "two")
    )
    assert torch.allclose(one.support.x, 1 - two.support.x, atol=1e-6)


# What is refused


def refusal(root: Path, **given: Any) -> str:
    with pytest.raises(DataError) as caught:
        source(root, **given).episodes("train", torch.tensor([0]))
    assert not list(Path(os.environ["METALEARN_CACHE"]).glob("*.npy"))
    return str(caught.value)


def named(message: str, parts: Iterable[str]) -> None:
    for part in parts:
        assert part in message, message


def test_pictures_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    root = tmp_path / "animals"
    put(root, ANIMALS)
    whole = (root / "cat" / "001.png").read_bytes()
    (root / "cat" / "001.png").write_bytes(whole[: len(whole) // 2])
    (root / "birds" / "owl" / "002.png").write_text("this is text")
    (root / "fox" / "003.png").write_bytes(b"")
    (root / "pig" / "003.png").unlink()
    (root / "pig" / "003.png").symlink_to(root / "nowhere.png")
    message = refusal(root)
    named(message, [f"dataset.root={root}: 4 of {sum(ANIMALS.values())} pictures cannot be read: "])
    named(message, ["birds/owl/002.png (not recognised", "cat/001.png (", "fox/003.png (", "pig/003.png (No such file"])


def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the log of the program is in `caplog`: an earlier test may have sent it elsewhere."""
    monkeypatch.setattr(logging.getLogger("metalearn"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("metalearn"), "propagate", True)
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    ("more", "files", "parts"),
    [
        ({}, ("cat/notes.txt", "dog/000.psd", "fox/labels"),
         ["3 files", "cat/notes.txt", "dog/000.psd", "fox/labels", "are passed over"]),
        ({"cat/originals": 3}, (),  # such as copies, which would be a class of the same pictures
         ["1 folders within class folders count as classes of their own: cat/originals; take them out"]),
    ],
)  # fmt: skip
def test_what_else_lies_in_class_folders_is_named(
    more: dict[str, int], files: Sequence[str], parts: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    known = put(tmp_path / "animals", ANIMALS | more)
    for name in files:
        (tmp_path / "animals" / name).write_text("?")
    told(caplog, monkeypatch)
    assert classes_shown(source(tmp_path / "animals"), "test", known) <= set(ANIMALS | more)
    named(caplog.text, parts)


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    named(refusal(tmp_path / "no"), [f"dataset.root={tmp_path / 'no'}: there is no such folder", "type dataset.root="])
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    named(refusal(tmp_path / "empty"), ["there are no pictures below it", ".png", "a folder for each class"])
    (tmp_path / "empty" / "x.png").write_bytes(b"?")
    named(refusal(tmp_path / "empty"), ["1 pictures lie in no class folder: x.png"])


def test_a_folder_met_twice_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "animals", ANIMALS)
    (tmp_path / "animals" / "tiger").symlink_to(tmp_path / "animals" / "cat")
    named(refusal(tmp_path / "animals"), [str(tmp_path / "animals" / "tiger"), "are the same folder"])
    (tmp_path / "animals" / "tiger").unlink()
    (tmp_path / "animals" / "cat" / "up").symlink_to(tmp_path / "animals")
    named(refusal(tmp_path / "animals"), [str(tmp_path / "animals" / "cat" / "up"), "remove the link"])


@pytest.mark.parametrize(
    ("classes", "given", "parts"),
    [
        (ANIMALS, {"ways": 3}, ["dataset.ways=3: the split 'val' has 2 classes; type dataset.ways=2 or fewer"]),
        (ANIMALS, {"train_ways": 5}, ["dataset.train_ways=5: the split 'train' has 4 classes"]),
        (ANIMALS, {"queries": 3}, ["dataset.queries=3: with dataset.shots=1", "type dataset.queries=2 or fewer",
                                   "3 classes have too few pictures: ", "dog (3)", "hen (3)", "birds/wren (3)"]),
        (ANIMALS, {"shots": 4}, ["type dataset.shots=1 or fewer"]),
        (ANIMALS, {"train_queries": 6}, ["dataset.train_queries=6: "]),
        (ANIMALS | {"newt": 1}, {}, ["1 classes have fewer than 2 pictures", ": newt; remove"]),
        ({"a": 3, "b": 3, "c": 3}, {}, ["dataset.split=[0.5, 0.25, 0.25]: divides the 3 classes",
                                        "train 2, val 0, test 1", "at least 2; add classes"]),
        (dict.fromkeys("abcdef", 3), {}, ["train 3, val 1, test 2", "type other fractions, such as"]),
        ({"train/a": 3, "train/b": 3, "val/c": 3, "test/d": 3}, {"split": "folders"},
         ["dataset.split=folders: ", "val has 1 folders with pictures", "type dataset.split=[0.64,0.16,0.2]"]),
        ({f"{part}/{name}": 3 for part, names in {"train": "ab", "val": "cb", "test": "de"}.items() for name in names},
         {"split": "folders"}, ["the class b is in 'train' and in 'val'"]),
        ({"train": 3, "train/a": 3, "train/b": 3, "val/c": 3, "val/d": 3, "test/e": 3, "test/f": 3},
         {"split": "folders"}, ["3 pictures lie in no class folder: train/000.png"]),
        ({f"{part}/{name}": 3 for part in ("train", "test") for name in "abcd"},
         {"split": [0.4, 0.3, 0.3]}, ["dataset.split=[0.4, 0.3, 0.3]: the class ", "type dataset.root="]),
        (ANIMALS, {"split": "lists"}, ["dataset.split=lists: there is no such folder", "type dataset.split="]),
    ],
)  # fmt: skip
def test_what_cannot_fill_the_episodes_is_named(
    classes: Mapping[str, int], given: dict[str, Any], parts: Sequence[str], tmp_path: Path
) -> None:
    put(tmp_path / "animals", classes)
    named(refusal(tmp_path / "animals", **given), parts)


@pytest.mark.parametrize(
    ("train", "val", "test", "parts"),
    [
        ("cow\ndog", "fox\nhen", "cat\nlynx\nyak", ["2 of the 7 classes listed", "no folder", "lynx, yak"]),
        ("cow\ndog", "fox\nhen", "cat\ncow", ["the class cow is in 'train' and in 'test'"]),
        ("cow\ndog\ncow", "fox\nhen", "cat\npig", ["the class cow is twice in 'train'"]),
        ("cow\ndog", "fox", "cat\npig", ["val.txt lists 1 classes"]),
        ("cow\ndog", None, "cat\npig", ["has neither val.txt nor val.csv"]),
    ],
)
def test_lists_that_do_not_fit_are_named(
    train: str, val: str | None, test: str, parts: Sequence[str], tmp_path: Path
) -> None:
    put(tmp_path / "animals", ANIMALS)
    (tmp_path / "lists").mkdir()
    for split, text in (("train", train), ("val", val), ("test", test)):
        if text is not None:
            (tmp_path / "lists" / f"{split}.txt").write_text(text)
    named(refusal(tmp_path / "animals", split=str(tmp_path / "lists")), ["dataset.split=", *parts])


# The real program

SHORT = (
    "dataset=image_folder", "dataset.split=[0.5,0.25,0.25]", "dataset.ways=2", "dataset.queries=2",
    "dataset.image_size=16", "model.filters=16", "trainer.steps=3", "trainer.meta_batch_size=4",
    "trainer.task_chunk=2", "trainer.val_every=3", "trainer.val_tasks=4", "trainer.test_tasks=6",
    "logger.plots=false", "logger.report=false",
)  # fmt: skip


@pytest.mark.thorough
def test_the_program_learns_from_a_folder_on_two_workers(tmp_path: Path, cache: Path, start: Start) -> None:
    put(tmp_path / "animals", ANIMALS)
    outcome = start(*SHORT, f"dataset.root={tmp_path / 'animals'}", "workers=2").wait()
    assert outcome.code == 0, outcome.text
    result = json.loads(next(tmp_path.glob("outputs/*/*/result.json")).read_text())
    assert (result["status"], result["workers"], result["test"]["tasks"]) == ("completed", 2, 6)
    assert len(stored(cache)) == 1


@slow
@pytest.mark.thorough
def test_a_run_resumes_with_other_pictures_only_on_demand(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "animals"
    put(root, ANIMALS)
    own = (*SHORT, f"dataset.root={root}", "trainer.steps=4", "checkpoint.every=1")
    paused = start(*own, "pause_after=2", "run=first").wait()
    assert paused.code == 0, paused.text
    for path in root.rglob("*.png"):
        Image.new("RGB", (SIZE, SIZE), "grey").save(path)
    refused = start(*own, "run=first").wait()
    assert refused.code == 2 and "dataset=" in refused.text, refused.text
    (folder,) = tmp_path.glob("outputs/*/first")
    told = start(*own, "run=second", f"resume={folder}/checkpoints/last").wait()
    assert told.code == 0 and "has another content now" in told.text, told.text
    assert "run=NAME" not in told.text  # it is such a run
    result = json.loads((folder.parent / "second/result.json").read_text())
    assert len(result["data"].removeprefix("2-")) == 64
    for path in root.rglob("*.png"):
        Image.new("RGB", (SIZE, SIZE), "white").save(path)
    reported = start(*own, "run=second").wait()
    assert reported.code == 0 and "has another content now" in reported.text


@pytest.mark.thorough
def test_an_evaluation_warns_of_other_data(tmp_path: Path, start: Start) -> None:
    root, moved, other = (tmp_path / name for name in ("animals", "moved", "other"))
    put(root, ANIMALS)
    put(other, ANIMALS)
    for path in other.rglob("*.png"):
        Image.new("RGB", (SIZE, SIZE), "grey").save(path)
    trained = start(*SHORT, f"dataset.root={root}", "run=first").wait()
    assert trained.code == 0, trained.text
    root.rename(moved)
    (best,) = tmp_path.glob("outputs/*/first/checkpoints/best")
    message = f"dataset.root={other}: holds other data than checkpoint={best} was trained on"
    for data, more, said in ((moved, (), False), (other, (), True), (other, (f"dataset.root={other}",), False)):
        command = [sys.executable, "-m", "metalearn", "evaluate", f"checkpoint={best}", *more]
        outcome = Program(command, tmp_path, {"METALEARN_DATA": str(data)}).wait()
        assert outcome.code == 0 and (message in outcome.text) is said, outcome.text


# Plain samples


def plain(root: Path, evaluated_on: Unit, **given: Any) -> tuple[TaskSource, str]:
    tasks = source(root, **given)
    assert isinstance(tasks, GivesSamples)
    return tasks.samples(evaluated_on)


def samples_shown(samples: TaskSource, split: str, count: int, known: Known) -> dict[tuple[str, int], int]:
    """(class, number) → label of the first samples of a split."""
    query = samples.episodes(split, torch.arange(count)).query
    return dict(zip(shown(query, 0, known), query.y[0].tolist(), strict=True))


def test_pretraining_takes_all_pictures_of_training_classes(tmp_path: Path) -> None:
    known = put(tmp_path, ANIMALS)
    tasks = source(tmp_path)
    samples, words = plain(tmp_path, "tasks")
    trained = classes_shown(tasks, "train", known)
    wanted = {place for place in known.values() if place[0] in trained}
    assert f"all {len(wanted)} pictures of the {len(trained)} training classes" in words
    found = samples_shown(samples, "train", len(wanted), known)
    assert found.keys() == wanted, "each once in an epoch"
    labels = {name: label for (name, _), label in found.items()}
    assert sorted(labels.values()) == list(range(len(trained))) and samples.classes("train") == len(trained)
    assert all(label == labels[name] for (name, _), label in found.items())
    for split in ("val", "test"):
        assert samples.unit(split) == "tasks" and samples.classes(split) == 2
        assert same(samples.episodes(split, torch.arange(3)), tasks.episodes(split, torch.arange(3)))


def test_plain_classification_divides_every_class(tmp_path: Path) -> None:
    known = put(tmp_path, ANIMALS | {"cow": 10})
    samples, words = plain(tmp_path, "samples", split=[0.6, 0.2, 0.2], ways=5)
    sizes = {"train": 19, "val": 9, "test": 10}
    # By hand: of 3, 4, 5, 6 and 10 pictures, 0.2 round to 1, 1, 1, 1 and 2; the rest train.
    assert "all 8 classes, divided by [0.6, 0.2, 0.2] in each class" in words
    divided = {split: samples_shown(samples, split, samples.size(split) or 20, known) for split in SPLITS}
    counts = {split: len(found) for split, found in divided.items()}
    assert counts["val"] == sizes["val"] and words.endswith(f"val {counts['val']}, test {counts['test']}")
    everything = [place for found in divided.values() for place in found]
    assert sorted(everything) == sorted(known.values()), "each picture is in one split"
    names = sorted(ANIMALS)
    assert all(names[label] == name for found in divided.values() for (name, _), label in found.items())
    assert all({name for name, _ in found} == set(names) for found in divided.values())
    other, _ = plain(tmp_path, "samples", split=[0.6, 0.2, 0.2], seed=5, eval_seed=6)
    assert samples_shown(other, "test", counts["test"], known).keys() == divided["test"].keys(), "whatever the seed"


def test_plain_classification_takes_split_folders(tmp_path: Path) -> None:
    known = put(tmp_path, {f"{split}/{name}": 2 + place for place, split in enumerate(SPLITS) for name in "ab"})
    samples, words = plain(tmp_path, "samples", split="folders")
    assert words.endswith("as train, val and test have them: train 4, val 6, test 8") and samples.classes("test") == 2
    for split, count in zip(SPLITS, (4, 6, 8), strict=True):
        found = samples_shown(samples, split, count, known)
        assert {(f"{split}/{name}", n): "ab".index(name) for name in "ab" for n in range(count // 2)} == found


@pytest.mark.parametrize(
    ("classes", "given", "message"),
    [
        ({"a": 3, "b": 2}, {}, r"1 classes have fewer than 3 pictures, .*: b; add pictures"),
        ({"train/a": 3, "train/b": 3, "val/a": 3, "test/a": 3}, {"split": "folders"}, r"val has no pictures of b, and"),
        ({"a": 3, "b": 3}, {"split": "folders"}, r"train has 0 classes, and plain classification needs the same two"),
        ({"a": 3, "b": 3}, {"split": "lists"}, "lists divide the classes, and plain classification divides the pict"),
        ({"a": 3, "b": 3}, {"rotations": True}, "rotations=True: plain samples are not turned"),
        ({"a": 3, "b": 3}, {"train_ways": 2}, "train_ways=2: this algorithm trains on plain samples"),
    ],
)
def test_what_cannot_be_divided_is_named(
    classes: dict[str, int], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    put(tmp_path, classes)
    with pytest.raises(ValueError, match=message):
        plain(tmp_path, "samples", **given)


@pytest.mark.parametrize("algorithm", ["supervised", "finetune", "simpleshot", "tim"])
def test_the_networks_outputs_follow_the_classes(algorithm: str, tmp_path: Path) -> None:
    put(tmp_path / "d", ANIMALS)
    overrides = [
        *(f"algorithm={algorithm}", "dataset=image_folder", f"dataset.root={tmp_path}/d", "dataset.ways=2"),
        *("dataset.split=[0.5,0.25,0.25]", "dataset.queries=2", "dataset.image_size=12", "model.filters=4"),
        *("trainer.val_tasks=8", "trainer.test_tasks=8"),
    ]
    job = to_job(*compose_config(overrides), script(ROOT / "train.py"), [])
    parts = assemble(job)
    classes = 8 if algorithm == "supervised" else 4
    assert parts.start["head.weight"].shape[0] == job.config.model.ways == classes
    assert job.whole is not None and job.whole.model.ways == classes, "Hydra records what is trained"
    assert parts.start_notes[1:] == [f"model.ways={classes}, an output for each class, in place of dataset.ways=2"]
    check_compatible(parts.algorithm, parts.model, parts.start, parts.source, parts.first_tasks())
    if algorithm == "supervised":
        many = to_job(*compose_config([*overrides[:-2]]), script(ROOT / "train.py"), [])
        with pytest.raises(ConfigError, match=r"has 10 samples; type trainer.val_tasks=10 trainer.test_tasks=10 or f"):
            assemble(many)
    again = assemble(job)  # as a rank, and as an evaluation of the saved config
    assert len(again.start_notes) == 1 and again.start["head.weight"].equal(parts.start["head.weight"])


def test_a_wrapped_source_is_not_unwrapped(tmp_path: Path) -> None:
    put(tmp_path, ANIMALS)

    class Around:
        def __init__(self) -> None:
            self.inside = source(tmp_path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inside, name)

    around: Any = Around()
    with pytest.raises(ConfigError, match="it gives tasks, and this algorithm learns from plain samples"):
        metalearn.train("supervised", metalearn.named("conv4", filters=4), around, steps=1, progress=False)


def test_the_library_trains_the_baselines_on_folders(tmp_path: Path) -> None:
    put(tmp_path / "d", ANIMALS)
    pictures = metalearn.named(
        "image_folder", root=str(tmp_path / "d"), split=[0.5, 0.25, 0.25], ways=2, queries=2, image_size=12
    )
    learned = metalearn.train(
        "finetune", metalearn.named("conv4", filters=4), pictures, steps=1, val_tasks=2, test_tasks=2, progress=False
    )
    assert learned.params["head.weight"].shape[0] == 4 and learned.ways == 2
