"""What the head's end of the mesh does that needs neither Ray nor a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from agents.gateway_wire import Revoke
from agents.mesh_ports import MeshPorts
from coordinator import mesh_head as module
from coordinator.deployment import StateFolder
from coordinator.mesh_head import MeshHead
from mesh.errors import DeploymentError, MeshTimeoutError
from mesh.resources import Machine


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)


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


@pytest.mark.parametrize("fault", [DeploymentError("unreadable"), RuntimeError("of ours")])
async def test_an_authority_that_cannot_be_read_now_is_no_end_of_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(module, "RENEW_EVERY_S", 0.0)
    head = mesh_head(tmp_path)
    good, told = head._authority.machine_credentials, asyncio.Event()
    faults = [fault]

    def credentials(name: Any) -> Any:
        if faults:
            raise faults.pop()
        return good(name)

    async def tell(request: Any) -> None:
        told.set()

    monkeypatch.setattr(head._authority, "machine_credentials", credentials)
    monkeypatch.setattr(head._gateway, "tell", tell)
    await goes_on(head._keep_certificates(), told)


async def test_a_rotation_that_cannot_go_on_keeps_no_certificate_from_being_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one turn: while a step of it could not be written, the head's own certificate ran out."""
    for pause in ("RENEW_EVERY_S", "LOOK_S"):
        monkeypatch.setattr(module, pause, 0.0)
    head, told = mesh_head(tmp_path), asyncio.Event()

    async def fails() -> None:
        raise DeploymentError("the disk is full")

    async def tell(request: Any) -> None:
        told.set()

    monkeypatch.setattr(head.desk.rotation, "advance", fails)
    monkeypatch.setattr(head._gateway, "tell", tell)
    rotating = asyncio.create_task(head._keep_rotating())
    await goes_on(head._keep_certificates(), told)
    assert not rotating.done()
    rotating.cancel()
    await asyncio.wait([rotating])


async def goes_on(loop: Coroutine[Any, Any, None], has_done: asyncio.Event) -> None:
    """Until it has; it has to be running then."""
    keeping = asyncio.create_task(loop)
    waiting = asyncio.create_task(has_done.wait())
    await asyncio.wait([keeping, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
    assert has_done.is_set() and not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])


@pytest.mark.parametrize("fault", [MeshTimeoutError("no answer", timeout_s=1.0), RuntimeError("of ours")])
async def test_a_fault_is_no_end_of_what_the_gateway_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """It ended the telling for good: a machine that was revoked after it stayed believed at the head."""
    head = mesh_head(tmp_path)
    faults, told = [fault], asyncio.Event()

    async def tell(request: Any) -> None:
        if isinstance(request, Revoke):
            if faults:
                raise faults.pop()
            told.set()

    monkeypatch.setattr(head._gateway, "tell", tell)
    head._news.set()
    await goes_on(head._keep_told(), told)


async def test_a_fault_is_no_end_of_looking_after_relays_and_lost_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = mesh_head(tmp_path)
    faults: list[Exception] = [RuntimeError("of ours")]
    has_looked = asyncio.Event()

    def look() -> None:
        if faults:
            raise faults.pop()
        has_looked.set()

    async def list_machines() -> list[Machine]:
        look()
        return []

    monkeypatch.setattr(head.desk.relays, "look", look)
    await goes_on(head._keep_relays(), has_looked)
    has_looked.clear()
    faults.append(RuntimeError("of ours"))
    await goes_on(head.look_for_lost(list_machines), has_looked)
