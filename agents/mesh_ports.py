"""The ports of Ray and of the head's services on a machine of the mesh: one block, below the kernel's ephemeral range.

Ray binds its ports on every address. So they are known ahead: the gateway offers exactly them, and its rules keep
everybody else from them before Ray has started.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from mesh.errors import DeploymentError
from mesh.reasons import Reason

FIRST_PORTS = (31000, 31512, 32024)
PORTS = 512
CHECK_PORTS = (29590, 29591)
"""At which machines measure the way to each other (the network check), on their overlay addresses only."""
_DIRECTORY, _NODE, _OBJECTS, _STORE, _LOGS, _WORKERS = range(6)


@dataclass(frozen=True, slots=True)
class MeshPorts:
    """A block of ports, by its first one."""

    first: int

    @property
    def last(self) -> int:
        return self.first + PORTS - 1

    @property
    def offered(self) -> frozenset[int]:
        """What other machines may reach here."""
        return frozenset({*range(self.first, self.last + 1), *CHECK_PORTS})

    @property
    def directory(self) -> int:
        """Of Ray's directory, on the head."""
        return self.first + _DIRECTORY

    @property
    def node_manager(self) -> int:
        return self.first + _NODE

    @property
    def object_manager(self) -> int:
        return self.first + _OBJECTS

    @property
    def store(self) -> int:
        return self.first + _STORE

    @property
    def logs(self) -> int:
        return self.first + _LOGS

    @property
    def first_worker(self) -> int:
        """From here to the last one: a port for each worker process."""
        return self.first + _WORKERS


def free_ports() -> MeshPorts:
    """The first block in which nobody listens now. Raises DeploymentError."""
    for first in FIRST_PORTS:
        if all(_is_free(port) for port in range(first, first + PORTS)):
            return MeshPorts(first)
    raise DeploymentError(
        f"Other programs of this machine listen on ports between {FIRST_PORTS[0]} and {FIRST_PORTS[-1] + PORTS - 1}.",
        hint=f"The mesh needs {PORTS} ports in a row there: see who has them with `ss -ltnp`.",
        reason=Reason.PORT_TAKEN,
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections that have ended do not count
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)  # two may have bound a port as long as none listens
        except OSError:
            return False
    return True
