"""Text of a corpus or an argument made safe to show: nothing in it may move a cursor, colour, or reorder a line."""

from __future__ import annotations

import unicodedata

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories shown as escapes: controls, invisible formatting such as bidirectional overrides, lone
surrogates, private and unassigned code points, line and paragraph separators."""

NEWLINE = "⏎"


def visible(text: str, most: int | None = None) -> str:
    r"""One line of printable characters: newlines as ⏎, other hidden characters as \xNN, \uNNNN or \UNNNNNNNN.

    With `most`, the end is kept and the cut marked by an ellipsis: of a context the last words matter.
    """
    if most is not None and len(text) > 4 * most:
        text = text[-4 * most :]  # no need to escape a megabyte for its last line
    plain = text.replace("\n", "").isprintable()  # none of the hidden categories is printable: no need to look closer
    shown = text.replace("\n", NEWLINE) if plain else "".join(map(_shown, text))
    return shown if most is None or len(shown) <= most else "…" + shown[len(shown) - most + 1 :]


def _shown(character: str) -> str:
    if character == "\n":
        return NEWLINE
    if unicodedata.category(character) not in HIDDEN_CATEGORIES:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
