"""Text that somebody else wrote, made safe to show on a terminal. Pure.

Bytes that are not UTF-8 come out as `\\xNN`, and so do control characters (NUL, bell, a lone escape …): nothing that a
rank prints can move a reader's cursor, ring, or set a title. Colours (`ESC [ … m`) and tabs stay, every other escape
sequence is left out, a backspace takes back one character.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other control sequences: cursor, erase, modes
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # strings: titles, links, device control
    r"|\x1b[ -/]*[0-~]"  # the other escapes
    r"|(?P<control>[\x00-\x08\x0a-\x1f\x7f-\x9f])"
)


def printable(data: bytes) -> str:
    """The text of one line, given without its line feed."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="backslashreplace")
    if not _UNSAFE.search(text):
        return text
    if "\b" in text:
        text = _take_back(text)
    return _SEQUENCE.sub(_replace, text)


def _replace(match: re.Match[str]) -> str:
    if match["colour"]:
        return match["colour"]
    control = match["control"]
    if not control:
        return ""
    code = ord(control)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"


def _take_back(text: str) -> str:
    kept: list[str] = []
    for character in text:
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)
