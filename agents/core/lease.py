"""A lease, as its holder must see it: when to renew, and when to stop by itself.

Rules of this file:
1. The right to run is counted from the moment when the last granted renewal was *sent*, on the monotonic
   clock. The store counts from when it *received* it, which is later; so the holder stops first.
2. `sent + ttl - guard` is the end: whoever still has no answer by then kills its whole tree.
3. An answer is believed only when it is to the request in flight, however late it is read: what it
   grants is counted from when that request was sent. A denial that is certain (an older epoch, a lease that
   somebody else holds) ends the lease at once; one that may pass (a store that has just been restarted does
   not know the gang yet) does not, before the end.
4. A store that has not read what lies unread in its own machine's memory has not run, and one whose process is dead,
   with nobody listening in its place, cannot have declared anything: on the store's own machine a holder can see
   both, and each counts like a renewal sent when it was seen. The first only once it has lasted for longer
   than a store may stand still without noticing (`LeaseTerms.still_s`): the store then starts every lease over
   (`Books.absolve_stall`). A store that comes back knows nobody, and is told of everybody (`coordinator.store_link`).
5. A holder that finds its lease over because it *itself did not run* (laptop closed, SIGSTOP) stands
   still first: its tree is frozen, the store is asked once, and only its answer thaws the tree.
   Whoever was awake and simply got no answer kills.
6. Over is final. Nothing that comes later changes anything.

Theory of operation. The keeper's process calls `handle` with what happened and sleeps until
`next_deadline`. How late it woke, compared with the deadline that it had asked for, tells a holder that
was not running from one that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from agents.core.lease_events import (
    Confirmed,
    Connect,
    Connected,
    ConnectionLost,
    Denied,
    End,
    FreezeTree,
    KillTree,
    LeaseEffect,
    LeaseEvent,
    ParentDied,
    ReleaseAsked,
    Request,
    StoreGone,
    StoreStoodStill,
    Tell,
    ThawTree,
    Woke,
)
from mesh.reasons import Reason
from mesh.store.limits import STALL_SHARE, TICK_S_MAX

ASK_LIMIT_S = 1.0
"""How long a holder that overslept waits for the store's word, its tree frozen."""
ACQUIRE_LIMIT_S = 30.0
"""How long the first grant may take, through reconnects and a store that does not know the gang yet."""
RECONNECT_PAUSE_S = 0.05
"""Between two tries to connect: a local refusal answers at once and must not become a busy loop."""
RETRY_PAUSE_S = 0.1
"""Between two requests after the store said that it does not know the gang yet."""
STORE_GONE_LIMIT_S = 600.0
"""How long rule 4 may carry a lease. By then nobody is left who looks after this run."""


class LeasePhase(StrEnum):
    """Where a lease is in its life."""

    ACQUIRING = "Acquiring"
    HOLDING = "Holding"
    ASKING = "Asking"
    """Overslept: the tree is frozen until the store has answered."""
    RELEASING = "Releasing"
    OVER = "Over"


