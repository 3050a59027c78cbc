"""The store's shortest way against its long way: the same answers and the same books, whatever comes in what order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.store import messages as ms
from mesh.store import shortcut
from mesh.store.books import ConnectionId
from mesh.store.limits import StoreLimits
from mesh.store.protocol import ReplyEncoder, RequestStream, encode_request
from mesh.store.shortcut import Shortcuts
from mesh.store.state import StoreState

ADMIN, FIRST, SECOND = ConnectionId(1), ConnectionId(2), ConnectionId(3)
ids = st.sampled_from([1, 2, 127, 128, 300])
gangs = st.sampled_from([RunUid("a"), RunUid("b")])
epochs = st.sampled_from([Epoch(1), Epoch(2)])
keys = st.sampled_from(["k", "n"])
values = st.sampled_from([b"", b"1", b"22", b"x" * 60, b"y" * 255, b"z" * 300])
members = st.one_of(
    st.builds(ms.Get, ids, gangs, epochs, keys),
    st.builds(ms.Set, ids, values, gangs, epochs, keys),
    st.builds(ms.Add, ids, gangs, epochs, keys, st.sampled_from([1, -3, 2**63 - 1])),
    st.builds(ms.Delete, ids, gangs, epochs, keys),
    st.builds(
        ms.GrantLease, ids, gangs, epochs, st.just(Rank(0)), st.sampled_from(["t", "u"]).map(IncarnationToken),
        st.just(1.0), st.just(0.1),
    ),
)  # fmt: skip
admins = st.one_of(
    st.builds(ms.SetFloor, ids, gangs, epochs, st.just(1), st.just(False), st.just(())),
    st.builds(ms.DropGang, ids, gangs, epochs),
    st.builds(ms.Revoke, ids, gangs, epochs, st.just(Rank(0)), st.just(IncarnationToken("t"))),
    st.builds(
        ms.Expire,
        ids,
        gangs,
        epochs,
        st.just(Rank(0)),
        st.just(IncarnationToken("t")),
        st.just(1.0),
        st.just(0.1),
    ),
)
steps = st.one_of(
    st.tuples(st.sampled_from([FIRST, SECOND]), members),
    st.tuples(st.just(ADMIN), admins),
    st.tuples(st.just(None), st.sampled_from([0.05, 0.4, 2.0])),
)


class Way:
    """One store, by the long way alone or with shortcuts."""

    def __init__(self, *, has_shortcuts: bool) -> None:
        self.state = StoreState(instance="s", limits=StoreLimits(gang_bytes_max=400))
        self.shortcuts = Shortcuts(self.state.books) if has_shortcuts else None
        self.encoder = ReplyEncoder()
        self.now = 0.0
        self.shortened = 0
        self.state.tick(self.now)
        for connection in (ADMIN, FIRST, SECOND):
            role = ms.Role.ADMIN if connection == ADMIN else ms.Role.MEMBER
            self.state.connected(connection, role, hello_id=1)

    def send(self, connection: ConnectionId, frame: bytes) -> list[tuple[ConnectionId, bytes]]:
        if self.shortcuts is not None:
            answer = self.shortcuts.answer(frame, connection, self.now)
            if answer is not None:
                self.shortened += 1
                return [(connection, answer)]
        (request,) = RequestStream(bytes_max=1 << 16).feed(frame)
        if self.shortcuts is not None:
            self.shortcuts.remember(frame, request)
        outputs = self.state.handle(request, connection, self.now)
        return [(to, self.encoder.encode(message)) for to, message in outputs]

    def books(self) -> Any:
        return {
            uid: (
                gang.epoch, dict(gang.keys), gang.bytes_held,
                {
                    rank: (lease.token, lease.deadline, lease.connection, lease.alive_at, lease.answered_at,
                           lease.answered_id)
                    for rank, lease in gang.leases.items()
                },
            )
            for uid, gang in self.state.books.gangs.items()
        }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40))
def test_the_shortest_way_answers_and_changes_what_the_long_way_does(story: list[tuple[Any, Any]]) -> None:
    long, short = Way(has_shortcuts=False), Way(has_shortcuts=True)
    for connection, what in story:
        for way in (long, short):
            if connection is None:
                way.now += what
                way.state.tick(way.now)
        if connection is not None:
            frame = encode_request(what)
            assert long.send(connection, frame) == short.send(connection, frame)
        assert long.books() == short.books()


@given(st.binary(min_size=1, max_size=5), st.integers(0, 40), ids, values)
def test_a_frame_that_is_no_set_is_not_taken_for_one(
    noise: bytes, place: int, identifier: int, value: bytes
) -> None:
    """Any bytes over a good Set: the shortest way knows it only when the long way reads the same."""
    way = Way(has_shortcuts=True)
    way.send(ADMIN, encode_request(ms.SetFloor(1, RunUid("a"), Epoch(1), 1)))
    way.send(FIRST, encode_request(ms.Set(1, b"v" * 255, RunUid("a"), Epoch(1), "k")))
    good = bytearray(encode_request(ms.Set(identifier, value, RunUid("a"), Epoch(1), "k")))
    place = min(place, len(good) - 1)
    good[place : place + len(noise)] = noise[: len(good) - place]
    frame = bytes(good)
    assert way.shortcuts is not None
    answer = way.shortcuts.answer(frame, FIRST, way.now)
    if answer is None:
        return
    try:
        (request,) = RequestStream(bytes_max=1 << 16).feed(frame)
    except (RemoteProtocolError, ValueError) as error:
        raise AssertionError(f"{frame!r} is no request") from error
    assert isinstance(request, ms.Set)
    assert answer == way.encoder.encode(ms.Done(request.id))
    assert way.state.books.gangs[RunUid("a")].keys[request.key] == request.value


def test_the_common_requests_do_take_the_shortest_way() -> None:
    way = Way(has_shortcuts=True)
    uid, epoch = RunUid("a"), Epoch(1)
    way.send(ADMIN, encode_request(ms.SetFloor(1, uid, epoch, 1)))
    for request in (
        ms.Set(1, b"v", uid, epoch, "k"), ms.Get(1, uid, epoch, "k"), ms.Add(1, uid, epoch, "n", 1),
        ms.GrantLease(1, uid, epoch, Rank(0), IncarnationToken("t"), 1.0, 0.1),
    ):  # fmt: skip
        frame, before = encode_request(request), way.shortened
        for _ in range(3):
            way.send(FIRST, frame)
        assert way.shortened == before + 2, request


def test_a_renewal_by_the_shortest_way_was_heard() -> None:
    """What a lapse says of the silence before it decides whether the machine or a command is to blame."""
    way = Way(has_shortcuts=True)
    uid, epoch = RunUid("a"), Epoch(1)
    way.send(ADMIN, encode_request(ms.SetFloor(1, uid, epoch, 1)))
    renewal = encode_request(ms.GrantLease(1, uid, epoch, Rank(0), IncarnationToken("t"), 1.0, 0.1))
    for way.now in (0.0, 0.05, 0.1):
        way.state.tick(way.now)
        way.send(FIRST, renewal)
    assert way.shortened == 2
    assert way.state.books.gangs[uid].leases[Rank(0)].alive_at == 0.05


def test_what_is_known_is_bounded_and_holds_no_secret() -> None:
    shortcuts = Shortcuts(StoreState(instance="s").books)
    hello = ms.Hello(1, "secret", 1)
    shortcuts.remember(encode_request(hello), hello)
    assert not shortcuts._frames and not shortcuts._places
    for number in range(shortcut.KNOWN_MAX + 10):
        for request in (
            ms.Get(1, RunUid("a"), Epoch(1), f"k{number}"),
            ms.Set(1, b"", RunUid("a"), Epoch(1), f"k{number}"),
        ):
            shortcuts.remember(encode_request(request), request)
    assert len(shortcuts._frames) <= shortcut.KNOWN_MAX
    assert len(shortcuts._places) <= shortcut.KNOWN_MAX


def test_a_set_of_another_epoch_or_of_a_gang_that_is_gone_takes_the_long_way() -> None:
    way = Way(has_shortcuts=True)
    way.send(ADMIN, encode_request(ms.SetFloor(1, RunUid("a"), Epoch(1), 1)))
    frame = encode_request(ms.Set(1, b"v", RunUid("a"), Epoch(1), "k"))
    for _ in range(2):
        way.send(FIRST, frame)
    for last in (ms.SetFloor(1, RunUid("a"), Epoch(2), 1), ms.DropGang(1, RunUid("a"), Epoch(2))):
        way.send(ADMIN, encode_request(last))
        before = way.shortened
        way.send(FIRST, frame)
        assert way.shortened == before
