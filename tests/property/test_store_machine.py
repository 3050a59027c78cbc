"""The pure store under any order of requests, lost connections and passing time: its rules hold after every step."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.limits import TICK_S_MAX, StoreLimits
from mesh.store.state import StoreState

TTL_S, GUARD_S = 1.0, 0.1
GANGS = st.sampled_from([RunUid("a"), RunUid("b")])
EPOCHS = st.integers(1, 4).map(Epoch)
RANKS = st.integers(0, 2).map(Rank)
TOKENS = st.sampled_from(["x", "y", "z"]).map(IncarnationToken)
KEYS = st.sampled_from(["k", "n", "m"])
PLACES = st.integers(0, 4)
ADMIN = ConnectionId(1)


class StoreMachine(RuleBasedStateMachine):
    """Remembers what was told to whom, and what must never be told again."""

    @initialize()
    def start(self) -> None:
        self.state = StoreState(instance="m", limits=StoreLimits(waiters_max=6, keys_per_gang_max=2))
        self.now = 0.0
        self.next_number = 2
        self.connections: list[ConnectionId] = []
        self.owed: dict[tuple[ConnectionId, int], ms.Request] = {}
        self.floors: dict[RunUid, int] = {}
        self.opened: dict[tuple[RunUid, int], tuple[bytes, ...]] = {}
        self.over: set[tuple[object, ...]] = set()
        self.revoked: set[tuple[object, ...]] = set()
        self.admitted: set[tuple[object, ...]] = set()
        self.expiring: set[tuple[object, ...]] = set()
        self.renewed_at: dict[tuple[object, ...], float] = {}
        self.next_id = 1
        self.state.connected(ADMIN, ms.Role.ADMIN, hello_id=1)
        self.state.tick(self.now)
        self.ask(ADMIN, ms.Watch)
        for _ in range(3):
            self.connect()

    # ---- what happens -----------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        number = ConnectionId(self.next_number)
        self.next_number += 1
        self.connections.append(number)
        self.state.connected(number, ms.Role.MEMBER, hello_id=1)

    @rule(place=PLACES)
    def disconnect(self, place: int) -> None:
        if len(self.connections) > 1:
            gone = self.connections.pop(place % len(self.connections))
            self.owed = {key: request for key, request in self.owed.items() if key[0] != gone}
            self.check(self.state.disconnected(gone))

    @rule(gang=GANGS, epoch=EPOCHS, size=st.integers(1, 3))
    def set_floor(self, gang: RunUid, epoch: Epoch, size: int) -> None:
        before = self.floors.get(gang, 0)
        outputs = self.ask(ADMIN, ms.SetFloor, gang, epoch, size)
        if isinstance(outputs[0][1], ms.Number):
            assert epoch >= before, "a floor went down"
            self.floors[gang] = epoch

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, rank=RANKS, token=TOKENS)
    def grant(self, place: int, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        outputs = self.ask(self.at(place), ms.GrantLease, gang, epoch, rank, token, TTL_S, GUARD_S)
        if isinstance(outputs[0][1], ms.Done):
            key = (gang, epoch, rank, token)
            assert key not in self.over, "an incarnation that is over got a lease"
            assert key not in self.expiring, "renewed although it is to run out"
            self.renewed_at[key] = self.now

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, rank=RANKS, token=TOKENS)
    def release(self, place: int, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        self.ask(self.at(place), ms.ReleaseLease, gang, epoch, rank, token)

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, rank=RANKS, token=TOKENS)
    def arrive(self, place: int, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        self.ask(self.at(place), ms.Arrive, gang, epoch, rank, token, "start", f"{rank}{token}".encode())

    @rule(gang=GANGS, epoch=EPOCHS, rank=RANKS, token=TOKENS)
    def revoke(self, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        ((_, reply), *_) = self.ask(ADMIN, ms.Revoke, gang, epoch, rank, token)
        if isinstance(reply, ms.Number):
            opened = self.opened.get((gang, epoch), ())
            has_passed = len(opened) > rank and opened[rank] == f"{rank}{token}".encode()
            assert reply.value == int(has_passed)
            if not has_passed:
                self.over.add((gang, epoch, rank, token))
                self.revoked.add((gang, epoch, rank, token))

    @rule(gang=GANGS, epoch=EPOCHS, rank=RANKS, instead_of=TOKENS, goes_on=st.booleans())
    def admit(
        self, gang: RunUid, epoch: Epoch, rank: Rank, instead_of: IncarnationToken, goes_on: bool
    ) -> None:
        """Sometimes of one that was admitted itself; each time with another token, as a coordinator does."""
        present = self.state.books.gangs[gang].admitted.get(rank) if gang in self.floors else None
        instead_of = present if present is not None and goes_on else instead_of
        token = IncarnationToken(f"admitted {self.next_id}")
        ((_, reply),) = self.ask(ADMIN, ms.Admit, gang, epoch, rank, token, instead_of, inf)
        if isinstance(reply, ms.Number) and reply.value:
            assert (gang, epoch) in self.opened, "admitted to a barrier that has not opened"
            assert (gang, epoch, rank, instead_of) in self.over, "admitted beside a life that goes on"
            self.admitted.add((gang, epoch, rank, token))
            if goes_on:
                self.grant(0, gang, epoch, rank, token)
                self.arrive(0, gang, epoch, rank, token)
                self.release(1, gang, epoch, rank, token)

    @rule(gang=GANGS, epoch=EPOCHS, rank=RANKS, token=TOKENS)
    def expire(self, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        ((_, reply), *_) = self.ask(ADMIN, ms.Expire, gang, epoch, rank, token, TTL_S, GUARD_S)
        if isinstance(reply, ms.Number):
            key = (gang, epoch, rank, token)
            assert reply.value or key not in self.over, "it is over, and the store does not say so"
            if not reply.value:
                self.expiring.add(key)
                self.renewed_at.setdefault(key, self.now)

    @rule(gang=GANGS, epoch=EPOCHS)
    def close_barrier(self, gang: RunUid, epoch: Epoch) -> None:
        ((_, reply), *_) = self.ask(ADMIN, ms.CloseBarrier, gang, epoch, "start")
        if isinstance(reply, ms.Number):
            assert reply.value == int((gang, epoch) in self.opened)

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, keys=st.lists(KEYS, max_size=3))
    def wait(self, place: int, gang: RunUid, epoch: Epoch, keys: list[str]) -> None:
        self.ask(self.at(place), ms.Wait, gang, epoch, tuple(keys))

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, key=KEYS, value=st.binary(max_size=4))
    def set_key(self, place: int, gang: RunUid, epoch: Epoch, key: str, value: bytes) -> None:
        self.ask(self.at(place), ms.Set, value, gang, epoch, key)

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, key=KEYS)
    def add(self, place: int, gang: RunUid, epoch: Epoch, key: str) -> None:
        self.ask(self.at(place), ms.Add, gang, epoch, key, 1)

    @rule(place=PLACES, gang=GANGS, epoch=EPOCHS, key=KEYS)
    def delete(self, place: int, gang: RunUid, epoch: Epoch, key: str) -> None:
        self.ask(self.at(place), ms.Delete, gang, epoch, key)

    @rule(choice=st.integers(0, 20))
    def cancel(self, choice: int) -> None:
        if self.owed:
            connection, waiting_id = sorted(self.owed)[choice % len(self.owed)]
            del self.owed[connection, waiting_id]
            self.ask(connection, ms.Cancel, waiting_id)

    @rule(gang=GANGS, epoch=EPOCHS)
    def drop_gang(self, gang: RunUid, epoch: Epoch) -> None:
        self.ask(ADMIN, ms.DropGang, gang, epoch)
        if self.floors.get(gang, epoch) > epoch:
            return
        self.floors.pop(gang, None)
        self.opened = {key: value for key, value in self.opened.items() if key[0] != gang}
        self.over = {key for key in self.over if key[0] != gang}
        self.revoked = {key for key in self.revoked if key[0] != gang}
        self.expiring = {key for key in self.expiring if key[0] != gang}
        self.renewed_at = {key: at for key, at in self.renewed_at.items() if key[0] != gang}

    @rule(seconds=st.floats(0.0, 2.0))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S_MAX)
            self.check(self.state.tick(self.now))

    @rule(seconds=st.floats(0.5, 100.0))
    def stall(self, seconds: float) -> None:
        """Nothing lapses because the store did not run; every lease starts over."""
        self.now += seconds
        alive = [lease for gang in self.state.books.gangs.values() for lease in gang.leases.values()]
        outputs = self.state.tick(self.now)
        assert not [message for _, message in outputs if isinstance(message, ms.LeaseLapsed)]
        for lease in alive:
            assert not lease.is_over
            self.renewed_at[lease.gang, lease.epoch, lease.rank, lease.token] = self.now
        self.check(outputs)

    # ---- what must be so ----------------------------------------------------------------------------

    def at(self, place: int) -> ConnectionId:
        return self.connections[place % len(self.connections)]

    def ask(self, connection: ConnectionId, kind: type, *fields: object) -> list[Output]:
        request = kind(self.next_id, *fields)
        self.next_id += 1
        self.owed[connection, request.id] = request
        outputs = self.state.handle(request, connection, self.now)
        self.check(outputs)
        return outputs

    def check(self, outputs: list[Output]) -> None:
        for connection, message in outputs:
            if isinstance(message, ms.Push):
                assert connection == ADMIN
                self.check_push(message)
                continue
            request = self.owed.pop((connection, message.id), None)
            assert request is not None, f"{message} answers nothing that is owed an answer"
            if isinstance(message, ms.Opened):
                assert isinstance(request, ms.Arrive)
                self.check_opened(request, message)

    def check_push(self, push: ms.Push) -> None:
        if isinstance(push, ms.LeaseLapsed | ms.LeaseReleased):
            key = (push.gang, push.epoch, push.rank, push.token)
            assert key not in self.over, "a lease ended twice"
            self.over.add(key)
            if isinstance(push, ms.LeaseLapsed):
                assert self.now >= self.renewed_at[key] + TTL_S + GUARD_S - 1e-6, "lapsed too early"

    def check_opened(self, request: ms.Arrive, opened: ms.Opened) -> None:
        key = (request.gang, request.epoch)
        assert (*key, request.rank, request.token) not in self.revoked, "it was given up"
        assert self.floors[request.gang] == request.epoch, "a barrier of another epoch opened"
        assert opened.payloads == self.opened.setdefault(key, opened.payloads), "two answers to one barrier"
        if (*key, request.rank, request.token) not in self.admitted:
            assert opened.payloads[request.rank] == request.payload, (
                "not what this rank brought, or not its place"
            )

    @invariant()
    def the_books_agree_with_themselves(self) -> None:
        if not hasattr(self, "state"):
            return
        books = self.state.books
        waiters = list(books.all_waiters())
        assert books.waiters_count == len(waiters) <= 6
        assert {(waiter.connection, waiter.id) for waiter in waiters} == set(self.owed)
        for gang in books.gangs.values():
            assert gang.epoch == self.floors[gang.uid]
            assert gang.bytes_held == sum(len(v) for v in gang.keys.values() if isinstance(v, bytes))
            assert len(gang.keys) <= 2
            for key, waiting in gang.key_waiters.items():
                assert key not in gang.keys
                assert all(key in waiter.missing for waiter in waiting)
            for barrier in gang.barriers.values():
                for rank, arrival in barrier.arrivals.items():
                    assert barrier.payloads is not None or gang.leases[rank].token == arrival.token
                    assert barrier.payloads is not None or arrival.waiter in waiters
            for lease in gang.leases.values():
                assert lease.connection is None or lease.connection in books.roles
                assert not gang.is_over(lease.rank, lease.token)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestStore = StoreMachine.TestCase
