"""A head's log part as a process of its own, to be killed and to be measured: `python -m tests.integration.log_head`.

Prints one JSON line when it listens ({"port": …}), and one whenever it is asked on stdin (a line):
{"lines": …, "quiet": …, "rss_peak_bytes": …} of the follower that it runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from coordinator.logs.reader import LogReader
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from coordinator.logs.writer import Limits
from tests.fakes.log_stream import UID

SECRET = "s"


def rss_peak_bytes() -> int:
    """Of this process alone: getrusage would begin with the peak of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


async def serve(
    root: Path, *, port: int, retention_bytes: int, rate_bytes_per_s: float, follow: bool
) -> None:
    store = LogStore(root, limits=Limits(retention_bytes=retention_bytes))
    sink = LogSink(store, secret=SECRET, host="127.0.0.1", port=port, rate_bytes_per_s=rate_bytes_per_s)
    endpoint = await sink.start()
    counts = {"lines": 0, "quiet": 0}

    async def is_ended(uid: str) -> bool:
        return False

    async def count() -> None:
        async for line in LogReader(store, is_ended=is_ended).lines(UID, follow=True):
            counts["lines"] += 1
            counts["quiet"] += line["text"].startswith("psst")

    following = asyncio.create_task(count()) if follow else None
    print(json.dumps({"port": endpoint.port}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({**counts, "rss_peak_bytes": rss_peak_bytes()}), flush=True)
    if following is not None:
        following.cancel()
    await sink.stop()
    store.close()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    asyncio.run(serve(Path(options.pop("root")), **options))
