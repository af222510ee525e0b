"""Class means without training: by hand on pictures of one number; and which classes a learner confuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.drawn_pictures import PROTOCOLS, accuracy_of, confusions, frozen_features, main, source_of
from metalearn.api.load import load
from metalearn.types import Batch, Episode
from tests.runs import slow
from tests.saved import saved_run


class Tasks:
    """Task number i has class 0 with the support pictures 0 and 0.4, class 1 with 1, and a query of each at `asked`."""

    def __init__(self, *asked: tuple[float, float]) -> None:
        self.asked = asked

    def episodes(self, split: str, indices: Tensor) -> Episode:
        assert split == "test"
        support = torch.tensor([0.0, 0.4, 1.0]).view(1, 3, 1, 1, 1)
        query = torch.tensor(self.asked[int(indices)]).view(1, 2, 1, 1, 1)
        return Episode(Batch(support, torch.tensor([[0, 0, 1]])), Batch(query, torch.tensor([[0, 1]])))


def test_a_query_belongs_to_the_nearest_mean() -> None:
    source: Any = Tasks((0.1, 0.9), (0.59, 0.61), (0.61, 0.59))  # the means are 0.2 and 1
    accuracy, interval = accuracy_of(source, lambda pictures: pictures.flatten(1), 3)
    assert accuracy == pytest.approx((1 + 1 + 0) / 3)
    assert interval == pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5)


def test_the_protocols_are_tasks_of_the_sets() -> None:
    for name, protocols in PROTOCOLS.items():
        for protocol in protocols:
            assert source_of(name, protocol).classes("test") == protocol.ways


@slow
def test_a_picture_is_computed_once() -> None:
    features = frozen_features()
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    first = features(pictures)
    assert torch.equal(features(pictures[[1, 0]]), first[[1, 0]])
    assert not torch.equal(first[0], first[1])


def test_the_confused_classes_are_those_that_look_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three classes of the test: rows and their double, of the same pictures, and columns."""
    rows = np.zeros((16, 16, 3), np.uint8)
    rows[::4] = 255
    classes = {"rows": rows, "double": rows, "columns": rows.transpose(1, 0, 2)}
    for name in ("train", "val", "test"):
        for label, pattern in classes.items():
            folder = tmp_path / f"pictures/{name}/{label}{'' if name == 'test' else f' of {name}'}"
            folder.mkdir(parents=True)
            for number in range(3):
                picture = pattern.copy()
                picture[number, number] = 100
                Image.fromarray(picture).save(folder / f"{number}.png")
    saved_run(
        tmp_path / "run", "dataset=image_folder", f"dataset.root={tmp_path / 'pictures'}", "dataset.split=folders",
        "dataset.ways=3", "dataset.shots=2", "dataset.queries=1", "dataset.image_size=16", "algorithm=protonet",
        "model.filters=8", "model.transductive=false",
    )  # fmt: skip
    (pair,) = confusions(str(tmp_path / "run"), 12)
    assert pair.names == ("double", "rows")
    assert pair.asked == 24  # a query of each of both in every task
    assert 0 < pair.wrong <= 24
    assert [len(shown) for shown in pair.pictures] == [3, 3]

    main(["--confusions", str(tmp_path / "run"), "--tasks", "12", "--page", str(tmp_path / "page.html")])
    assert f"| double, rows | {pair.wrong} | 24 |" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert f"1. double and rows: {pair.wrong} of 24 queries" in page
    assert page.count("<img ") == 6


def test_a_page_needs_a_learner(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["emoji", "--page", "page.html"])
    assert "--page shows the pictures of --confusions CHECKPOINT" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["protonet", "maml"])
@pytest.mark.parametrize("together", [True, False])
def test_confusions_are_the_errors_of_the_test_of_the_run(together: bool, algorithm: str, tmp_path: Path) -> None:
    """Whether its test normalises all queries of a task together, or by the support set."""
    saved_run(
        tmp_path, "dataset.queries=3", f"algorithm={algorithm}", "model.filters=8", f"model.transductive={together}"
    )
    found = confusions(str(tmp_path), 10)
    wrong, other = (
        1 - load(tmp_path, transductive=how).evaluate(count=10)["accuracy"] for how in (together, not together)
    )
    assert sum(pair.wrong for pair in found) / (10 * 5 * 3) == pytest.approx(wrong)
    assert wrong != other
