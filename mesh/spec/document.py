"""From text to plain data: YAML or JSON, strictly.

Rules of this file:
1. One document, one mapping. Duplicate keys, a second document, anchors, aliases and tags are refused: each of them
   means something else to some other reader.
2. Scalars mean what they look like. Only `true`, `false`, `null`, `~`, an empty value and decimal numbers in their
   shortest spelling are not text, so `no`, `1:30`, `0777`, `1.10` and `2026-01-01` stay the text that was written,
   and a number written back as text is the number that was read.
3. Text that starts with a brace or bracket is JSON, unless its source is named `.yaml` or `.yml` and it is no JSON.
4. A syntax error says line and column. Where a value stood is kept (`Document.lines`), so a later error about it can,
   too.
5. Nothing here recurses over the input, and every size has a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from mesh.errors import SpecError

DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
DEPTH_MAX = 32

Path = tuple[str | int, ...]

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)
_DECIMAL = re.compile(r"-?[0-9]{1,15}\.[0-9]{1,15}", re.ASCII)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What was read, and the line (from 1) of each value where the format tells it."""

    data: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)


def read_document(text: str, *, source: str) -> Document:
    """One mapping from YAML or JSON text. `source` is how errors call it: a file name, or "standard input".

    Raises:
        SpecError: it is neither, is empty, or is not one mapping; the message has line and column where there are any.
    """
    text = text.removeprefix("\ufeff")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise SpecError(f"{source} is not UTF-8 text (character {error.start}).", source=source) from error
    if size > DOCUMENT_BYTES_MAX:
        raise SpecError(
            f"{source} has {size:,} bytes; a job has at most {DOCUMENT_BYTES_MAX:,}.", source=source
        )
    if not text.strip():
        raise SpecError(f"{source} is empty.", hint="A job has at least spec.command.", source=source)
    if text.lstrip()[0] in "{[":
        return _read_json(text, source)
    return _read_yaml(text, source)


def scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar (rule 2)."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and repr(float(text)) == text:
        return float(text)
    return text


# -- JSON --------------------------------------------------------------------------------------------------------------


def _read_json(text: str, source: str) -> Document:
    try:
        data = json.loads(
            text,
            object_pairs_hook=lambda pairs: _object(pairs, source),
            parse_int=scalar,
            parse_float=scalar,
            parse_constant=lambda word: _refuse_constant(word, source),
        )
    except json.JSONDecodeError as error:
        if source.endswith((".yaml", ".yml")):
            return _read_yaml(text, source)
        raise SpecError(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            source=source,
            line=error.lineno,
            column=error.colno,
        ) from error
    except RecursionError as error:
        raise _too_deep(source) from error
    return Document(data=_one_mapping(data, source))


def _object(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise SpecError(f'{source} has the key "{key}" twice in one object.', source=source, field=key)
        found[key] = value
    return found


def _refuse_constant(word: str, source: str) -> None:
    raise SpecError(f"{source} contains {word}, which is not JSON.", source=source)


# -- YAML --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A mapping or sequence whose end has not been read yet."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = None
    """The key that waits for its value; always None in a sequence."""


def _read_yaml(text: str, source: str) -> Document:
    builder = _Builder(source)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(
            f"{source} is not valid YAML: {error.problem or error.context}{where}.",
            source=source,
            line=mark.line + 1 if mark else None,
            column=mark.column + 1 if mark else None,
        ) from error
    except yaml.reader.ReaderError as error:
        line, column = _position(text, error.position)
        raise SpecError(
            f"{source} is not valid YAML: {error.reason} at line {line}, column {column}.",
            source=source,
            line=line,
            column=column,
        ) from error
    return Document(data=_one_mapping(builder.result, source), lines=builder.lines)


class _Builder:
    """Builds plain data from the parser's events, with a stack of its own instead of recursion."""

    def __init__(self, source: str) -> None:
        self.result: Any = None
        self.lines: dict[Path, int] = {}
        self._source = source
        self._stack: list[_Open] = []
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        """One event of `yaml.parse`."""
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._refusal(event, "a second document starts", "Submit one job at a time.")
            case yaml.AliasEvent():
                raise self._refusal(event, "an alias is used", "Write the value out.")
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._take_node(event)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._stack.pop()
            case _:
                pass

    def _take_node(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.anchor is not None:
            raise self._refusal(event, f"the anchor &{event.anchor} is set", "Write the value out.")
        if event.tag is not None:
            raise self._refusal(event, f"the tag {event.tag} is used", "Leave it out.")
        parent = self._stack[-1] if self._stack else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._take_key(event, parent)
            return
        path = self._place(parent)
        self.lines[path], _ = _start(event)
        if isinstance(event, yaml.ScalarEvent):
            self._put(parent, scalar(event.value) if event.implicit[0] else event.value)
            return
        if len(self._stack) >= DEPTH_MAX:
            raise _too_deep(self._source)
        opened: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._put(parent, opened)
        self._stack.append(_Open(opened, path))

    def _take_key(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, parent: _Open) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._refusal(event, "a key is a list or a mapping", "A key is text.")
        if event.value in parent.value:
            raise self._refusal(event, f'the key "{event.value}" stands there twice', "Keep one of them.")
        parent.key = event.value

    def _place(self, parent: _Open | None) -> Path:
        if parent is None:
            return ()
        return (*parent.path, parent.key if parent.key is not None else len(parent.value))

    def _put(self, parent: _Open | None, value: Any) -> None:
        if parent is None:
            self.result = value
        elif isinstance(parent.value, list):
            parent.value.append(value)
        else:
            assert parent.key is not None, "a mapping's value follows its key"
            parent.value[parent.key] = value
            parent.key = None

    def _refusal(self, event: yaml.Event, what: str, hint: str) -> SpecError:
        line, column = _start(event)
        return SpecError(
            f"In {self._source}, at line {line}, column {column}, {what}.",
            hint=hint,
            source=self._source,
            line=line,
            column=column,
        )


def _start(event: yaml.Event) -> tuple[int, int]:
    assert event.start_mark is not None, "events of a parser have marks"
    return event.start_mark.line + 1, event.start_mark.column + 1


def _position(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


# -- both --------------------------------------------------------------------------------------------------------------


def _one_mapping(data: Any, source: str) -> dict[str, Any]:
    if isinstance(data, list):
        raise SpecError(
            f"{source} is a list of {len(data)} items; a job is one mapping.",
            hint="Submit one job at a time.",
            source=source,
        )
    if not isinstance(data, dict):
        what = "is empty" if data is None else "is a single value"
        raise SpecError(f"{source} {what}; a job is a mapping with at least spec.command.", source=source)
    for depth, _ in zip(range(DEPTH_MAX + 1), _levels(data), strict=False):
        if depth == DEPTH_MAX:
            raise _too_deep(source)
    return data


def _levels(data: Any) -> Iterator[list[Any]]:
    """The containers of each level, outermost first."""
    level = [data]
    while level:
        yield level
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]


def _too_deep(source: str) -> SpecError:
    return SpecError(f"{source} is nested more than {DEPTH_MAX} levels deep.", source=source)
