"""Names: of runs, of environment variables, of labels.

A run's name stands in folder names, host names, label values and `PET_RDZV_ID`, with suffixes such as `-7` or `-0`
behind it, so it is a DNS label with room to spare. Two names never differ in case only, because there is only lower
case.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable

RUN_NAME_LENGTH_MAX = 53
"""A DNS label is at most 63 characters; ten are left for suffixes."""
RUN_NAME_TAKES = (
    f"1 to {RUN_NAME_LENGTH_MAX} lower-case letters, digits and dashes, a letter or digit at both ends"
)
LABEL_VALUE_TAKES = 'at most 63 letters, digits, "-", "_" and ".", a letter or digit at both ends'
LABEL_KEY_TAKES = f'{LABEL_VALUE_TAKES}, with a DNS name and "/" before it if you like'
RESERVED_LABEL_PREFIX = "nodus.dev/"

RUN_NAME_PATTERN = "^[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?$"

_RUN_NAME = re.compile(RUN_NAME_PATTERN.strip("^$"), re.ASCII)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LABEL_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_DNS_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]


def is_run_name(text: str) -> bool:
    return _RUN_NAME.fullmatch(text) is not None


def suggest_run_name(text: str) -> str | None:
    """The nearest name that is allowed; None when nothing usable is left of the text."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    dashed = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:RUN_NAME_LENGTH_MAX].rstrip("-")
    return dashed or None


def new_run_name(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """A short name that can be said aloud, such as `lumo-keta`: one of 24 million."""
    syllables = [_SYLLABLES[int.from_bytes(random_bytes(2), "big") % len(_SYLLABLES)] for _ in range(4)]
    return f"{syllables[0]}{syllables[1]}-{syllables[2]}{syllables[3]}"


def is_variable_name(text: str) -> bool:
    """Names that every shell can export: letters, digits and `_`, no digit first."""
    return _VARIABLE_NAME.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    if slash and _DNS_NAME.fullmatch(prefix) is None:
        return False
    return _LABEL_PART.fullmatch(name) is not None


def is_label_value(text: str) -> bool:
    return text == "" or _LABEL_PART.fullmatch(text) is not None
