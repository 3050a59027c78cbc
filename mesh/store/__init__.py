"""The rendezvous store: leases, barriers and small keys of every gang, each guarded by the epoch.

- `messages`: what is asked, answered and pushed. Frozen data.
- `limits`: a named limit on everything.
- `state`, `keyspace`, `leases`, `barrier`: the pure store. Time is an argument.
- `protocol`: messages to frames and back, sans-io.
- `client`: the asyncio client; `blocking_client`: the one for a process without a loop.

The server is `coordinator.store_actor`. Nothing is imported here, so that a small process can take the
protocol without asyncio.
"""
