"""A rendezvous store in a process of its own, to be stopped and killed. Prints its port once it listens.

python tests/integration/store_process.py PORT ADMIN_SECRET MEMBER_SECRET
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from coordinator.store_actor import StoreServer


async def serve(port: int, admin: str, member: str) -> None:
    server = StoreServer(host="127.0.0.1", port=port, admin_secret=admin, member_secret=member)
    address = await server.start()
    print(address.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
