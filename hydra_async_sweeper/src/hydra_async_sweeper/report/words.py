"""Numbers as a person reads them."""


def number_text(value: float) -> str:
    return f"{value:.4g}"


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