TRANSITIONS: Mapping[LeasePhase, frozenset[LeasePhase]] = MappingProxyType(
    {
        LeasePhase.ACQUIRING: frozenset({LeasePhase.HOLDING, LeasePhase.OVER}),
        LeasePhase.HOLDING: frozenset({LeasePhase.ASKING, LeasePhase.RELEASING, LeasePhase.OVER}),
        LeasePhase.ASKING: frozenset({LeasePhase.HOLDING, LeasePhase.OVER}),
        LeasePhase.RELEASING: frozenset({LeasePhase.OVER}),
        LeasePhase.OVER: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The lengths that holder and store have agreed on, in seconds."""

    ttl_s: float
    guard_s: float
    heartbeat_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.heartbeat_s < self.ttl_s - self.guard_s:
            raise ValueError(
                f"A heartbeat of {self.heartbeat_s} s does not fit into {self.ttl_s} - {self.guard_s} s."
            )

    @property
    def usable_s(self) -> float:
        """How long one renewal gives the right to run, from when it was sent."""
        return self.ttl_s - self.guard_s

    @property
    def answer_limit_s(self) -> float:
        """A request without an answer for so long has a dead connection under it: make a new one."""
        return self.usable_s / 3.0

    @property
    def oversleep_s(self) -> float:
        """Waking later than this means that this process did not run; less is a busy machine."""
        return max(self.guard_s, self.heartbeat_s)

    @property
    def still_s(self) -> float:
        """A store that has not run for so long knows it: it lets no lease lapse for that time."""
        return TICK_S_MAX + self.ttl_s * STALL_SHARE + self.guard_s


@dataclass(slots=True)
class LeaseState:
    """Everything that the keeper knows about its lease."""

    phase: LeasePhase = LeasePhase.ACQUIRING
    connected: bool = False
    """The store has accepted the connection; requests can be sent."""
    connecting_since: float | None = None
    """Set while a connection is being made."""
    connect_at: float | None = None
    """When to try to connect again."""
    request_id: int = 1
    """Of the request in flight, or of the next one. It grows only past a request that was never answered."""
    sent_at: float | None = None
    """When the request in flight was sent; None when there is none."""
    held_from: float | None = None
    """When the last confirmed grant or renewal was sent, or what counts like one (rule 4) was seen; set from the
    first grant on."""
    confirmed_at: float | None = None
    """When the last confirmed grant or renewal was sent; set from the first grant on."""
    heard_at: float | None = None
    """When the store said something last."""
    still_at: float | None = None
    """When what was sent on this connection was last seen lying unread: it is not dead, its store stands."""
    request_at: float | None = None
    """When to send the next request."""
    give_up_at: float = 0.0
    """Acquiring, Asking, Releasing: when to stop waiting for the store."""
    last_denial: str = ""
    wake_at: float = 0.0
    """The deadline that was asked for last: lateness is counted from it."""


@dataclass(slots=True)
class Lease:
    """The pure core of the keeper.

    Args:
        terms: what was agreed on.
        started_at: the clock's value at the start.
    """

    terms: LeaseTerms
    started_at: float
    state: LeaseState = field(default_factory=LeaseState)
    _out: list[LeaseEffect] = field(default_factory=list)

    def start(self) -> list[LeaseEffect]:
        """The first effects."""
        self.state.give_up_at = self.started_at + ACQUIRE_LIMIT_S
        self._connect(self.started_at)
        return self._flush(self.started_at)

    def handle(self, event: LeaseEvent, now: float) -> list[LeaseEffect]:
        """Takes one event and returns the effects that it leads to."""
        state = self.state
        may_renew = isinstance(event, _MAY_RENEW)
        if not may_renew:
            self._look_at_the_clock(now)
        if state.phase is not LeasePhase.OVER:
            _HANDLERS[type(event)](self, event, now)
        if may_renew:
            self._look_at_the_clock(now)
        if state.phase is not LeasePhase.OVER:
            self._act_on_time(now)
        return self._flush(now)

    def next_deadline(self) -> float | None:
        """When `Woke` is wanted; None when the lease is over."""
        state = self.state
        if state.phase is LeasePhase.OVER:
            return None
        is_idle = state.connected and state.sent_at is None
        times = (
            state.connect_at,
            self._connection_deadline(),
            state.request_at if is_idle else None,
            self.end_at if state.phase is LeasePhase.HOLDING else state.give_up_at,
        )
        return min([t for t in times if t is not None])

    @property
    def end_at(self) -> float | None:
        """When the right to run ends; None before the first grant."""
        held_from = self.state.held_from
        return None if held_from is None else held_from + self.terms.usable_s

    def snapshot(self) -> LeaseState:
        """A copy of the state."""
        return replace(self.state)

    # --- time -----------------------------------------------------------------------------------

    def _look_at_the_clock(self, now: float) -> None:
        """The end of the lease comes before whatever happened, unless this process was not running."""
        state = self.state
        end_at = self.end_at
        if state.phase is not LeasePhase.HOLDING or end_at is None or now < end_at:
            return
        if now - state.wake_at > self.terms.oversleep_s:
            self._ask(now)
        else:
            self._lose(Reason.STORE_UNREACHABLE, self._what_was_heard(now))

    def _act_on_time(self, now: float) -> None:
        state = self.state
        if state.phase is not LeasePhase.HOLDING and now >= state.give_up_at:
            self._give_up()
            return
        dead, connect_at = self._connection_deadline(), state.connect_at
        if (dead is not None and now >= dead) or (connect_at is not None and now >= connect_at):
            self._connect(now)
        if (
            state.connected
            and state.sent_at is None
            and state.request_at is not None
            and now >= state.request_at
        ):
            self._request(now)

    def _connection_deadline(self) -> float | None:
        """When the connection, or the try to make one, is given up as dead."""
        state = self.state
        since = state.connecting_since if state.sent_at is None else state.sent_at
        if since is not None and state.still_at is not None:
            since = max(since, state.still_at)
        asking = state.phase is LeasePhase.ASKING
        return None if since is None else since + (ASK_LIMIT_S / 3 if asking else self.terms.answer_limit_s)

    def _give_up(self) -> None:
        state = self.state
        if state.phase is LeasePhase.ACQUIRING:
            message = f"The store gave no lease in {ACQUIRE_LIMIT_S:.0f} s. {state.last_denial}".strip()
            self._enter(LeasePhase.OVER)
            self._do(Tell(word="refused", reason=Reason.UNREACHABLE, message=message))
            self._do(End())
        elif state.phase is LeasePhase.ASKING:
            self._lose(
                Reason.LEASE_LOST,
                f"This machine stood still past the end of its lease, and the store did not renew it. "
                f"{state.last_denial}".strip(),
            )
        else:
            self._enter(LeasePhase.OVER)
            self._do(End())

    def _ask(self, now: float) -> None:
        self._enter(LeasePhase.ASKING)
        self.state.give_up_at = now + ASK_LIMIT_S
        self._do(FreezeTree())
        self._do(Tell(word="frozen", message="This machine stood still past the end of its lease."))
        # A request in flight was sent before the pause: its answer proves nothing about now.
        if self.state.connected:
            self._request(now)
        else:
            self._connect(now)

    # --- what the store says --------------------------------------------------------------------

    def _on_connected(self, event: Connected, now: float) -> None:
        if self.state.connecting_since is None:
            return
        self.state.heard_at = now
        self.state.connecting_since = None
        self.state.connected = True
        self._request(now)

    def _on_connection_lost(self, event: ConnectionLost, now: float) -> None:
        state = self.state
        if not state.connected and state.connecting_since is None:
            return
        if state.phase is LeasePhase.RELEASING:
            # The store notices the closed connection; there is nothing left to protect.
            self._enter(LeasePhase.OVER)
            self._do(End())
            return
        state.connected = False
        state.connecting_since = None
        state.sent_at = None
        state.still_at = None
        state.connect_at = now + RECONNECT_PAUSE_S
        state.last_denial = event.message or state.last_denial
        if event.is_final and state.phase is LeasePhase.ACQUIRING:
            self._enter(LeasePhase.OVER)
            self._do(Tell(word="refused", reason=Reason.UNAUTHENTICATED, message=event.message))
            self._do(End())

    def _on_confirmed(self, event: Confirmed, now: float) -> None:
        state = self.state
        if event.request_id != state.request_id or state.sent_at is None:
            return
        sent_at, state.sent_at = state.sent_at, None
        state.heard_at = now
        state.still_at = None
        state.last_denial = ""
        if state.phase is LeasePhase.RELEASING:
            self._enter(LeasePhase.OVER)
            self._do(Tell(word="released"))
            self._do(End())
            return
        state.confirmed_at = sent_at
        state.held_from = sent_at if state.held_from is None else max(sent_at, state.held_from)
        state.request_at = sent_at + self.terms.heartbeat_s
        if state.phase is LeasePhase.ACQUIRING:
            self._enter(LeasePhase.HOLDING)
            self._do(Tell(word="granted"))
        elif state.phase is LeasePhase.ASKING:
            self._enter(LeasePhase.HOLDING)
            self._do(ThawTree())
            self._do(Tell(word="thawed"))

    def _on_denied(self, event: Denied, now: float) -> None:
        state = self.state
        if event.request_id != state.request_id or state.sent_at is None:
            return
        state.sent_at = None
        state.heard_at = now
        state.still_at = None
        if state.phase is LeasePhase.RELEASING:
            self._enter(LeasePhase.OVER)
            self._do(End())
        elif not event.is_final:
            state.last_denial = event.message
            state.request_at = now + RETRY_PAUSE_S
        elif state.phase is LeasePhase.ACQUIRING:
            self._enter(LeasePhase.OVER)
            self._do(Tell(word="refused", reason=event.reason, message=event.message))
            self._do(End())
        else:
            self._lose(event.reason, event.message)

    # --- what can be seen of the store on its own machine -----------------------------------------

    def _on_store_stood_still(self, event: StoreStoodStill, now: float) -> None:
        state = self.state
        state.still_at = event.seen_at
        # A frozen tree does not act, however long it waits for the answer.
        is_frozen = state.phase is LeasePhase.ASKING
        if is_frozen or event.seen_at - event.since >= self.terms.still_s:
            self._hold_on(event.seen_at)

    def _on_store_gone(self, event: StoreGone, now: float) -> None:
        self._hold_on(event.seen_at)

    def _hold_on(self, seen_at: float) -> None:
        """Nobody can have declared this lease over by `seen_at`."""
        state = self.state
        if state.confirmed_at is None or seen_at - state.confirmed_at > STORE_GONE_LIMIT_S:
            return
        if state.phase is LeasePhase.HOLDING and state.held_from is not None:
            state.held_from = max(state.held_from, seen_at)
        elif state.phase is LeasePhase.ASKING:
            state.give_up_at = max(state.give_up_at, seen_at + ASK_LIMIT_S)

    # --- what the parent does -------------------------------------------------------------------

    def _on_release_asked(self, event: ReleaseAsked, now: float) -> None:
        state = self.state
        if state.phase is LeasePhase.HOLDING and state.connected:
            self._enter(LeasePhase.RELEASING)
            state.give_up_at = now + ASK_LIMIT_S
            self._request(now)
        elif state.phase is not LeasePhase.RELEASING:
            self._enter(LeasePhase.OVER)
            self._do(End())

    def _on_parent_died(self, event: ParentDied, now: float) -> None:
        self._enter(LeasePhase.OVER)
        self._do(KillTree())
        self._do(End())

    def _on_woke(self, event: Woke, now: float) -> None:
        """Time itself is looked at before and after every event."""

    # --- words ----------------------------------------------------------------------------------

    def _what_was_heard(self, now: float) -> str:
        """Why no renewal was confirmed: for whoever has to tell a lost machine from a lost store."""
        state = self.state
        silent_s = now - (self.started_at if state.heard_at is None else state.heard_at)
        told = f"No renewal was confirmed for {now - (state.confirmed_at or self.started_at):.1f} s: "
        if state.connected and state.sent_at is None:
            told += f"the rendezvous store answers, but does not grant it. {state.last_denial}"
        elif state.connected:
            told += (
                f"the connection to the rendezvous store is open, but nothing was heard for {silent_s:.1f} s."
            )
        else:
            told += (
                f"there is no connection to the rendezvous store, and nothing was heard for {silent_s:.1f} s."
            )
            told += f" {state.last_denial}"
        return told.strip()

    # --- small things ---------------------------------------------------------------------------

    def _lose(self, reason: Reason, message: str) -> None:
        self._enter(LeasePhase.OVER)
        # The word first: the member kills as well, and the two are faster than one.
        self._do(Tell(word="lost", reason=reason, message=message))
        self._do(KillTree())
        self._do(End())

    def _connect(self, now: float) -> None:
        state = self.state
        state.connected = False
        state.sent_at = None
        state.still_at = None
        state.connect_at = None
        state.connecting_since = now
        self._do(Connect())

    def _request(self, now: float) -> None:
        state = self.state
        op = _OPS.get(state.phase, "renew")
        if state.sent_at is not None:
            state.request_id += 1  # its answer may still come, and is not the answer to this one
        state.sent_at = now
        state.request_at = None
        self._do(Request(op=op, request_id=state.request_id))

    def _enter(self, phase: LeasePhase) -> None:
        assert phase in TRANSITIONS[self.state.phase], f"{self.state.phase} -> {phase}"
        self.state.phase = phase

    def _do(self, effect: LeaseEffect) -> None:
        self._out.append(effect)

    def _flush(self, now: float) -> list[LeaseEffect]:
        deadline = self.next_deadline()
        if deadline is not None:
            self.state.wake_at = max(deadline, now)
        effects, self._out = self._out, []
        return effects


_OPS: Mapping[LeasePhase, str] = {LeasePhase.RELEASING: "release", LeasePhase.ACQUIRING: "grant"}
_MAY_RENEW = (Confirmed, StoreStoodStill, StoreGone)
"""Each may be the very renewal that the clock asks for, so it is looked at before the clock."""
_HANDLERS: Mapping[type[LeaseEvent], Callable[..., None]] = {
    Connected: Lease._on_connected,
    ConnectionLost: Lease._on_connection_lost,
    Confirmed: Lease._on_confirmed,
    Denied: Lease._on_denied,
    StoreStoodStill: Lease._on_store_stood_still,
    StoreGone: Lease._on_store_gone,
    ReleaseAsked: Lease._on_release_asked,
    ParentDied: Lease._on_parent_died,
    Woke: Lease._on_woke,
}
