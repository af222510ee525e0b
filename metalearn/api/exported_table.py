"""A fitted estimator of a table as one program: the network with the keys and values of the known rows, which runs
without this program."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from metalearn.api.card import CARD, card
from metalearn.api.program import FILES, ONNX, PROGRAMS, TORCH, check_packages, refuse_paths, write_program
from metalearn.checks import one_of
from metalearn.errors import ConfigError
from metalearn.reporting.provenance import made_with
from metalearn.storage.files import whole_folder

if TYPE_CHECKING:
    from metalearn.api.tables import PFNClassifier, PFNRegressor

COLUMNS = "columns.json"
"""How the columns of a table become the numbers that a program reads."""

LEVELS = (0.05, 0.5, 0.95)
"""Quantiles that the program of a regressor gives."""


def export(model: "PFNClassifier | PFNRegressor", out: Path, *, file_format: str, licence: str | None, key: str) -> str:
    """Writes the program of a fitted estimator into the new folder `out`, with columns.json and a card; returns what
    there is to say. Messages call `out` by `key`.

    Raises:
        ConfigError: a package is missing, the program differs from this one by more than 1e-4, a path of this machine
            would be in the folder, or it cannot be written.
    """
    one_of("format", file_format, PROGRAMS)
    check_packages(file_format)
    if model._opened().device.type != "cpu":
        raise ConfigError(f"format={file_format}: programs are made on the CPU; give the estimator device='cpu'")
    labels = getattr(model, "classes_", None)
    network, known = _Network(model), len(model._table[1])
    columns = model._columns()
    x = torch.randn(4, len(columns), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if model._place is not None:
        x = x * model._place[1] + model._place[0]
    for number, column in enumerate(columns):
        if "categories" in column:
            x[:, number] = torch.arange(4) % len(column["categories"])
    x[3, 0] = torch.nan
    with torch.no_grad():
        ours = network(x)
    outputs = ["probabilities"] if labels is not None else ["mean", "quantiles"]
    content: dict[str, Any] = {"input": "rows: float64 [n, columns]; NaN is a missing value, or a new category"}
    content |= {"columns": columns}
    content |= {"classes": _plain(labels)} if labels is not None else {"quantiles": list(LEVELS)}
    refuse_paths(content)
    facts = {
        "Predicts": "the probabilities of classes" if labels is not None else "the mean, and quantiles",
        "Known rows": f"{known}; their keys and values are in the program, not the rows themselves",
        "Licence": licence or "not known", **made_with(),
    }  # fmt: skip
    with whole_folder(key, out) as folder:
        difference = write_program(
            network, x, ours, folder / FILES[file_format], file_format, name=f"path={model.path}", outputs=outputs,
            given="rows", folded=True,
        )  # fmt: skip
        (folder / COLUMNS).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")
        text = card(
            out.name, task=f"tabular-{'classification' if labels is not None else 'regression'}",
            tags=["prior-fitted network", file_format], licence=licence, reached=None, facts=facts,
            use=_USES[file_format].replace("OUTPUTS", ", ".join(outputs)),
        )  # fmt: skip
        (folder / CARD).write_text(text, encoding="utf-8")
    return f"largest difference from this program: {difference:.1e}"


class _Network(nn.Module):
    """From rows float64 [n, columns] to the probabilities [n, classes], or to the mean [n] and the quantiles
    [n, levels]."""

    def __init__(self, model: "PFNClassifier | PFNRegressor") -> None:
        super().__init__()
        self._model = model

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        from metalearn.api.tables import in_spreads

        model, learner, reads = self._model, self._model._opened(), self._model._reads()
        with learner.computing():
            found = reads.answer(learner.params, model._known, in_spreads(rows, model._place)[None]).double()
        if reads.predictive is None:
            return (found[0, :, : len(model.classes_)].softmax(dim=1).float(),)
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        mean, quantiles = reads.predictive.mean(found)[0, :, 0], reads.predictive.quantiles(found, levels)[0]
        return model._in_units(mean), model._in_units(quantiles)


def _plain(values: Any) -> list[Any]:
    """Labels as JSON has them."""
    return [value.item() if isinstance(value, np.generic) else str(value) for value in values]


_USES = {
    ONNX: """With `pip install onnxruntime`, in this folder: `python use.py table.csv`, where `use.py` is

```python
import csv
import json
import sys

import numpy as np
import onnxruntime

with open("columns.json", encoding="utf-8") as file:
    about = json.load(file)
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
MISSING = {"", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "<NA>", "n/a", "#N/A"}


def number(column, text):
    names = column.get("categories")
    if text in MISSING:
        return np.nan
    if names is None:
        return float(text)
    text = {"true": "True", "false": "False"}.get(text.lower(), text)
    return float(names.index(text)) if text in names else np.nan


with open(sys.argv[1], encoding="utf-8-sig", newline="") as file:
    rows = [[number(column, row[column["name"]]) for column in about["columns"]] for row in csv.DictReader(file)]
names = [output.name for output in session.get_outputs()]
found = dict(zip(names, session.run(None, {"rows": np.array(rows, np.float64)})))
for row in range(len(rows)):
    if "classes" in about:
        votes = found["probabilities"][row]
        print(about["classes"][votes.argmax()], f"{votes.max():.6f}", sep="\\t")
    else:
        print(*(f"{value:.6g}" for value in (found["mean"][row], *found["quantiles"][row])), sep="\\t")
```""",
    TORCH: """`torch.export.load` may run code of a file: load those that you trust.

```python
import torch

run = torch.export.load("model.pt2").module()
OUTPUTS = run(rows)  # float64 [n, columns], see columns.json
```""",
}
"""How to use a program, by format. OUTPUTS is replaced."""
