"""A named limit on everything that the store holds or waits for; a full one is a visible refusal.

The worst case of one gang's barrier reply must fit one frame: `ranks_per_gang_max` × `payload_bytes_max`
is below `frame_bytes_max`.
"""

from __future__ import annotations

from dataclasses import dataclass

TTL_S_MIN = 0.05
TTL_S_MAX = 600.0
"""Bounds of a lease's ttl and guard, in seconds."""
STALL_SHARE = 0.25
"""A store that has not run for this share of a lease's ttl renews it: heartbeats may be waiting unread."""
TICK_S_MAX = 0.1
"""The longest time between two ticks of a store that is not stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Numbers of things, bytes, and characters. The defaults serve 8,000 members."""

    gangs_max: int = 4096
    ranks_per_gang_max: int = 4096
    barriers_per_gang_max: int = 16
    keys_per_gang_max: int = 16_384
    value_bytes_max: int = 1024 * 1024
    gang_bytes_max: int = 64 * 1024 * 1024
    """All values of one gang together."""
    payload_bytes_max: int = 2048
    """What one rank brings to a barrier."""
    name_chars_max: int = 512
    """Gang, key, token and barrier names."""
    keys_per_wait_max: int = 1024
    waiters_max: int = 65_536
    """Requests of all connections that wait for their answer."""
    watchers_max: int = 16
    tokens_per_rank_max: int = 64
    """Incarnations that one rank may use up in one epoch (two replacements is what a gang needs)."""
    revocations_per_rank_max: int = 64
    """Incarnations of one rank that the coordinator may give up in one epoch."""
    connections_max: int = 20_000
    frame_bytes_max: int = 16 * 1024 * 1024
    write_buffer_bytes_max: int = 16 * 1024 * 1024
    """Unsent bytes to one connection; past it the connection is cut."""
    watcher_buffer_bytes_max: int = 1024 * 1024
    """The same for a watcher, which resyncs from snapshots."""
    hello_bytes_max: int = 4096
    """The only frame that an unauthenticated connection may send."""
    hello_limit_s: float = 5.0
    stalled_limit_s: float = 10.0
    """How long half a frame, or an answer that the peer does not read, may stand still."""
