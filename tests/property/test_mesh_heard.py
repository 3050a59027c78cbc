"""Whatever a head answers to a machine or a relay is read, or refused as no answer; nothing else comes of it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agents.mesh_heard import AuthorityShown, JoinAnswer, MeshNewsHeard, RelayNewsHeard
from mesh.errors import MeshError, RemoteProtocolError
from mesh.http_transport import HttpTransport

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NEWS: dict[str, Any] = {
    "version": "3",
    "cluster": "c",
    "bundle": "pem",
    "machines": {"head": {"gateway": [["head.test", 8471]], "overlay": ["198.18.0.1"]}},
    "relays": {"r": [["relay.test", 8472]]},
    "revoked": ["gone"],
}
JOINED: dict[str, Any] = {
    "name": "m", "number": 2, "secret": "s", "nodeId": "n", "deployment": "d", "certificate": "pem",
    "cluster": {"session": "s", "address": "a", "id": "i"}, "clusterToken": "t", "news": NEWS,
}  # fmt: skip
SHOWN: dict[str, Any] = {"bundle": "pem", "clock": 1.0}
READERS = [(AuthorityShown, SHOWN), (MeshNewsHeard, NEWS), (RelayNewsHeard, NEWS), (JoinAnswer, JOINED)]


@pytest.mark.parametrize(("heard", "good"), READERS)
def test_a_heads_answer_is_read(heard: Any, good: dict[str, Any]) -> None:
    assert heard.read(good)


@pytest.mark.parametrize(("heard", "good"), READERS)
@given(words=anything)
def test_nothing_else_is_one(heard: Any, good: dict[str, Any], words: object) -> None:
    with pytest.raises(RemoteProtocolError):
        heard.read(words)


@pytest.mark.parametrize(("heard", "good"), READERS)
@given(data=st.data())
def test_a_word_that_is_another_costs_no_more_than_the_answer(
    heard: Any, good: dict[str, Any], data: st.DataObject
) -> None:
    with contextlib.suppress(RemoteProtocolError):
        heard.read(_with_one_other(data, good))


def _with_one_other(data: st.DataObject, words: Any) -> Any:
    """The same with something else in one place, however deep."""
    if not isinstance(words, dict | list) or not words or data.draw(st.integers(0, 3)) == 0:
        return data.draw(anything)
    if isinstance(words, dict):
        key = data.draw(st.sampled_from(sorted(words)))
        return {**words, key: _with_one_other(data, words[key])}
    place = data.draw(st.integers(0, len(words) - 1))
    return [*words[:place], _with_one_other(data, words[place]), *words[place + 1 :]]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({**JOINED, "number": float("inf")}, id="a number without end"),
        pytest.param(
            {**JOINED, "news": {**NEWS, "relays": {"r": [["h", float("inf")]]}}}, id="a port without end"
        ),
        pytest.param({**JOINED, "certificate": "\ud800"}, id="half a character"),
        pytest.param({**JOINED, "news": {**NEWS, "machines": {}}}, id="no head"),
    ],
)
def test_what_json_can_say_and_no_head_means(words: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        JoinAnswer.read(words)


@given(body=st.binary() | anything.map(lambda words: json.dumps(words).encode()) | st.just(b"[" * 10_000))
@pytest.mark.parametrize("status", [200, 302, 404, 503])
def test_whatever_the_bytes_are_an_answer_is_read_or_an_error_of_ours(body: bytes, status: int) -> None:
    http = HttpTransport(url="https://head.test:1", token="", fate=lambda: None)
    with contextlib.suppress(MeshError):
        AuthorityShown.read(http._answer(status, body))


@given(
    error=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("error", "reason", "message", "hint", "details"), anything)
    )
)
def test_whatever_an_error_says_it_is_one_of_ours(error: dict[str, Any]) -> None:
    http = HttpTransport(url="https://head.test:1", token="", fate=lambda: None)
    with pytest.raises(MeshError):
        http._answer(500, json.dumps({"error": error}).encode())
