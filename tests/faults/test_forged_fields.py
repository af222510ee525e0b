"""Every field of every file that a folder from elsewhere can bring, forged: it is refused in words, or harmless."""

import argparse
import contextlib
import io
import json
import math
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from PIL import Image

from metalearn.api.export import _test_of
from metalearn.api.load import load
from metalearn.app.job import installed, to_job
from metalearn.app.parts import assemble
from metalearn.app.run import restored
from metalearn.cli import cache, compare, evaluate, export, join, leave, train
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError, DataError
from metalearn.runs import folder
from metalearn.runs.seen import from_meta
from metalearn.tasks.common.identities import content_of
from metalearn.tasks.common.shards import ShardForm, Shards, digest_of, write_shards
from metalearn.tasks.image_folder import by_lists
from tests.runs import slow
from tests.saved import MARKER, SECRET

pytestmark = pytest.mark.thorough

TINY = (
    "algorithm=protonet", "model.filters=4", "dataset.ways=2", "dataset.queries=2", "trainer.meta_batch_size=1",
    "trainer.steps=2", "trainer.val_every=2", "trainer.val_tasks=2", "trainer.test_tasks=2", "checkpoint.every=1",
    "logger.every=1", "logger.csv=true", "logger.tensorboard=false", "logger.plots=false", "logger.report=false",
)  # fmt: skip
STEP = "run/checkpoints/step_000002"
PICTURE = Image.new("L", (28, 28))


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, "", "???", "${oc.env:SECRET}", "${seed}", "${", "\x1b[2J\n", "../../etc/passwd", "x" * 3000, "0", 0,
    -1, 1.5, 2**63, 10**400, -(10**18), math.inf, math.nan, [], {}, [1, 2], {"a": {"b": None}}, deep(20), deep(200),
    {"_target_": "os.system", "command": f"touch {MARKER}"}, "os.system", "\ud800", "\0",
)  # fmt: skip
"""What a field is replaced by."""

