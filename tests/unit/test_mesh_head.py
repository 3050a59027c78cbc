"""What the head's end of the mesh does that needs neither Ray nor a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agents.mesh_ports import MeshPorts
from coordinator import mesh_head as module
from coordinator.deployment import StateFolder
from coordinator.mesh_head import MeshHead
from mesh.errors import DeploymentError


def mesh_head(state: Path) -> MeshHead:
    return MeshHead(
        state=StateFolder(state),
        listen=("127.0.0.1", 8471),
        api=("127.0.0.1", 8470),
        ports=MeshPorts(31000),
        sockets=state,
        environment={},
        spawn=lambda work, name: work.close(),
    )


async def test_machines_that_join_at_the_same_time_get_names_of_their_own(tmp_path: Path) -> None:
    head = mesh_head(tmp_path)
    numbers = await asyncio.gather(*(head.next_name_number() for _ in range(50)))
    assert sorted(numbers) == list(range(1, 51))


async def test_an_authority_that_cannot_be_read_now_is_no_end_of_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("RENEW_EVERY_S", "LOOK_S", "CERTIFICATES_AGAIN_S"):
        monkeypatch.setattr(module, pause, 0.0)
    head = mesh_head(tmp_path)
    good, told = head._authority.machine_credentials, asyncio.Event()
    faults = [DeploymentError("unreadable")]

    def credentials(name: Any) -> Any:
        if faults:
            raise faults.pop()
        return good(name)

    async def tell(request: Any) -> None:
        told.set()

    monkeypatch.setattr(head._authority, "machine_credentials", credentials)
    monkeypatch.setattr(head._gateway, "tell", tell)
    keeping = asyncio.create_task(head._keep_certificates())
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait([keeping, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
    assert told.is_set() and not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])
