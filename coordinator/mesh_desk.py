"""Where machines of the mesh are taken in and told the news. Behind the API's routes; nothing here is untyped or Ray's.

Theory of operation. A machine shows a token, or the secret that it was given when it joined before, and a request for
a certificate; it gets a name, a number, the certificate, a secret, and what it has to know of Ray's cluster. From then
on it asks again and again what is new (`follow`), and each answer has everything: where every machine is, who is not
believed any more, whom to trust.

Rules of this file:
1. A change is in the books on disk before the machine that asked hears of it.
2. Everybody who follows is told of every change; so is this host's own gateway (`on_change`).
3. Whoever asks says what it has heard last; a head that began again has other versions, so everybody hears it all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.api.mesh_service import JoinedTerms, MeshNews
from coordinator.authority_rotation import AuthorityRotation
from coordinator.dial_back import DialBack
from coordinator.mesh_authority import MeshAuthority
from coordinator.mesh_books import MACHINES_NAME, TOKENS_NAME, MeshBooks
from coordinator.mesh_machines import MeshMachine, checked_hint
from coordinator.mesh_news import MeshNewsroom
from coordinator.mesh_requests import ShownToken, check_clock, new_secret, shown_token, text_of
from coordinator.relay_desk import RelayDesk
from mesh.errors import SpecError
from mesh.ids import HEAD, MachineName
from mesh.net.clock import wall_clock
from mesh.net.overlay import HEAD_NUMBER, machine_overlay
from mesh.net.roster import MachinePlace, Machines
from mesh.net.tokens import TTL_S, JoinToken, TokenRecord, used_already
from mesh.resources import JoinTokenFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What a machine has to know of Ray's cluster to become part of it."""

    address: str
    id: str
    session: str
    token: str


