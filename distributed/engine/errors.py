"""Texts of exceptions. A class may raise anything when its message is asked for."""


def message_of(error: BaseException) -> str:
    """The message, or that it cannot be shown."""
    try:
        return str(error)
    except Exception as unprintable:
        return f"<its message cannot be shown: {type(unprintable).__name__}>"


def describe(error: BaseException) -> str:
    """The type and the message."""
    return f"{type(error).__name__}: {message_of(error)}"
