"""The lines between a launcher and its supervisor are JSON as everybody else reads and writes it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.supervisor_protocol import ProtocolError, StartOrder, decode, encode

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
START = {
    "op": "start",
    "argv": ["python", "train.py"],
    "env": {"A": "1"},
    "cwd": "/tmp",
    "spool": "/tmp/spool",
    "incarnation": "uid.1.0.token",
}


@given(values, st.booleans())
def test_whatever_json_writes_is_read_as_json_reads_it(value: object, ascii_only: bool) -> None:
    line = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert decode(line + b"\n") == value


@given(st.binary(max_size=30))
def test_what_json_refuses_is_refused(line: bytes) -> None:
    try:
        expected = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        with pytest.raises(ValueError):
            decode(line)
    else:
        assert repr(decode(line)) == repr(expected)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.none()
        | st.integers()
        | st.lists(st.integers())
        | st.text(st.characters(exclude_categories=["Cs"])),
    )
)
def test_an_event_is_one_line_that_json_reads(event: dict) -> None:
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == event


def test_an_order_has_its_defaults_and_marks_the_environment() -> None:
    order = StartOrder(dict(START))
    assert order.environment == {"A": "1", "NODUS_INCARNATION": "uid.1.0.token"}
    assert (order.unacked_bytes_max, order.grace_s) == (32 * 1024 * 1024, 30.0)


@pytest.mark.parametrize(
    "change",
    [
        {"argv": "ls"},
        {"argv": ["ls", 1]},
        {"env": {"A": 1}},
        {"env": None},
        {"cwd": 5},
        {"spool": None},
        {"incarnation": ""},
        {"incarnation": "../../up"},
        {"spool_unacked_max": True},
        {"grace_s": "soon"},
    ],
)
def test_an_order_that_makes_no_sense_is_refused(change: dict) -> None:
    with pytest.raises(ProtocolError):
        StartOrder({**START, **change})
