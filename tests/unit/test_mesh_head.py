"""What the head's end of the mesh does that needs neither Ray nor a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agents.mesh_ports import MeshPorts
from coordinator.deployment import StateFolder
from coordinator.mesh_head import MeshHead


async def test_machines_that_join_at_the_same_time_get_names_of_their_own(tmp_path: Path) -> None:
    head = MeshHead(
        state=StateFolder(tmp_path),
        listen=("127.0.0.1", 8471),
        api=("127.0.0.1", 8470),
        ports=MeshPorts(31000),
        sockets=tmp_path,
        environment={},
        spawn=lambda work, name: work.close(),
    )
    numbers = await asyncio.gather(*(head.next_name_number() for _ in range(50)))
    assert sorted(numbers) == list(range(1, 51))
