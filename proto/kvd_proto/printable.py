"""Text that is safe to show: on a terminal, in a log line, as a label of a metric.

Printable is what `str.isprintable` says: letters, digits, marks, punctuation, symbols
and the plain space. Controls (ESC, NUL), line ends, other spaces, and characters that
change the direction of text (U+202E) are not.
"""

from typing import Any


def unprintable(text: str) -> str:
    """The first character that may not stand in a name, such as `U+001B at 1`; empty if none."""
    for index, character in enumerate(text):
        if not character.isprintable():
            return f"U+{ord(character):04X} at {index}"
    return ""


def printable(text: str) -> str:
    r"""The text with `\x1b` and the like in place of what is not printable."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def printable_tree(value: Any) -> Any:
    """Plain data (dict, list, str and numbers) in which every text, keys too, is printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_tree(item) for item in value]
    return value
