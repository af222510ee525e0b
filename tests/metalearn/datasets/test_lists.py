"""The committed lists: whole families, subgroups and scripts go to a split; every package is pinned."""

import csv
import re
import unicodedata
from collections import Counter, defaultdict

import pytest

from metalearn.datasets.designs import left_out
from metalearn.datasets.drawing import HERE, designs_of, listed

MODIFIERS = re.compile(r"-?\b(200d|fe0f|2640|2642|1f3f[b-f]|1f9b[0-3]|27a1)\b")
PERSONS = {"1f468": "1f9d1", "1f469": "1f9d1", "1f466": "1f9d2", "1f467": "1f9d2", "1f474": "1f9d3", "1f475": "1f9d3"}


def test_emoji_have_four_designs_and_are_split_by_subgroup() -> None:
    rows = listed(HERE / "emoji_classes.csv")
    designs = [design.name for design in designs_of(HERE / "emoji_designs.csv")]
    assert Counter(one.one.split for one in rows) == {"train": 891, "val": 222, "test": 284}
    assert len({one.one.key for one in rows}) == len(rows)
    assert min(sum(bool(one.row[name]) for name in designs) for one in rows) >= 4
    splits = defaultdict(set)
    for one in rows:
        splits[one.row["group"], one.row["subgroup"]].add(one.one.split)
    assert {len(found) for found in splits.values()} == {1}


def test_emoji_that_differ_in_gender_hair_or_skin_are_one_class() -> None:
    families = Counter()
    for one in listed(HERE / "emoji_classes.csv"):
        signs = MODIFIERS.sub("", one.one.key).strip("-").split("-")
        families["-".join(PERSONS.get(sign, sign) for sign in signs)] += 1
    assert [family for family, count in families.items() if count > 1] == []


def test_the_flag_is_no_map_of_japan() -> None:
    rows = {one.one.key: one.row for one in listed(HERE / "emoji_classes.csv")}
    assert rows["1f5fe"]["name"] == "map of Japan" and not rows["1f5fe"]["streamline-emojis"]


def test_a_drawing_that_is_left_out_has_a_reason_and_stays_out() -> None:
    rows = {one.one.key: one.row for one in listed(HERE / "emoji_classes.csv")}
    with (HERE / "emoji_left_out.csv").open(encoding="utf-8", newline="") as file:
        out = list(csv.DictReader(file))
    assert len({(row["key"], row["design"]) for row in out}) == len(out)
    assert [row for row in out if rows[row["key"]][row["design"]] or not row["icon"] or not row["reason"]] == []
    for row in out:
        for other in re.findall(r"\b[0-9a-f]{4,5}\b", row["reason"].removeprefix(f"one picture for {row['key']}")):
            assert other in rows, row
            assert "another split" not in row["reason"] or rows[other]["split"] != rows[row["key"]]["split"], row


def test_scripts_are_split_whole_without_repeated_letters() -> None:
    rows = listed(HERE / "scripts_classes.csv")
    splits = {
        "latin": "train",
        "hiragana": "train",
        "hangul": "train",
        "katakana": "val",
        "greek": "test",
        "cyrillic": "test",
    }
    assert {(one.row["script"], one.one.split) for one in rows} == set(splits.items())
    for one in rows:
        assert unicodedata.name(one.one.key).split()[0].lower() == one.row["script"]
        assert one.one.name == f"{one.one.key} {one.row['script']}"
    letters = "".join(one.one.key for one in rows)
    for group in (
        "AΑА",
        "BΒВвß",
        "OoΟοОо",
        "XxΧХх",
        "cCСс",
        "Uu",
        "ΓГг",
        "ΠПп",
        "ケヶ",
        "アァ",
        "へヘ",
        "つっ",
    ):
        assert sum(letters.count(letter) for letter in group) == 1, group


def test_what_a_font_shows_wrongly_is_a_character_of_the_lists() -> None:
    keys = {one.one.key for name in ("kanji", "scripts") for one in listed(HERE / f"{name}_classes.csv")}
    fonts = {design.name for design in designs_of(HERE / "fonts.csv")}
    with (HERE / "fonts_left_out.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert row["font"] in fonts and row["reason"], row
            assert any(left_out(row["font"]).match(key) for key in keys), row
            if "-" not in row["characters"]:
                assert set(row["characters"]) <= keys, row


@pytest.mark.parametrize("name", ["emoji_designs", "fonts"])
def test_every_package_is_pinned_and_has_a_licence(name: str) -> None:
    designs = designs_of(HERE / f"{name}.csv")
    assert len({design.name for design in designs}) == len(designs)
    for design in designs:
        assert re.fullmatch("[0-9a-f]{64}", design.sha256) and design.version and design.licence and design.author
