"""A published learner goes to a hub, a stand-in, and comes back. Tests of classifiers have the hub's other answers."""

from pathlib import Path

import numpy as np
import pytest

import metalearn
from metalearn.api.export import export
from metalearn.errors import ConfigError
from metalearn.saved.form import MANIFEST, META, TENSORS
from tests.hub import Hub, needs_hub
from tests.metalearn.api.test_load import TINY
from tests.saved import saved_run

pytestmark = pytest.mark.thorough


@needs_hub
def test_a_published_learner_goes_to_a_hub_and_comes_back(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "run", "algorithm=protonet", *TINY)
    export(tmp_path / "run", tmp_path / "model")
    (tmp_path / "model/answers.csv").write_text("not for others")
    address = metalearn.push_to_hub(tmp_path / "model", "me/animals", private=True, timeout=60)
    assert address.endswith("/me/animals") and hub.private == [True]
    assert set(hub.files) == {"README.md", META, MANIFEST, TENSORS}
    hub.files["evil.py"] = b"raise SystemExit"
    back = metalearn.from_pretrained("me/animals", timeout=60)
    shape = (1, 28, 28)
    np.testing.assert_array_equal(back.probe(shape), metalearn.load(tmp_path / "model").probe(shape))
    np.testing.assert_array_equal(back.probe(shape), metalearn.from_pretrained(tmp_path / "model").probe(shape))
    assert not list((tmp_path / "cache").rglob("evil.py"))
    monkeypatch.setattr(hub, "COMMIT", "b" * 40)
    hub.files[TENSORS] += b"?"
    with pytest.raises(ConfigError, match=TENSORS):
        metalearn.from_pretrained("me/animals", timeout=60)
    with pytest.raises(ConfigError, match=r"folder=.*; type one that metalearn export has written"):
        metalearn.push_to_hub(tmp_path, "me/animals")
