"""The classifier: `fit`, `predict`, `predict_proba` and `score` as scikit-learn's estimators have them."""

import hashlib
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from metalearn.api.pictures import all_seen, listed, seen, support_in
from metalearn.classifier import saved
from metalearn.classifier.backbones import DEFAULT, OF_CODE, Backbone, backbone_of, features_from_cache
from metalearn.classifier.heads import AUTO, HEADS, State, centred, class_means
from metalearn.classifier.validation import FOLDS, report_of
from metalearn.errors import ConfigError, DataError, one_of, real_number, whole_number
from metalearn.models.common.pretrained import LICENCE, NAMED
from metalearn.reporting.page import picture_of
from metalearn.reporting.provenance import made_with
from metalearn.saved import exporter, form, hub
from metalearn.saved.exporter import FOLDER, ONNX, TORCH, Card, NetworkToExport, use
from metalearn.storage.files import StrPath, whole_folder
from metalearn.tasks.common.pictures import PictureForm, first_few, one_form

log = logging.getLogger("metalearn")


class Collected(NamedTuple):
    """Pictures as the backbone sees them, uint8 [size, size, 3] each, with the names of their files and classes."""

    names: list[str]
    labels: list[Any]
    pictures: list[Tensor]


def collect(root: Path, form: PictureForm, *, key: str, strict: bool, least: int = 2) -> Collected:
    """All pictures of the class folders below `root`. What cannot be read is passed over with a line, and so is each
    copy of a picture. Raises DataError if there are too few classes, or a picture lies in two of them; or, if `strict`,
    something would be passed over.

    Args:
        key: how messages name the folder, as `FOLDER=`.
        strict: refuse what would be passed over.
        least: how many classes there must be.
    """
    support = support_in(root, key, least, strict=strict)
    assert support.classes is not None
    pictures, wrong = list[tuple[str, str, Tensor]](), []
    for file, label, picture in zip(support.files, support.classes, seen(support.paths, form), strict=True):
        if isinstance(picture, str):
            log.warning("%s%s: cannot be read: %s", key, root / file, picture)
        else:
            pictures.append((file, label, picture))
    if broken := len(support.files) - len(pictures):
        wrong.append(f"{broken} of {len(support.files)} pictures cannot be read")
    kept, copies = without_copies(pictures, f"{key}{root}")
    if copies:  # which tell nothing of new pictures
        wrong.append(f"{len(copies)} pictures are copies of others of their classes: {first_few(copies)}")
    if strict and wrong:
        raise DataError(f"{key}{root}: --strict: {'; '.join(wrong)}; remove them")
    for what in wrong:
        log.warning("%s%s: passed over: %s", key, root, what)
    gone = sorted(set(support.classes) - set(kept.labels))
    if gone:
        raise DataError(f"{key}{root}: no picture of these classes can be read: {first_few(gone)}; add some, or remove")
    return kept


def without_copies(pictures: Iterable[tuple[str, Any, Tensor]], where: str) -> tuple[Collected, list[str]]:
    """The pictures without copies within a class, and the names of the copies. Raises DataError if a picture is in two
    classes, so that no answer is right."""
    kept, copies, first = Collected([], [], []), [], dict[bytes, tuple[str, Any]]()
    for name, label, picture in pictures:
        digest = hashlib.sha256(picture.numpy().tobytes()).digest()
        other, its = first.setdefault(digest, (name, label))
        if its != label:
            raise DataError(f"{where}: {name} is the same picture as {other}, in another class; remove one of them")
        if other != name:
            copies.append(name)
            continue
        kept.names.append(name)
        kept.labels.append(label)
        kept.pictures.append(picture)
    return kept, copies


OUTPUTS = ("probabilities", "similarity")
SETTINGS = ("head", "folds", "seed", "threshold")  # arguments of the constructor that are saved as they are
_SAME = 1 - 1e-7  # cosine similarity from which two pictures are the same one: other processors give other last bits


