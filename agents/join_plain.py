"""Joining a head whose parts listen on an address: unencrypted, for a network in which everybody may be trusted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from agents.join import LEAVE_LOOK_S, Terms
from agents.join_options import checked_grace, read_labels
from agents.mesh_heard import answer_errors
from agents.raylet import ADDRESS_LABEL
from mesh import __version__
from mesh.errors import SpecError
from mesh.http_transport import HttpTransport, checked_url
from mesh.net.paths import PROVIDER_LABEL, UNNAMED_PROVIDER


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What an agent is told that joins by an address."""

    head: str
    token: str = field(repr=False)
    address: str
    labels: Mapping[str, str]
    grace_s: float
    """How long a run may take to save and to leave this machine, when the agent is told to stop."""

    @classmethod
    def read(
        cls, *, head: str, token_file: Path, address: str, labels: Sequence[str], grace_s: float
    ) -> JoinSettings:
        """From the command line. Raises SpecError."""
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(
                f"The token file {token_file} cannot be read: {error}.", field="--token-file"
            ) from error
        try:
            own = str(ipaddress.IPv4Address(address))
        except ValueError:
            raise SpecError(
                f"--address takes the IPv4 address of this machine, not {address[:80]!r}.",
                hint="See it with `ip address`.",
                field="--address",
            ) from None
        return cls(
            head=checked_url(head),
            token=token,
            address=own,
            labels=read_labels(labels),
            grace_s=checked_grace(grace_s),
        )


class PlainWay:
    """See `agents.join.Way`."""

    def __init__(self, settings: JoinSettings) -> None:
        self._settings = settings

    @property
    def head(self) -> str:
        return self._settings.head

    async def enter(self) -> Terms:
        request = {
            "address": self._settings.address,
            "version": __version__,
            "python": platform.python_version(),
            "ray": version("ray"),
        }
        async with self._head() as head:
            terms = await head.call("POST", "/v1/machines/join", body=request)
        with answer_errors():
            cluster = terms["cluster"]
            return Terms(
                name=str(terms["name"]),
                node_id=str(terms["nodeId"]),
                session=str(cluster["session"]),
                cluster_address=str(cluster["address"]),
                cluster_id=str(cluster["id"]),
                cluster_token=str(terms["clusterToken"]),
                address=self._settings.address,
                labels={
                    PROVIDER_LABEL: UNNAMED_PROVIDER,
                    **self._settings.labels,
                    ADDRESS_LABEL: self._settings.address,
                },
            )

    async def until_over(self) -> str:
        """Never: the raylet's end says it."""
        return str(await asyncio.get_running_loop().create_future())

    async def until_free(self, name: str, *, grace_s: float) -> None:
        notice = {"graceSeconds": grace_s, "message": "its agent was told to stop"}
        async with self._head() as head:
            await head.call("POST", f"/v1/machines/{name}/reclaim", body=notice)
            while await _has_run(head, name):  # noqa: ASYNC110 - the API has nothing to wait on
                await asyncio.sleep(LEAVE_LOOK_S)

    async def say_goodbye(self, name: str) -> None:
        """Ray says it."""

    async def close(self) -> None:
        """Nothing is open between two calls."""

    @contextlib.asynccontextmanager
    async def _head(self) -> AsyncIterator[HttpTransport]:
        transport = HttpTransport(url=self._settings.head, token=self._settings.token, fate=lambda: None)
        await transport.open()
        try:
            yield transport
        finally:
            await transport.close()


async def _has_run(head: HttpTransport, name: str) -> bool:
    machines = (await head.call("GET", "/v1/machines"))["machines"]
    return any(machine["name"] == name and machine["run"] for machine in machines)
