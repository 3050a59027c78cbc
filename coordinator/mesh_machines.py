"""The machines of the mesh as the head knows them: who is who, and where. Pure; mesh_head.py is the shell.

Theory of operation. A machine joins with a token, and gets a name, a number (its overlay addresses) and a secret. With
the secret it asks for news, and joins again after its raylet, its agent, its host or the head was gone: as another
machine, under another name, with another secret. So each secret is good for one next step, and a second user of an old
one gives itself away: a copied disk.

Rules of this file:
1. A name is given once. A number is another machine's as soon as its machine is gone, the longest unused one first.
2. What is gone stays gone: its certificate is revoked by name for as long as one could be valid. While the book is full
   of such names nobody joins; whoever comes back again and again has to wait, so that one machine does not fill it.
3. An answer can be lost: an old secret is good again as long as nobody has used the one that came after it.
4. Every change raises `version`, which whoever follows compares.
5. Only hashes of secrets are kept. The time (seconds since 1970) and the secrets are arguments. The book is bounded.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mesh.errors import AuthenticationError, ConflictError, SpecError, TransportError
from mesh.ids import MachineName
from mesh.net.clock import SKEW_MAX_S
from mesh.net.overlay import NUMBER_MAX
from mesh.net.tokens import hash_secret
from mesh.reasons import Reason

MACHINES_MAX = 4096
"""That are there at the same time."""
GONE_MAX, GONE_BY_RETURNS_MAX = 20_000, 80_000
"""While so many are remembered nobody new joins, and nobody comes back: every machine hears of all of them. When the
head begins again everybody comes back under another name."""
RETURNS_MAX, RETURN_EVERY_S = 30, 300.0
"""So many times in a row a machine may join, and after that as often. In trouble with its network it does a few times
a minute."""
DEFAULT_HINT = "machine"
_HINT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMachine:
    """One machine, from its joining on."""

    name: MachineName
    origin: MachineName
    """What it was called when it came the first time, by a token."""
    number: int
    secret_hash: str
    joined_at: float
    gateway: tuple[tuple[str, int], ...] = ()
    """Where others dial it; empty when it only dials out, or it is not known yet."""
    was_heard: bool = False
    """Its secret has been used: it knows it."""
    gone_at: float | None = None
    successor: MachineName | None = None
    """The machine that it has come back as."""
    has_left: bool = False
    """It said goodbye: to come back it needs a token."""


@dataclass(slots=True)
class MeshMachines:
    """The book."""

    machines: dict[MachineName, MeshMachine] = field(default_factory=dict)
    """By name, also those that are gone."""
    last_number: int = 0
    version: int = 0
    certificate_s: float = 2 * 86400.0
    """How long a machine's certificate is good at most: see `mesh_authority`."""

    # ---- coming and going -------------------------------------------------------------------------

    def enter(
        self, name: MachineName, secret: str, *, now: float, before: MachineName | None = None
    ) -> MeshMachine:
        """A machine under a name that nobody has had; `before` is what it was called when it comes back.

        Raises ConflictError when there are too many; TransportError (LimitExceeded) while too many have gone of late.
        """
        self._forget(now)
        gone = len(self.revoked())
        if gone >= (GONE_MAX if before is None else GONE_BY_RETURNS_MAX):
            raise gone_too_many(f"{gone} machines that have gone", days=self.certificate_s / 86400)
        others = self.present().keys() - {before}
        if len(others) >= MACHINES_MAX:
            raise ConflictError(f"The deployment has {len(others)} machines, and takes no more.")
        if name in self.machines:
            raise ConflictError(f"The name {name} has been given.")
        machine = MeshMachine(
            name=name,
            origin=name,
            number=self._next_number(),
            secret_hash=hash_secret(secret),
            joined_at=now,
        )
        self.last_number = machine.number
        self._put(machine)
        return machine

    def may_come_back(self, name: MachineName, secret: str, *, is_followed: bool) -> MeshMachine:
        """Whether who has this secret may join again in the place of this machine. Changes nothing.

        Args:
            is_followed: somebody who shows the machine's secret waits for news right now.

        Raises:
            AuthenticationError: not with this secret; (IdentityCopied) somebody else has come back with it.
            ConflictError: (IdentityInUse) the machine is there.
        """
        machine = self._known(name, secret)
        if machine.has_left:
            raise AuthenticationError(f"{name} has left the deployment.", hint=_WITH_TOKEN)
        self._refuse_copy(machine)
        if machine.gone_at is None and is_followed:
            raise ConflictError(
                f"{name} is in the deployment now, with this identity.",
                hint="Is this disk a copy of its disk? Then name another folder, --state DIR, and join with a token of "
                "its own.",
                reason=Reason.IDENTITY_IN_USE,
            )
        return machine

    def check_pace(self, old: MachineName, *, now: float) -> None:
        """Whether this machine may come back as another one now. Raises TransportError (LimitExceeded)."""
        origin = self.machines[old].origin
        joined = [m.joined_at for m in self.machines.values() if m.origin == origin and m.joined_at <= now]
        used_up_until = 0.0
        for joined_at in sorted(joined):
            used_up_until = max(used_up_until, joined_at) + RETURN_EVERY_S
        wait_s = used_up_until - (RETURNS_MAX - 1) * RETURN_EVERY_S - now
        if wait_s > 0:
            raise TransportError(
                f"{old} has come back too often.",
                hint=f"It may again in {wait_s:.0f} s. Why it has to is in its agent's log.",
                reason=Reason.LIMIT_EXCEEDED,
            )

    def may_begin_anew(self, name: MachineName) -> bool:
        """Whether the machine that got this name by a token may ask for another one by it: it never heard of the name,
        as far as anybody can tell. Nobody has used its secret, nor come back with it.
        """
        machine = self.machines.get(name)
        if machine is None:
            return True
        return not machine.was_heard and not any(one.was_heard for one in self._successors(machine))

    def succeed(self, old: MachineName, new: MachineName, *, now: float) -> None:
        """`old` has come back as `new`: it is gone, and so are successors that nobody has heard of. Those have `new` as
        their successor too: who holds the secret of one may be a copy.
        """
        machine = self.machines[old]
        for overtaken in self._successors(machine):
            self.leave(overtaken.name, now=now)
            self._put(replace(self.machines[overtaken.name], successor=new))
        self.leave(old, now=now)
        self._put(replace(self.machines[old], successor=new))
        self._put(replace(self.machines[new], origin=machine.origin))

    def leave(self, name: MachineName, *, now: float, for_good: bool = False) -> bool:
        """It is gone, and nobody believes its certificate any more. False when it was gone already."""
        machine = self.machines.get(name)
        if machine is None or machine.gone_at is not None:
            return False
        self._put(replace(machine, gone_at=now, gateway=(), has_left=for_good))
        return True

    # ---- who is there -----------------------------------------------------------------------------

    def check(self, name: MachineName, secret: str) -> MeshMachine:
        """The machine that shows this secret, which is there. Raises AuthenticationError."""
        machine = self._known(name, secret)
        self._refuse_copy(machine)
        if machine.gone_at is not None:
            raise AuthenticationError(
                f"{name} is not in the deployment any more: it has left, or it did not answer and was given up."
            )
        if not machine.was_heard:  # others do not see it: the version stays
            machine = replace(machine, was_heard=True)
            self.machines[name] = machine
        return machine

    def place(self, name: MachineName, gateway: tuple[tuple[str, int], ...]) -> None:
        """Where others can dial it."""
        machine = self.machines.get(name)
        if machine is not None and machine.gone_at is None and machine.gateway != gateway:
            self._put(replace(machine, gateway=gateway))

    def present(self) -> dict[MachineName, MeshMachine]:
        """Those that are there."""
        return {name: machine for name, machine in self.machines.items() if machine.gone_at is None}

    def revoked(self) -> list[MachineName]:
        """Those that are not, and whose certificates could be valid."""
        return sorted(name for name, machine in self.machines.items() if machine.gone_at is not None)

    # ---- on disk ----------------------------------------------------------------------------------

    def copy(self) -> MeshMachines:
        """As it is now; what is in it is frozen."""
        return replace(self, machines=dict(self.machines))

    def to_json(self) -> dict[str, Any]:
        machines = [asdict(machine) for machine in self.machines.values()]
        return {"machines": machines, "last_number": self.last_number, "version": self.version}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeshMachines:
        """Raises KeyError, TypeError, ValueError for what `to_json` has not made."""
        book = cls(last_number=int(data["last_number"]), version=int(data["version"]))
        for words in data["machines"]:
            places = tuple((str(host), int(port)) for host, port in words["gateway"])
            machine = MeshMachine(**{"origin": words["name"], **words, "gateway": places})
            book.machines[machine.name] = machine
        return book

    # ---- inside -----------------------------------------------------------------------------------

    def _known(self, name: MachineName, secret: str) -> MeshMachine:
        machine = self.machines.get(name)
        known = machine.secret_hash if machine is not None else hash_secret("")
        if not hmac.compare_digest(known, hash_secret(secret)) or machine is None:
            raise AuthenticationError(
                f"This deployment does not know {name[:60]!r} by this secret.", hint=_WITH_TOKEN
            )
        return machine

    def _refuse_copy(self, machine: MeshMachine) -> None:
        """Raises AuthenticationError when its next secret has been used: somebody else has this one, too."""
        successor = next((one for one in self._successors(machine) if one.was_heard), None)
        if successor is None:
            return
        raise AuthenticationError(
            f"Somebody else has come back with the identity of {machine.name}, as {successor.name}.",
            hint="Is this disk a copy of another machine's? Then name another folder, --state DIR, and join with a "
            "token of its own.",
            reason=Reason.IDENTITY_COPIED,
        )

    def _successors(self, machine: MeshMachine) -> list[MeshMachine]:
        """As what it has come back, one after the other."""
        found: list[MeshMachine] = []
        for _ in self.machines:  # a damaged book may lead in a circle
            if machine.successor is None or machine.successor not in self.machines:
                break
            machine = self.machines[machine.successor]
            found.append(machine)
        return found

    def _put(self, machine: MeshMachine) -> None:
        self.machines[machine.name] = machine
        self.version += 1

    def _next_number(self) -> int:
        taken = {machine.number for machine in self.present().values()}
        number = self.last_number
        while True:  # ends: MACHINES_MAX is below NUMBER_MAX
            number = number % NUMBER_MAX + 1
            if number not in taken:
                return number

    def _forget(self, now: float) -> None:
        """Those whose certificates cannot be valid any more."""
        old = now - self.certificate_s - 2 * SKEW_MAX_S
        for name in [n for n, m in self.machines.items() if m.gone_at is not None and m.gone_at < old]:
            del self.machines[name]


def gone_too_many(who: str, *, days: float) -> TransportError:
    """Nobody joins while so many are remembered."""
    return TransportError(
        f"The deployment remembers {who}, so that nobody believes them any more, and takes nobody in now.",
        hint=f"Each is forgotten {days:g} days after it has gone, when its certificate has ended: try again later.",
        reason=Reason.LIMIT_EXCEEDED,
    )


def checked_hint(text: Any) -> str:
    """What a machine's name begins with. Raises SpecError."""
    if text is None or text == "":
        return DEFAULT_HINT
    if not isinstance(text, str) or not _HINT.fullmatch(text):
        raise SpecError(
            "A machine's name may begin with up to 40 small letters, digits and hyphens.",
            hint="The deployment puts a number behind it: names are given once.",
            field="name-hint",
            got=str(text)[:80],
        )
    return text


_WITH_TOKEN = "`mesh token create` on the head makes a token to join with."
