"""Documents as tasks: Markov chains with their best prediction, and windows of texts."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from metalearn.errors import DataError
from metalearn.tasks.chains import Chains, chains
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.texts import Texts, texts


def source(length: int = 60, alpha: float = 0.3, seed: int = 0) -> Chains:
    return chains(symbols=3, alpha=alpha, length=length, eval_length=length, seeds=Seeds(seed, 0))


def test_a_document_follows_from_its_number() -> None:
    three = source().episodes("train", torch.tensor([4, 2, 7]))
    alone = source().episodes("train", torch.tensor([2]))
    assert three.query.x[1].equal(alone.query.x[0]) and three.query.y[1].equal(alone.query.y[0])
    assert three.support.x.shape == (3, 0, 1) and three.query.x[:, 1:, 0].long().equal(three.query.y[:, :-1])
    other = source(seed=1)
    assert not other.episodes("train", torch.tensor([2])).query.y.equal(alone.query.y)
    assert other.episodes("test", torch.tensor([2])).query.y.equal(source().episodes("test", torch.tensor([2])).query.y)


@pytest.mark.parametrize("last", [None, 12])
def test_the_optimum_is_that_of_counts(last: int | None) -> None:
    """Counted anew for every symbol, from the text that may be seen."""
    episode = source().episodes("test", torch.arange(2))
    losses = source().optimum(episode, last)
    for row, (x, y) in enumerate(zip(*episode.query, strict=True)):
        text = [int(x[0, 0]), *y.tolist()]
        for place in range(2, len(text)):
            visible = text[max(0, place - (last or place)) : place]
            follows = Counter(zip(visible, visible[1:], visible[2:], strict=False))
            count = [follows[*text[place - 2 : place], symbol] for symbol in range(3)]
            expected = -math.log((count[text[place]] + 0.3) / (sum(count) + 3 * 0.3))
            assert float(losses[row, place - 1]) == pytest.approx(expected)


def test_no_other_prediction_is_better_on_average() -> None:
    """Than that by the Dirichlet's own number, over many documents."""
    episode = source(length=200).episodes("test", torch.arange(200))
    best = source(length=200).optimum(episode).mean()
    for alpha in (0.1, 0.9):
        assert source(alpha=alpha).optimum(episode).mean() > best + 0.005


# Texts


def written(folder: Path) -> Path:
    for split, count in (("train", 3), ("val", 2), ("test", 2)):
        (folder / split).mkdir(parents=True)
        for number in range(count):
            (folder / split / f"{number}.txt").write_text(f"{split} {number} " * 40)
    return folder


def read(folder: Path, ending: str = ".txt") -> Texts:
    return texts(root=str(folder), ending=ending, length=50, eval_length=80, seeds=Seeds(0, 0))


def test_windows_lie_in_one_text_of_their_split(tmp_path: Path) -> None:
    here = read(written(tmp_path))
    assert (here.size("train"), here.size("val"), here.size("test"), here.classes("test")) == (None, 2, 2, 256)
    windows = [bytes(y.tolist()).decode() for y in here.episodes("train", torch.arange(40)).query.y]
    assert {len(window) for window in windows} == {50}
    for number in range(3):
        mine = [window for window in windows if window in f"train {number} " * 40]
        assert 3 < len(mine) < 30
    both = [bytes(y.tolist()).decode() for y in here.episodes("test", torch.arange(2)).query.y]
    assert {number for number in "01" for window in both if window in f"test {number} " * 40} == {"0", "1"}


def test_entries_at_the_top_are_in_one_split(tmp_path: Path) -> None:
    for entry in range(60):
        (tmp_path / f"package{entry}").mkdir()
        for part in "ab":
            (tmp_path / f"package{entry}" / f"{part}.py").write_text(f"x{entry}{part} = 1\n" * 30)
    splits = read(tmp_path, ".py")._splits
    places = {split: {content.split()[0][:-1] for content in inside} for split, inside in splits.items()}
    assert sum(map(len, places.values())) == 60 and all(len(splits[name]) == 2 * len(places[name]) for name in splits)


def test_files_that_cannot_be_read_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path)
    (folder / "train/short.txt").write_text("short")
    (folder / "train/picture.txt").write_bytes(b"\0" * 500)
    (folder / "val/copy.txt").write_bytes((folder / "test/0.txt").read_bytes())
    with caplog.at_level("INFO", "metalearn"):
        assert (read(folder).size("test"), read(folder).size("val")) == (2, 2)
    assert "left out: 1 short, 1 no text, 1 a copy" in caplog.text
    assert "1 texts are in two splits, and count in the first: val/copy.txt and test/0.txt" in caplog.text


def test_too_few_texts_of_a_split_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "val/0.txt").unlink()
    with pytest.raises(DataError, match=r"1 of the files \*.txt of val have more than 80 bytes, and it needs 2"):
        read(folder).size("test")
    with pytest.raises(DataError, match="is no folder"):
        read(tmp_path / "missing").size("test")


def test_one_symbol_says_nothing_of_the_next() -> None:
    losses = source().optimum(source().episodes("test", torch.arange(2)), last=1)
    assert losses.eq(math.log(3)).all()
