"""Somebody else's Ray on this host: started here, its address on stdout, `nodes` on stdin asks how many it has."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.integration.small_ray import small_ray


async def main(folder: Path) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    async with small_ray(folder, cpus=0) as address:
        print(address, flush=True)
        client = GcsClient(address=address)
        while await asyncio.to_thread(sys.stdin.readline):
            print(len(client.get_all_node_info()), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