BYTES: tuple[Callable[[bytes], bytes], ...] = (
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text[: len(text) // 2],
    lambda text: text.replace(b":", b": \xff", 1),
    lambda text: b"[" * 100_000,
    lambda text: text.replace(b"{", b'{"step": [], "step": {}, ', 1),
    lambda text: text.decode("utf-8", "replace").encode("utf-16"),
    lambda text: b"",
    lambda text: b"\0" * 1000,
)
"""What is done to a file as a whole."""


class Forged(NamedTuple):
    """A file in the folder of the test; how often it is forged, beside the others; how its plain values are read and
    written."""

    path: str
    weight: int
    parse: Callable[[bytes], Any]
    form: Callable[[Any], bytes]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    return str(yaml.safe_dump(value)).encode("utf-8", "surrogatepass")


def lines_of(text: bytes) -> Any:
    return [json.loads(line) for line in text.splitlines()]


def as_lines(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def rows_of(text: bytes) -> Any:
    return [line.split(",") for line in text.decode().splitlines()]


def as_rows(rows: Any) -> bytes:
    table = [row if isinstance(row, list) else [row] for row in (rows if isinstance(rows, list) else [rows])]
    return "\n".join(",".join(map(str, row)) for row in table).encode("utf-8", "surrogatepass") + b"\n"


def as_index(value: Any) -> bytes:
    """With the digest of itself that fits."""
    return as_json(value | {"sha256": digest_of(value)} if isinstance(value, dict) else value)


def state_of(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def as_state(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


FILES = (
    Forged("run/result.json", 12, json.loads, as_json),
    Forged(f"{STEP}/meta.json", 25, json.loads, as_json),
    Forged(f"{STEP}/manifest.json", 2, json.loads, as_json),
    Forged(f"{STEP}/state.pt", 15, state_of, as_state),
    Forged("run/.hydra/config.yaml", 8, yaml.safe_load, as_yaml),
    Forged("run/.hydra/hydra.yaml", 1, yaml.safe_load, as_yaml),
    Forged("run/.hydra/overrides.yaml", 1, yaml.safe_load, as_yaml),
    Forged("run/metrics.jsonl", 12, lines_of, as_lines),
    Forged("run/metrics.csv", 6, rows_of, as_rows),
    Forged("run/world.json", 4, json.loads, as_json),
    Forged("model/model.json", 30, json.loads, as_json),
    Forged("shards/index.json", 6, json.loads, as_index),
    Forged("cache/pictures.json", 4, json.loads, as_json),
    Forged("lists/train.csv", 4, rows_of, as_rows),
)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each file."""
    home = tmp_path_factory.mktemp("genuine")
    assert train.main([*TINY, f"hydra.run.dir={home}/run"]) == 0
    assert export.main([str(home / "run"), "--out", str(home / "model")]) == 0
    content = {"arguments": [*TINY], "folder": str(home), "address": "127.0.0.1", "interface": "", "token": "x",
               "host": "nowhere", "port": 1, "workers": 2, "pid": 1, "born": 1, "inode": 1}  # fmt: skip
    (home / "run/world.json").write_text(json.dumps(content))
    (home / "shards").mkdir()
    write_shards(home / "shards", FORM, [{"a": np.zeros((2, 8, 8), np.uint8)}])
    (home / "cache").mkdir(mode=0o700)
    (home / "cache/pictures.npy").write_bytes(b"x")
    (home / "cache/pictures.json").write_text(json.dumps({"sha256": "0" * 64, "stamp": [1, 2, 3, 4]}))
    (home / "lists").mkdir()
    for split in ("train", "val", "test"):
        (home / f"lists/{split}.csv").write_text(f"{split}/a\n{split}/b\n")
    return home


FORM = ShardForm("glyphs-v1", (8, 8))


def forge(home: Path, draw: random.Random) -> str:
    """Forges one field, or the whole, of one file; returns what was done."""
    (file,) = draw.choices(FILES, [file.weight for file in FILES])
    path = home / file.path
    content = path.read_bytes()
    if draw.random() < 0.1:
        number = draw.randrange(len(BYTES))
        path.write_bytes(BYTES[number](content))
        done = f"{file.path}: bytes {number}"
    else:
        whole = file.parse(content)
        places = list(places_in(whole))
        where = draw.choice(places)
        value = draw.choice(VALUES)
        whole = put(whole, where, value, as_key=draw.random() < 0.05)
        try:
            path.write_bytes(file.form(whole))
        except (RecursionError, ValueError, TypeError, RuntimeError) as error:
            return f"{file.path}: {where} cannot be {value!r:.40}: {error!r:.60}"
        done = f"{file.path}: {'.'.join(map(str, where))}={value!r:.60}"
    if file.path.startswith(STEP) and "manifest" not in file.path:
        seal(home / STEP)
    return done


def places_in(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places_in(child, (*place, key))


def put(node: Any, place: tuple[Any, ...], value: Any, *, as_key: bool) -> Any:
    if not place:
        return value
    first, *rest = place
    if as_key and not rest and isinstance(node, dict) and isinstance(value, str):
        return {value if key == first else key: child for key, child in node.items()}
    node[first] = put(node[first], tuple(rest), value, as_key=as_key)
    return node


def seal(folder: Path) -> None:
    files = [file for file in folder.iterdir() if file.name != "manifest.json"]
    digests = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    (folder / "manifest.json").write_text(json.dumps(digests))


def actions(home: Path, name: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """The real functions that read the file."""
    run, out = home / "run", home / "out"
    if name.startswith((STEP, "model/")):
        path = home / ("model" if name.startswith("model") else STEP)
        yield "evaluate", lambda: evaluate.main([f"checkpoint={path}", f"output={out}/evaluated"])
        yield "load", lambda: code_of(lambda: load(path).adapt([PICTURE] * 2, ["a", "b"]).predict([PICTURE]))
        yield "init_from", lambda: train.main([*TINY, f"hydra.run.dir={out}/begun", f"init_from={path}"])
    if name in ("run/result.json", f"{STEP}/meta.json"):
        yield "export", lambda: export.main([str(run), "--out", str(out / "exported")])
    if name == "run/result.json":
        yield "report", lambda: train.main([*TINY, f"hydra.run.dir={run}"])
    if name.startswith("run/metrics"):
        yield "compare", lambda: compare.main([str(run), "--output", str(out / "compared.png")])
    if name == "run/world.json":
        yield "join", lambda: join.main([str(run)])
        yield "leave", lambda: leave.main([str(run), "worker1"])
    if name.startswith("run/.hydra"):  # which is read as long as there is no checkpoint
        shutil.rmtree(run / "checkpoints")
    if name.startswith("run/"):
        drawn = f"logger.report={'metrics' in name}".lower()
        yield "resume", lambda: train.main([*TINY, f"hydra.run.dir={run}", "trainer.steps=3", drawn])
    if name.startswith("cache/"):
        yield "cache", lambda: cache.show(home / "cache", argparse.Namespace(clean=False))
    if name.startswith("shards/"):
        yield "shards", lambda: code_of(lambda: Shards(str(home / "shards"), FORM, ["a"]).pictures(0))
    if name.startswith("lists/"):
        names = [f"{split}/{label}" for split in ("train", "val", "test") for label in "ab"]
        yield "lists", lambda: code_of(lambda: by_lists(home, names, "lists"))


def code_of(call: Callable[[], object]) -> int:
    """ValueErrors are the promise of the library."""
    try:
        call()
    except (ValueError, DataError):
        return 2
    return 0


def forgeries(file: Forged, home: Path, most: int) -> Iterator[str]:
    """Puts a hostile value into a field of a file, each into each, or `most` of these pairs; says which."""
    path = home / file.path
    content, forged = path.read_bytes(), 0
    pairs = [(where, value) for where in places_in(file.parse(content)) for value in VALUES]
    for where, value in random.Random(7).sample(pairs, min(most, len(pairs))):
        with contextlib.suppress(RecursionError, ValueError, TypeError, RuntimeError):  # cannot be written
            path.write_bytes(file.form(put(file.parse(content), where, value, as_key=False)))
            if file.path.startswith(STEP):
                seal(home / STEP)
            forged += 1
            yield f"{'.'.join(map(str, where))}={value!r:.60}"
    print(f"{file.path}: {forged} of {len(pairs)} forged")
    assert forged > most * 3 // 4


@pytest.fixture
def copy(genuine: Path, tmp_path: Path) -> Path:
    shutil.copytree(genuine, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


def test_every_field_of_a_result(copy: Path) -> None:
    run = copy / "run"
    reads = (lambda: folder.finished(run, 2), lambda: folder.pause_of(run, 1), lambda: _test_of(copy / STEP, 2))
    for _ in forgeries(FILES[0], copy, 900):
        for read in reads:
            with contextlib.suppress(ConfigError):
                read()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [60, pytest.param(700, marks=slow)])
@pytest.mark.parametrize("file", [file for file in FILES if file.path.endswith(("state.pt", "meta.json"))])
def test_fields_of_a_checkpoint_before_a_run_goes_on(file: Forged, most: int, copy: Path) -> None:
    run = copy / "run"
    composed = compose_config([*TINY, f"hydra.run.dir={run}", "trainer.steps=3"])
    parts = assemble(to_job(*composed, installed(), []))
    shutil.rmtree(run / "checkpoints/step_000001")
    for done in forgeries(file, copy, most):
        with contextlib.suppress(ConfigError):
            found = folder.inspect(run, composed.config, parts.start, lambda saved: restored(saved, parts)).snapshot
            assert found is not None, done
            learner, progress = restored(found, parts)
            assert progress.step == 2 and round(progress.seconds + 0.5, 3) is not None and learner.params, done
            for total, terms in found.state.get("pending", {}).values():
                assert (total + 0.5) / (terms + 1) is not None, done
            from_meta(found.meta), content_of(parts.source).is_known_otherwise(found.meta.get("data"))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=slow)])
def test_a_forged_field_ends_in_words_or_does_no_harm(
    count: int, genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    draw, codes, wrong = random.Random(7), Counter[int](), list[str]()
    for number in range(count):
        home = tmp_path / str(number)
        shutil.copytree(genuine, home, symlinks=True)
        (home / "cache").chmod(0o700)
        (home / "out").mkdir()
        world = json.loads((home / "run/world.json").read_text())
        (home / "run/world.json").write_text(json.dumps(world | {"inode": (home / "run").stat().st_ino}))
        done = forge(home, draw)
        name, action = draw.choice(list(actions(home, done.partition(":")[0])))
        what, code = "", -1
        try:
            code = action()
        except BaseException:
            what = traceback.format_exc()
        said = capfd.readouterr()
        text = said.out + said.err
        codes[code] += 1
        if code not in (0, 1, 2, 3) or "Traceback" in text or SECRET in text or "\x1b" in text:
            wrong.append(f"{done}: {name}: exit code {code}\n{(what or text)[-1500:]}")
        assert not list(home.rglob(MARKER)), done
        shutil.rmtree(home)
    with capfd.disabled():
        print(f"\n{count} forged: exit codes {dict(codes)}, {len(wrong)} without words")
    assert not list(tmp_path.rglob(MARKER)) and not wrong, "\n\n".join(wrong)