class Answer(NamedTuple):
    """What a picture shows."""

    label: Any  # the class; None if it is none of them
    probability: float  # that of the most probable class
    probabilities: NDArray[np.float64]  # of all classes, in the order of `classes_`


class PictureClassifier:
    """Classes of pictures, learned from a few pictures of each: features of a pretrained network, which stays as it is,
    and the head that is right most often in cross-validation over these classes.

    It has the methods of scikit-learn's classifiers. A picture is a path, one of Pillow's, an array [h, w, 3] or
    [h, w], the bytes of a file, or an open file. Several threads may ask it at once.

    Args:
        backbone: `efficientnet_lite0`, which the extra `pictures` brings; a network of torchvision that takes
            pretrained weights, such as `resnet18`; `timm:NAME`; an nn.Module; or what
            `metalearn.classifier.backbones.of_module` gives.
        weights: of a network by name, as `backbone_of` takes them.
        head: one of `metalearn.classifier.heads.HEADS`, or `auto`, which compares them.
        folds: parts of the cross-validation.
        seed: of the division into folds.
        threshold: the similarity to the nearest class mean, from -1 to 1, below which a picture is none of the classes;
            `auto`: cross-validation chooses it; None: every picture is named.

    Attributes:
        classes_: the labels, sorted.
        report_: the figures of the cross-validation: `head`, `accuracy` with `interval95`, and more.
    """

    def __init__(
        self, backbone: str | nn.Module | Backbone = DEFAULT, *, weights: str | None = None, head: str = AUTO,
        folds: int = FOLDS, seed: int = 0, threshold: float | str | None = AUTO,
    ) -> None:  # fmt: skip
        self.backbone, self.weights, self.head, self.folds, self.seed = backbone, weights, head, folds, seed
        self.threshold = threshold

    # Learning

    def fit(self, X: Iterable[Any], y: Iterable[Any]) -> "PictureClassifier":  # noqa: N803 (scikit-learn's name)
        """Learns from pictures and their labels. Copies of a picture within a class count once. Raises ValueError for
        an argument of the constructor, fewer than two classes, a picture that cannot be read, or one with two labels.
        """
        pictures, labels = listed(X, "X"), [_plain(label) for label in listed(y, "y")]
        if len(pictures) != len(labels):
            raise ValueError(f"y: has {len(labels)} labels for {len(pictures)} pictures; give one for each")
        _sorted_classes(labels)  # before pictures are decoded
        seen = all_seen(pictures, self.opened().form, "X")
        names = [f"X[{number}]" for number in range(len(seen))]
        kept, copies = without_copies(zip(names, labels, seen, strict=True), "X")
        if copies:
            log.warning("X: %d pictures are copies of others of their class, and count once", len(copies))
        return self.fit_collected(kept)

    def fit_collected(self, collected: Collected) -> "PictureClassifier":
        """As `fit`, from decoded pictures."""
        if self.threshold not in (AUTO, None):
            real_number("threshold", self.threshold, at_least=-1)
        self._learn_features(features_from_cache(self.opened(), collected.pictures), collected.labels, collected.names)
        self._shown: dict[str, Tensor] = {}
        return self._show(collected)

    def _learn_features(self, features: Tensor, labels: Sequence[Any], names: Sequence[str]) -> None:
        """Learns from the features [n, width] of pictures."""
        one_of("head", self.head, (AUTO, *HEADS))
        whole_number("folds", self.folds, at_least=2)
        whole_number("seed", self.seed, at_least=0)
        classes, y = _sorted_classes(labels)
        order = torch.argsort(y, stable=True)  # so that the folds are the same, in whatever order the classes came
        self.classes_ = np.array(classes)
        self._features, self._y, self._names = features[order], y[order], [names[i] for i in order.tolist()]
        self.report_: dict[str, Any] = report_of(
            self._features, self._y, classes=[str(label) for label in classes], names=self._names,
            heads=list(HEADS) if self.head == AUTO else [self.head], folds=self.folds, seed=self.seed,
        )  # fmt: skip
        self._learn(self.report_["head"])
        self._origin = made_with()

    def _show(self, collected: Collected) -> "PictureClassifier":
        """Notes in the report a picture near the mean of each class, and the known picture nearest to each one
        that was taken for another class; and keeps small ones of these pictures for the page. A name that several
        pictures have says of none which it is."""
        counts = Counter(self._names)
        once = {name: place for place, name in enumerate(self._names) if counts[name] == 1}
        z, wrong = centred(self._features, self._centre), self.report_.get("wrong", ())[: saved.MOST_SHOWN]
        for entry in wrong:
            if (place := once.get(entry["picture"])) is not None:
                alike = z @ z[place]
                alike[place] = -torch.inf
                nearest = int(alike.argmax())
                entry |= {"nearest": self._names[nearest], "nearest_label": str(self.classes_[self._y[nearest]])}
        pictures = dict(zip(collected.names, collected.pictures, strict=True))
        kept = torch.tensor([name in once and (name in pictures or name in self._shown) for name in self._names])
        near = (z * self._means[self._y]).sum(dim=1) + 4 * kept  # of a class first those that can be shown
        firsts = [int(torch.where(self._y == label, near, -torch.inf).argmax()) for label in range(len(self.classes_))]
        self.report_["typical"] = {str(self.classes_[self._y[place]]): self._names[place] for place in firsts}
        names = {name for entry in wrong for name in (entry["picture"], entry.get("nearest"))}
        names |= {*list(self.report_["typical"].values())[: saved.MOST_CLASSES]}
        for name in names & pictures.keys():
            self._shown[name] = torch.tensor(picture_of(pictures[name].permute(2, 0, 1) / 255))
        self._shown = {name: value for name, value in self._shown.items() if name in names & once.keys()}
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
        return self.answers_of(self._features_of(X))

    def answers_of(self, features: Tensor) -> list[Answer]:
        """As `answers`, from features [n, width]."""
        probabilities, near = self._probabilities(features)
        threshold, answers = self._refused_below(), []
        for values, similarity in zip(probabilities, near.tolist(), strict=True):
            best = int(values.argmax())
            is_near = threshold is None or similarity >= threshold
            label = self.classes_[best].item()  # a plain value, which JSON has too
            answers.append(Answer(label if is_near else None, float(values[best]), values))
        return answers

    def _refused_below(self) -> float | None:
        """The similarity below which a picture is none of the classes."""
        threshold: Any = self.report_["threshold"] if self.threshold == AUTO else self.threshold
        return None if threshold is None else float(threshold)

    def predict_proba(self, X: Iterable[Any]) -> NDArray[np.float64]:  # noqa: N803
        """The probability of each class: [n, classes]."""
        return self._probabilities(self._features_of(X))[0]

    def predict(self, X: Iterable[Any]) -> NDArray[Any]:  # noqa: N803
        """The most probable class of each picture; `answers` also says where it is none of them."""
        best = self.predict_proba(X).argmax(axis=1)  # first, since it refuses what is not fitted
        return np.asarray(self.classes_[best])

    def score(self, X: Iterable[Any], y: Iterable[Any]) -> float:  # noqa: N803
        """The fraction of right predictions. Pictures that it has learned from are counted in a line of the log."""
        features, labels = self._features_of(X), [_plain(label) for label in listed(y, "y")]
        if len(features) != len(labels) or not labels:
            raise ValueError(f"y: has {len(labels)} labels for {len(features)} pictures; give one for each")
        if line := self.too_good(features):
            log.warning("X: %s", line)
        answers = self.classes_[self._probabilities(features)[0].argmax(axis=1)].tolist()
        return sum(bool(answer == label) for answer, label in zip(answers, labels, strict=True)) / len(labels)

    def _learned_as(self, features: Tensor) -> list[int | None]:
        """The places of the same pictures among those that it has learned from; None for another one."""
        self._check_fitted()
        learned, places = centred(self._features, self._centre), list[int | None]()
        for z in centred(features, self._centre):  # one by one: all at once would take memory of n × its pictures
            alike = learned @ z
            places.append(int(alike.argmax()) if alike.amax() > _SAME else None)
        return places

    def too_good(self, features: Tensor) -> str:
        """A line if some of these pictures [n, width] are among those that it has learned from; else empty."""
        count = sum(place is not None for place in self._learned_as(features))
        line = (
            f"{count} of {len(features)} pictures are among those that it has learned from: an accuracy over them "
            "would be too good; leave them out"
        )
        return line if count else ""

    def _features_of(self, pictures: Iterable[Any]) -> Tensor:
        self._check_fitted()
        backbone = self.opened()
        seen = all_seen(listed(pictures, "X"), backbone.form, "X")
        # A service asks for one picture at a time: the cache would get a file for each, for ever.
        return backbone.features(seen) if len(seen) == 1 else features_from_cache(backbone, seen)

    def _probabilities(self, features: Tensor) -> tuple[NDArray[np.float64], Tensor]:
        """The probabilities [n, classes], and the similarity of each picture to the nearest class mean."""
        self._check_fitted()
        # One by one: a product of several rows may round otherwise.
        probabilities, near = zip(*map(self._asked, features.split(1)), strict=True)
        return torch.cat(probabilities).numpy(), torch.cat(near)

    def _asked(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """As `_probabilities`, computed at once."""
        z = centred(features, self._centre)
        scores = HEADS[self.report_["head"]].score(self._state, z)
        return torch.softmax(scores * self.report_["sharpness"], dim=1), (z @ self._means.T).amax(dim=1)

    def _check_fitted(self) -> None:
        if not hasattr(self, "_state"):
            # scikit-learn knows this state by an error type of its own, a ValueError too.
            kind = getattr(sys.modules.get("sklearn.exceptions"), "NotFittedError", ValueError)
            raise kind("this PictureClassifier has not learned yet; call fit first, or load one")

    def opened(self) -> Backbone:
        """The backbone, read once."""
        if not hasattr(self, "_opened"):
            self._opened = backbone_of(self.backbone, self.weights)
        return self._opened

    # Changing

    def add(self, collected: Collected) -> "PictureClassifier":
        """Learns further pictures, of new classes or of those that it has. Pictures that it has already count once."""
        self._check_fitted()
        named = [self._class_named(label) for label in collected.labels]
        strange = sorted(label for label in set(named) if isinstance(label, str))
        if strange and not isinstance(self.classes_[0], str):
            raise ConfigError(
                f"FOLDER: the class {strange[0]} is a text, and those of this classifier are numbers: "
                f"{', '.join(map(str, self.classes_[:20]))}; name the folder by one of them, or fit again"
            )
        features = features_from_cache(self.opened(), collected.pictures)
        same = self._learned_as(features)
        for name, label, place in zip(collected.names, named, same, strict=True):
            if place is not None and self.classes_[self._y[place]] != label:
                raise DataError(
                    f"FOLDER: {name} is the same picture as {self._names[place]}, in another class; remove one of them"
                )
        new = [i for i, place in enumerate(same) if place is None]
        labels = [*self.classes_[self._y].tolist(), *(named[i] for i in new)]
        names = [*self._names, *(collected.names[i] for i in new)]
        self._learn_features(torch.cat([self._features, features[new]]), labels, names)
        return self._show(collected)

    def _class_named(self, label: Any) -> Any:
        """The class that a label is, or that a text names: folders and commands have texts for numbers, too."""
        by_name = {one_form(str(label_of_class)): label_of_class for label_of_class in self.classes_.tolist()}
        return by_name.get(one_form(label), label) if isinstance(label, str) else label

    def remove(self, classes: Sequence[Any]) -> "PictureClassifier":
        """Forgets classes. A class that is a number may be named by its text. Raises ValueError for a class that it
        does not have, or if fewer than two are left."""
        self._check_fitted()
        gone = [self._class_named(label) for label in classes]
        for label in gone:
            if label not in self.classes_.tolist():
                raise ConfigError(f"{label}: is no class of it; allowed: {', '.join(map(str, self.classes_[:20]))}")
        stays = torch.from_numpy(~np.isin(self.classes_[self._y], np.array(gone)))
        labels = self.classes_[self._y[stays]].tolist()
        names = [name for name, kept in zip(self._names, stays.tolist(), strict=True) if kept]
        self._learn_features(self._features[stays], labels, names)
        return self._show(Collected([], [], []))

    # In files

    def save(self, path: StrPath, *, replace: bool = False, command: str = "") -> None:
        """Writes a folder with what `load` needs, and `report.html`, a page of the cross-validation. Weights that a
        package brings are not in it; `export` writes them too. Raises ValueError if it has not learned, there is
        something else at `path`, or it cannot be written.

        Args:
            replace: `path` may hold a classifier, which is replaced.
            command: what has been typed to make it; the page shows it.
        """
        self._check_fitted()
        backbone, folder = self.opened(), Path(path)
        old = replace and form.kind_of(folder) == saved.CLASSIFIER.name
        with form.replacing("path", folder, saved.CLASSIFIER) if replace else whole_folder("path", folder) as temporary:
            before = form.load_meta(folder, saved.CLASSIFIER)["commands"] if old else []
            commands = [*before, *([command] if command else [])]
            weights = {} if backbone.packaged else backbone.state
            self._fill(temporary, weights, backbone.licence, commands, folder.resolve().name)
        if replace and (folder / form.CARD).exists():
            log.warning("%s: %s tells of the classifier before; type metalearn export for a new one", path, form.CARD)

    def _fill(
        self, folder: Path, weights: Mapping[str, Tensor], licence: str | None, commands: Sequence[str] | None = None,
        title: str = "",
    ) -> None:  # fmt: skip
        """Writes it into an empty folder, with these `weights` of its network, and their licence. `commands` are all
        that have made it, and `title` is that of the page. Without commands, which name folders of this machine, it has
        no page and no pictures."""
        backbone, tensors = self.opened(), {"features": self._features, "labels": self._y}
        if weights:
            whole = {key: value.contiguous() for key, value in weights.items()}
            save_file(whole, folder / saved.WEIGHTS, {NAMED: backbone.named, LICENCE: licence or ""})
        classes, report = self.classes_.tolist(), self.report_
        if commands is not None:
            text = saved.classifier_page(title, report, classes, backbone.name, self._shown, commands, self.threshold)
            (folder / saved.REPORT).write_text(text, encoding="ascii")
            tensors |= {f"{saved.SHOWN}{self._names.index(name)}": value for name, value in self._shown.items()}
        form.fill(folder, saved.CLASSIFIER, tensors, {
            "backbone": backbone.name, "weights": backbone.named, "digest": backbone.digest,
            "settings": {name: getattr(self, name) for name in SETTINGS}, "classes": classes, "names": self._names,
            "report": report, "origin": self._origin, "commands": [*(commands or ())],
        })  # fmt: skip

    def export(
        self, path: StrPath, *, format: str = "folder", licence: str | None = None,
        name: str | None = None, key: str = "path",
    ) -> list[str]:  # fmt: skip
        """Writes a new folder for other machines, with a model card; returns what there is to say about it, in lines.
        Raises ValueError if it has not learned, a package is missing, the program differs from this one by more than
        1e-4, or the folder cannot be written.

        Args:
            format: `folder`, which `load` reads without anything else; `onnx` or `torch-export`: a program of the
                network and the head that runs without this one.
            licence: of the network's weights, if it is not known.
            name: what the card calls it; None: as the folder.
            key: how messages name the path.
        """
        self._check_fitted()
        backbone, out = self.opened(), Path(path)
        licence = licence or backbone.licence
        if format == FOLDER and not backbone.state:
            raise ConfigError(
                f"format={FOLDER}: {backbone.name} cannot be rebuilt from its weights alone; type --format {ONNX} or "
                f"--format {TORCH}"
            )

        def program() -> NetworkToExport:
            x = torch.from_numpy(np.stack(exporter.noise(backbone.form))).permute(0, 3, 1, 2).float() / 255

            def answer(pictures: Tensor) -> tuple[Tensor, ...]:
                return tuple(output.float() for output in self._asked(backbone.network(pictures)))

            return NetworkToExport(answer, x, backbone.name, OUTPUTS)

        about = exporter.picture_input(
            backbone.form, self.classes_.tolist(), threshold=self._refused_below(),
            output="probabilities [n, classes]; similarity [n]",
        )  # fmt: skip
        card = self._card(name or out.name, licence)
        fill = partial(self._fill, weights=backbone.state, licence=licence)
        lines = exporter.export(key, out, format, fill=fill, program=program, about=about, card=card)
        if licence is None:
            lines.append("licence: that of the network's weights is not known to this program; type --licence TEXT")
        return lines

    def _card(self, name: str, licence: str | None) -> Card:
        report, backbone, origin = self.report_, self.opened(), self._origin
        accuracy, reached = f"not known: {report.get('unknown')}", None
        if report["accuracy"] is not None:
            low, high = report["interval95"]
            accuracy = (
                f"{report['accuracy']:.1%} of pictures not learned from (95% interval {low:.1%} to {high:.1%}, "
                f"{report['pictures']} pictures by cross-validation, chance {1 / report['classes']:.1%})"
            )
            reached = ("accuracy", report["accuracy"], "cross-validation over the pictures of the classes")
        counts = torch.bincount(self._y, minlength=len(self.classes_)).tolist()
        by_class = (f"{label} ({count})" for label, count in zip(self.classes_, counts, strict=True))
        facts = {
            "Accuracy": accuracy,
            "Classes (pictures)": exporter.first_few_of(by_class),
            "Data": f"{sum(counts)} pictures of {len(counts)} classes; SHA-256 of their features {self.data_digest()}",
            "Network": f"{backbone.name}, {backbone.named or 'weights'}; SHA-256, with how pictures are shown, "
            f"{backbone.digest}",
            "Head": report["head"],
            "Licence of the weights": licence or "not known",
            **{item.capitalize(): origin.get(item, "not known") for item in ("date", "commit", "versions", "hardware")},
        }
        package = "'/path/to/metalearn[pictures]'" if backbone.name == DEFAULT else "/path/to/metalearn"
        folder = use("classifier", PACKAGE=package, NAME=name, FOLDER=Path(name).name)
        uses = {FOLDER: folder, **exporter.uses_of_pictures(", ".join(OUTPUTS))}
        uses[TORCH] += (
            "\n\nIf `similarity` is below `threshold` in `preprocessing.json`, the picture shows none of them."
        )
        return Card(name, "image-classification", ["image-classification", "few-shot"], licence, facts, uses, reached)

    def push_to_hub(
        self, repo_id: str, *, private: bool = False, licence: str | None = None, timeout: float = hub.SECONDS
    ) -> str:
        """Exports it to a repository of Hugging Face's hub (the extra `hub`); returns its address. The arguments are
        those of `metalearn.push_to_hub`, and the `licence` of `export`. Raises ValueError if it has not learned, or the
        hub refuses it or does not answer in time."""
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "classifier"
            for line in self.export(folder, licence=licence, name=repo_id):
                log.warning(line)
            return hub.push(folder, repo_id, private=private, timeout=timeout)

    @classmethod
    def from_pretrained(
        cls, name_or_folder: StrPath, *, revision: str | None = None, timeout: float = hub.SECONDS
    ) -> "PictureClassifier":
        """A classifier in a folder, or in a repository of Hugging Face's hub, of any origin: nothing in it is run. The
        arguments are those of `metalearn.from_pretrained`. Raises ValueError if it cannot be fetched in time, or is
        refused."""
        return cls.load(hub.fetch(name_or_folder, revision=revision, timeout=timeout), key="name_or_folder")

    def data_digest(self) -> str:
        """The SHA-256 of the features and labels that it has learned from, in whatever order."""
        self._check_fitted()
        rows = zip(self._features, self._y.tolist(), strict=True)
        each = sorted(row.numpy().tobytes() + str(self.classes_[y]).encode(errors="surrogateescape") for row, y in rows)
        return hashlib.sha256(b"".join(each)).hexdigest()

    @classmethod
    def load(
        cls, path: StrPath, *, weights: str | None = None, backbone: nn.Module | Backbone | None = None,
        key: str = "path",
    ) -> "PictureClassifier":  # fmt: skip
        """A classifier that `save` has written, of any origin: nothing in it is run. Raises ValueError if the folder is
        damaged, or the weights are not those that it was made with.

        Args:
            path: its folder.
            weights: of a network by name, if the folder does not have them.
            backbone: the network, if it is one of code.
            key: how messages name the folder.
        """
        content, its_weights = saved.read(Path(path), key)
        name = content["backbone"]
        if backbone is None and name.startswith(OF_CODE):
            raise ConfigError(f"{key}={path}: was made with {name}; give it in Python: load(…, backbone=network)")
        if weights is None and backbone is None and its_weights is not None:
            weights = str(its_weights)
        if name != DEFAULT and weights is None and backbone is None:
            raise ConfigError(
                f"{key}={path}: was made with {name} and weights that are not in it; name them: "
                f"weights={content['weights']}"
            )
        made = cls(backbone or name, weights=weights, **content["settings"])
        if made.opened().digest != content["digest"] or made.opened().width != content["features"].shape[1]:
            raise ConfigError(f"{key}={path}: was made with other weights of {name}; name those")
        made.classes_, made.report_, made._origin = np.array(content["classes"]), content["report"], content["origin"]
        made._features, made._y, made._names = content["features"], content["labels"], content["names"]
        made._shown = content["shown"]
        made._learn(content["report"]["head"])
        return made

    # As scikit-learn wants it

    _estimator_type = "classifier"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {name: getattr(self, name) for name in ("backbone", "weights", *SETTINGS)}

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
        kept = {name: value for name, value in self.__dict__.items() if name != "_opened"}  # it is opened again
        return kept | {"_shown": {}}  # megabytes, which only a page needs

    def __repr__(self) -> str:
        return f"PictureClassifier({', '.join(f'{name}={value!r}' for name, value in self.get_params().items())})"


def _sorted_classes(labels: Sequence[Any]) -> tuple[list[Any], Tensor]:
    """The classes, sorted, and the place of each label among them."""
    # numpy and Python would make labels of several types equal, or convert them.
    kinds = {type(label): label for label in labels}
    if len(kinds) > 1:
        shown = ", ".join(f"{label!r} ({kind.__name__})" for kind, label in kinds.items())
        raise ValueError(f"y: has labels of several types: {shown}; give one type, such as [str(label) for label in y]")
    classes = sorted(set(labels))
    if len(classes) < 2:
        raise ValueError(f"y: has one class, {classes[0] if classes else 'none'}; give two or more")
    place = {label: number for number, label in enumerate(classes)}
    return classes, torch.tensor([place[label] for label in labels])


def _plain(label: Any) -> Any:
    """A label as a Python value."""
    value = label.item() if hasattr(label, "item") else label
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"y={value!r}: a label must be a text or a number")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"y={value!r}: Unknown label type: continuous; give classes, as texts or whole numbers")
    return value
