"""Types of the options that commands take: they refuse a value with what is allowed."""

import argparse
import inspect
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from metalearn.errors import as_typed, typed_program


class Parser(argparse.ArgumentParser):
    """A parser whose options may stand anywhere: `metalearn prior check gp --tasks 60 dataset.noise=0.3`."""

    parse_args = argparse.ArgumentParser.parse_intermixed_args


def command_parser(command: str, about: str | None) -> Parser:
    """The parser of a command; its help shows `about`, a docstring, as it is written."""
    return Parser(
        typed_program(command), description=inspect.cleandoc(about or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def typed(command: str, arguments: Sequence[str]) -> str:
    """A command as it was typed."""
    return as_typed(shlex.join(["-m", "metalearn", command, *arguments]))


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return text.split(",")


def similarity(text: str) -> float | str:
    """A cosine similarity, or `auto`."""
    try:
        if text == "auto" or -1 <= float(text) <= 1:
            return text if text == "auto" else float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number from -1 to 1, or auto; type 0.3")


def whole(at_least: int) -> Callable[[str], int]:
    """The type of a whole number with this minimum."""

    def number(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdecimal() or int(text) < at_least:
            example = max(at_least, 1)
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {at_least}; type {example}")
        return int(text)

    return number


def make_output(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Makes the folder of `--output`; ends the program with its usage if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: {folder}: cannot be written ({error.strerror}); type another folder")


def real(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0; type 1")
    return value
