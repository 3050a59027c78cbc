"""The two ends of relayed streams, without TLS inside, for tests/bench/relay_bench.py: the relay alone is measured.

python -m tests.bench.relay_ends swallow FOLDER ADDRESS PORT
python -m tests.bench.relay_ends send FOLDER ADDRESS PORT STREAMS MEGABYTES      says "ready" and waits for a line first
python -m tests.bench.relay_ends idle FOLDER ADDRESS PORT STREAMS       until its stdin ends
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
import time
from pathlib import Path

from mesh.ids import MachineName
from mesh.net.dialling import Leg
from mesh.net.relay_client import RelayClient, RelayLine, RelayPlace
from mesh.net.tls import Credentials, client_context
from tests.net_world import DEPLOYMENT

RELAY = MachineName("m2")
TARGET = MachineName("m1")
CHUNK = bytes(1 << 20)


def context_of(folder: Path) -> ssl.SSLContext:
    parts = [(folder / f"{name}.pem").read_bytes() for name in ("certificate", "key", "bundle")]
    return client_context(Credentials(certificate_pem=parts[0], key_pem=parts[1], bundle_pem=parts[2]))


def swallow(leg: Leg) -> None:
    leg.socket.setblocking(True)
    buffer = bytearray(1 << 20)
    total = len(leg.early)
    try:
        while count := leg.socket.recv_into(buffer):
            total += count
        leg.socket.sendall(b"%d" % total)
    except ConnectionError:
        return  # the sender of an idle stream is gone
    finally:
        leg.socket.close()


def send(leg: Leg, megabytes: int) -> None:
    for _ in range(megabytes):
        leg.socket.sendall(CHUNK)
    leg.socket.shutdown(1)
    assert leg.socket.recv(100) == b"%d" % (megabytes << 20)


async def legs(client: RelayClient, context: ssl.SSLContext, count: int) -> list[Leg]:
    found = []
    for _ in range(count):
        found.append(await client.dial(TARGET, context))
        found[-1].socket.setblocking(True)
    return found


async def serve(client: RelayClient, context: ssl.SSLContext) -> None:
    def on_leg(leg: Leg) -> None:
        threading.Thread(target=swallow, args=(leg,), daemon=True).start()

    RelayLine(client=client, context=lambda: context, on_leg=on_leg).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    what, folder, address, port, *rest = sys.argv[1:]
    context = context_of(Path(folder))
    place = RelayPlace(machine=RELAY, addresses=((address, int(port)),))
    client = RelayClient(deployment=DEPLOYMENT, place=place, check=lambda peer: None)
    if what == "swallow":
        asyncio.run(serve(client, context))
    streams = int(rest[0])
    found = asyncio.run(legs(client, context, streams))
    if what == "idle":
        print("ready", flush=True)
        sys.stdin.read()
        return
    print("ready", flush=True)
    sys.stdin.readline()
    each = int(rest[1]) // streams
    threads = [threading.Thread(target=send, args=(leg, each)) for leg in found]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print((each * streams << 20) / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
