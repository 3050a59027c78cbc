"""A relay's process where its disk and its head do not do what they should; without a network."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from agents.head_line import HeadUrl
from agents.mesh_heard import RelayNewsHeard
from agents.relay_agent import RelayAgent, RelaySettings, build_parser, read_settings
from agents.relay_folder import KnownRelay, RelayFolder
from mesh.errors import DeploymentError, SpecError, TransportError
from mesh.net.tokens import JoinToken
from mesh.reasons import Reason

KNOWN = KnownRelay(
    head="https://head:8471",
    name="relay-1",
    secret="s",
    deployment="d",
    bundle="bundle 1",
    key="key 1",
    certificate="certificate 1",
    revoked=[],
)


def agent(folder: RelayFolder) -> RelayAgent:
    head = HeadUrl.parse(KNOWN.head)
    made = RelayAgent(RelaySettings(head=head, token=None, listen=("127.0.0.1", 1)), folder)
    made._known = KNOWN
    return made


async def test_a_certificate_and_news_that_come_at_once_are_both_kept(tmp_path: Path) -> None:
    may_write = asyncio.Event()

    class SlowFolder(RelayFolder):
        async def save_known(self, known: KnownRelay) -> None:
            await may_write.wait()
            await super().save_known(known)

    made = agent(SlowFolder(tmp_path))
    renewed = asyncio.create_task(made._keep(key="key 2", certificate="certificate 2"))
    heard = asyncio.create_task(
        made._hear(RelayNewsHeard(version="2", revoked=["machine-1"], bundle="bundle 2"))
    )
    await asyncio.sleep(0)
    may_write.set()
    await asyncio.gather(renewed, heard)
    for known in (made._known, RelayFolder(tmp_path).read_known()):
        assert known is not None
        assert (known.key, known.certificate) == ("key 2", "certificate 2")
        assert (known.revoked, known.bundle) == (["machine-1"], "bundle 2")


async def test_a_relay_whose_head_went_away_while_it_was_asked_to_dial_is_announced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = agent(RelayFolder(tmp_path))
    answers: list[Exception] = [
        TransportError("away"),
        DeploymentError("not up", reason=Reason.DEPLOYMENT_NOT_RUNNING),
        DeploymentError("cannot dial", reason=Reason.UNREACHABLE),
    ]

    async def announce() -> None:
        raise answers.pop(0)

    monkeypatch.setattr(made, "_announce", announce)
    for error in (TransportError, DeploymentError):
        with pytest.raises(error):
            await made._announce_late()
        assert not made._is_announced
    await made._announce_late()
    assert made._is_announced


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (("--public-address", "0.0.0.0"), "--public-address"),
        (("--public-address", "::"), "--public-address"),
        (("--public-address", "example.org"), "--public-address"),
        (("--listen", "0.0.0.0:0"), "--listen"),
    ],
)
def test_what_nobody_can_reach_is_refused_as_of_a_machine(wrong: tuple[str, str], field: str) -> None:
    given = ["--head", KNOWN.head, "--listen", "0.0.0.0:8472", *wrong]
    with pytest.raises(SpecError) as raised:
        read_settings(build_parser().parse_args(given), None)
    assert raised.value.details["field"] == field


async def test_who_is_told_to_stop_does_not_wait_for_a_head_that_says_nothing(tmp_path: Path) -> None:
    token = JoinToken.parse(f"gm1.{'a' * 12}.{'b' * 48}.{'c' * 64}")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as free:
        head = HeadUrl.parse(f"https://127.0.0.1:{silent.getsockname()[1]}")
        listen = ("127.0.0.1", free.getsockname()[1])
        free.close()
        made = RelayAgent(RelaySettings(head=head, token=token, listen=listen), RelayFolder(tmp_path))
        running = asyncio.create_task(made.run())
        silent.settimeout(20.0)
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            made.stop()
            await asyncio.wait_for(running, 20.0)