class Surroundings(Protocol):
    """What the desk needs of the head around it."""

    def cluster(self) -> ClusterFacts:
        """Raises DeploymentError while there is none."""
        ...

    async def next_name_number(self) -> int:
        """A number that no machine has had in its name. Raises DeploymentError, StorageError."""
        ...

    def check_versions(self, request: Mapping[str, Any]) -> None:
        """Raises ConflictError when the machine runs others than this head."""
        ...

    async def source_of(self, port: int) -> str | None:
        """The address of who is behind a connection from this port of loopback."""
        ...

    async def probe(
        self, machine: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Those of the addresses at which that machine answers."""
        ...

    async def probe_relay(
        self, relay: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Those of the addresses at which that relay answers."""
        ...

    def new_node_id(self) -> str: ...


class MeshDesk:
    """One head's. `on_change` is called whenever places or revocations have changed."""

    def __init__(
        self,
        *,
        books: MeshBooks,
        authority: MeshAuthority,
        around: Surroundings,
        on_change: Callable[[], None],
    ) -> None:
        self._books = books
        self._authority = authority
        self._around = around
        self._newsroom = MeshNewsroom(
            changes=lambda: books.machines.version + self.relays.changes + self.rotation.changes,
            on_change=on_change,
        )
        self.rotation = AuthorityRotation(
            authority=authority, newsroom=self._newsroom, present=self._present, state_path=books.path
        )
        self._dial_back = DialBack()
        self.relays = RelayDesk(
            books=books,
            authority=authority,
            around=around,
            dial_back=self._dial_back,
            newsroom=self._newsroom,
            revoked=self.revoked,
            save=books.save,
        )

    # ---- tokens -----------------------------------------------------------------------------------

    async def create_token(
        self, ttl_s: float | None, *, for_relay: bool = False
    ) -> tuple[str, JoinTokenFacts]:
        """A new one, and what it looks like in lists. Raises SpecError, ConflictError, StorageError."""
        token = JoinToken(
            id=secrets.token_hex(6),
            secret=new_secret(),
            fingerprint=self._authority.fingerprint(),
        )
        record = self._books.tokens.add(
            token, now=wall_clock(), ttl_s=TTL_S if ttl_s is None else ttl_s, for_relay=for_relay
        )
        await self._books.save(TOKENS_NAME)
        return str(token), _facts(record)

    def list_tokens(self) -> list[JoinTokenFacts]:
        return [_facts(record) for record in self._books.tokens.records.values()]

    async def revoke_token(self, token_id: str) -> JoinTokenFacts:
        """Raises NotFoundError, ConflictError, StorageError."""
        record = self._books.tokens.revoke(token_id, now=wall_clock())
        await self._books.save(TOKENS_NAME)
        return _facts(record)

    # ---- machines ---------------------------------------------------------------------------------

    def trust(self) -> dict[str, Any]:
        """Whom to trust, for who has the fingerprint; and what time it is here."""
        return {"bundle": self._authority.bundle_pem().decode(), "clock": wall_clock()}

    async def join(self, request: Mapping[str, Any]) -> JoinedTerms:
        """Takes a machine in.

        Raises:
            AuthenticationError: the token or the identity is not good; (ClockSkew) the clocks differ.
            ConflictError: other versions; (IdentityInUse) the machine is there already.
            TransportError: (LimitExceeded) it has come back too often, or too many have gone.
            SpecError: what is asked makes no sense. DeploymentError: Ray is not up. StorageError.
        """
        check_clock(request)
        self._around.check_versions(request)
        hint = checked_hint(request.get("nameHint"))
        cluster = self._around.cluster()
        signing = text_of(request, "request").encode()
        self._admit(request)
        name = MachineName(f"{hint}-{await self._around.next_name_number()}")
        shown, before = self._admit(
            request
        )  # again: somebody else may have come while the number was waited for
        certificate = self._authority.sign_machine(signing, name)
        secret = new_secret()
        machine = self._books.machines.enter(name, secret, now=wall_clock(), before=before)
        if before is not None:
            self._books.machines.succeed(before, name, now=wall_clock())
        if shown is not None:
            self._books.tokens.redeem(shown.record, key=shown.key, name=name, now=wall_clock())
            await self._books.save(TOKENS_NAME)
        await self._books.save(MACHINES_NAME)
        self._newsroom.tell()
        node_id = self._around.new_node_id()
        return {
            "name": name,
            "number": machine.number,
            "secret": secret,
            "nodeId": node_id,
            "deployment": self._authority.deployment,
            "certificate": certificate.decode(),
            "cluster": {"address": cluster.address, "id": cluster.id, "session": cluster.session},
            "clusterToken": cluster.token,
            "news": self._news(),
        }

    def _admit(self, request: Mapping[str, Any]) -> tuple[ShownToken | None, MachineName | None]:
        """The token that is shown, if one is, and the machine whose place is taken. Changes nothing.

        Raises SpecError, AuthenticationError, ConflictError, TransportError.
        """
        shown, before = None, None
        if request.get("again") is not None:
            before = self._may_come_back(request)
        else:
            shown = shown_token(request, self._books.tokens, for_relay=False)
            before = shown.name_before
            if before is not None and not self._books.machines.may_begin_anew(before):
                raise used_already(shown.record)
        if before not in self._books.machines.machines:
            return shown, None
        self._books.machines.check_pace(before, now=wall_clock())
        return shown, before

    def _may_come_back(self, request: Mapping[str, Any]) -> MachineName:
        """The machine that comes back. Raises SpecError, AuthenticationError, ConflictError."""
        again = request.get("again")
        if not isinstance(again, dict):
            raise SpecError("`again` is the name and the secret of a machine.", field="again")
        name = MachineName(text_of(again, "name"))
        is_followed = self._newsroom.is_followed(name)
        self._books.machines.may_come_back(name, text_of(again, "secret"), is_followed=is_followed)
        return name

    async def follow(self, name: str, secret: str, after: str, *, is_gone: Callable[[], bool]) -> MeshNews:
        """What is new since `after`; waits for it, for a while. `is_gone`: who asked does not wait any more.

        Raises AuthenticationError when this machine is not one any more; TransportError (LimitExceeded).
        """
        machine = await self._check(name, secret)
        await self._newsroom.until_new(machine.name, after, is_gone=is_gone)
        await self._check(name, secret)
        return self._news()

    async def reach(
        self,
        name: str,
        secret: str,
        *,
        addresses: Sequence[tuple[str, int]],
        port: int | None,
        seen_from: int,
    ) -> list[tuple[str, int]]:
        """Where this machine can be dialled, found out by dialling it (`dial_back.py`), which everybody is told.

        Raises AuthenticationError, TransportError (LimitExceeded).

        Args:
            addresses: what it takes for its own.
            port: where its gateway listens; None when it does not.
            seen_from: our side's port of the connection that it asks on.
        """
        machine = await self._check(name, secret)
        found = await self._dial_back.find(
            machine.name,
            addresses,
            origin=machine.origin,
            source=await self._around.source_of(seen_from),
            port=port,
            dial=self._around.probe,
        )
        self._books.machines.place(machine.name, tuple(found))
        await self._books.save(MACHINES_NAME)
        self._newsroom.tell()
        return found

    async def renew(self, name: str, secret: str, request_pem: str) -> str:
        """A newer certificate (PEM). Raises AuthenticationError."""
        machine = await self._check(name, secret)
        return self._authority.sign_machine(request_pem.encode(), machine.name).decode()

    async def left(self, name: str, secret: str) -> None:
        """This machine says goodbye; it needs a token to come back."""
        machine = await self._check(name, secret)
        await self.give_up([machine.name], for_good=True)

    async def check(self, name: str, secret: str) -> MachineName:
        """Who shows this secret. Raises AuthenticationError."""
        return (await self._check(name, secret)).name

    async def give_up(self, names: Sequence[str], *, for_good: bool = False) -> None:
        """These machines are gone: nobody believes them any more."""
        left = [
            name
            for name in names
            if self._books.machines.leave(MachineName(name), now=wall_clock(), for_good=for_good)
        ]
        if left:
            await self._books.save(MACHINES_NAME)
            self._newsroom.tell()

    def unheard(self, *, older_than_s: float) -> list[MachineName]:
        """Machines that are in the book for longer and do not follow."""
        before = wall_clock() - older_than_s
        present = self._books.machines.present().values()
        return [m.name for m in present if m.joined_at < before and not self._newsroom.is_followed(m.name)]

    def places(self) -> Machines:
        """Where all machines are; the head itself is reached where one joined."""
        machines = {HEAD: MachinePlace(gateway=(), overlay=machine_overlay(HEAD_NUMBER))}
        for name, machine in self._books.machines.present().items():
            machines[name] = MachinePlace(gateway=machine.gateway, overlay=machine_overlay(machine.number))
        return machines

    def revoked(self) -> list[MachineName]:
        """Machines and relays that nobody believes any more."""
        return [*self._books.machines.revoked(), *self._books.relays.revoked()]

    # ---- inside -----------------------------------------------------------------------------------

    def _present(self) -> list[MachineName]:
        return [*self._books.machines.present(), *self.relays.there_or_to_come_back()]

    async def _check(self, name: str, secret: str) -> MeshMachine:
        known = self._books.machines.machines.get(MachineName(name))
        machine = self._books.machines.check(MachineName(name), secret)
        if known is not machine:
            await self._books.save(MACHINES_NAME)
        return machine

    def _news(self) -> MeshNews:
        return {
            "version": self._newsroom.version(),
            "machines": {
                str(name): {
                    "gateway": [list(address) for address in place.gateway],
                    "overlay": list(place.overlay),
                }
                for name, place in self.places().items()
            },
            "relays": {
                str(name): [list(address) for address in addresses]
                for name, addresses in self.relays.offered().items()
            },
            "revoked": [str(name) for name in self.revoked()],
            "bundle": self._authority.bundle_pem().decode(),
            "cluster": self._around.cluster().id,
        }


def _facts(record: TokenRecord) -> JoinTokenFacts:
    return {
        "id": record.id,
        "state": str(record.state(now=wall_clock())),
        "purpose": "Relay" if record.for_relay else "Machine",
        "expiresAt": record.expires_at,
        "usedAt": record.used_at,
    }
