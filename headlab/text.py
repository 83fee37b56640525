"""Text that users gave, as it may be shown."""

from __future__ import annotations

import unicodedata
from typing import Any

_SYMBOLS = {"\n": "↵", "\t": "⇥"}
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters and symbols that draw nothing: Hangul fillers and the empty braille cell.
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800")


def visible(text: str, limit: int = 40) -> str:
    r"""Text in which nothing is invisible, for showing a token; still escape it for HTML.

    Controls, bidirectional and other format characters, unusual spaces, surrogates, private and
    unassigned characters become escapes such as ``\u202e``; a newline becomes ``↵``, a tab ``⇥``;
    spaces become ``␣`` where nothing else is there to set them off; a lone combining mark gets a
    dotted circle to sit on; what is longer than ``limit`` characters ends in ``…``.
    """
    if not text:
        return "∅"
    if not text.strip(" "):
        text = text.replace(" ", "␣")
    shown: list[str] = []
    marks = 0
    for character in text[: limit + 1]:
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if character in _SYMBOLS:
            shown.append(_SYMBOLS[character])
        elif (category in _HIDDEN and character != " ") or character in _BLANK or marks > 2:
            shown.append(_escape(character))
        elif marks and not shown:
            shown.append("◌" + character)
        else:
            shown.append(character)
    return "".join(shown[:limit]) + ("…" if len(text) > limit else "")


def printable(text: str) -> str:
    """Text of any length in which nothing is invisible, line by line; blank lines stay as they are."""
    return "\n".join(
        visible(line, len(line)) if line.strip() else line for line in text.split("\n")
    )


def shown(value: Any, limit: int = 60) -> str:
    """The repr of a value for a message, cut off; numbers too long to be written out are told by that."""
    try:
        return f"{value!r:.{limit}}"
    except ValueError:  # Python writes out no number of more than 4300 digits
        return "a number of thousands of digits"


def is_text(value: Any) -> bool:
    """Whether something is text that can be encoded: a string without half a character (a lone surrogate)."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


__all__ = ["is_text", "shown", "visible"]
