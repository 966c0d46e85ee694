"""How the log and the status show an exception that was not foreseen.

Its text may hold the key of a chunk, as that of a KeyError does. Keys are secrets of their
namespace (docs/security.md), so the contents of bytes are left out.
"""

import re
import traceback

_BYTES = re.compile(r"""\b[bB](?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


def without_bytes(text: str) -> str:
    """The text with ``b'…'`` for each bytes literal in it."""
    return _BYTES.sub("b'…'", text)


def fault_text(error: BaseException) -> str:
    """The exception's repr, without the contents of bytes."""
    return without_bytes(repr(error))


def fault_trace(error: BaseException) -> str:
    """The exception's traceback, without the contents of bytes."""
    return without_bytes("".join(traceback.format_exception(error)))
