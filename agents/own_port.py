"""The port that an agent's gateway or relay will listen on: looked at before the head is asked."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator, Sequence

import psutil

from mesh.errors import DeploymentError
from mesh.net.sockets import listen
from mesh.reasons import Reason


def check_free(host: str, port: int) -> None:
    """Raises DeploymentError when nobody could listen there now."""
    with port_errors(host, port):
        listen(host, port).close()


@contextlib.contextmanager
def port_errors(host: str, port: int) -> Iterator[None]:
    """Raises DeploymentError for the OSError of a listener."""
    try:
        yield
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        who = _who_listens(port) if is_taken else ""
        raise DeploymentError(
            f"Nothing can listen on {host} port {port} here: {error.strerror}.",
            hint=f"{who} has it; name another port: --listen." if is_taken else "Name another one: --listen.",
            reason=Reason.PORT_TAKEN if is_taken else Reason.FORBIDDEN,
        ) from error


def _who_listens(port: int) -> str:
    """For a sentence: which agent of ours, as far as this user may see it, or another program."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            where = tuple(connection.laddr)  # empty where there is none
            if (
                connection.status == psutil.CONN_LISTEN
                and where[1:2] == (port,)
                and connection.pid is not None
            ):
                return _program(psutil.Process(connection.pid))
    return "Another program"


def _program(process: psutil.Process) -> str:
    argv = process.cmdline()
    if "agents.relay_agent" in argv:
        return f"gangmesh's own relay (folder {_option(argv, '--state')}, process {process.pid})"
    if "agents.gateway" in argv:
        agent = process.parent()
        folder = "" if agent is None else _option(agent.cmdline(), "--state")
        of = f"folder {folder}, " if folder else ""
        return f"gangmesh's own gateway of {_option(argv, '--machine')} ({of}process {process.pid})"
    return f"Another program ({process.name()}, process {process.pid})"


def _option(argv: Sequence[str], name: str) -> str:
    """Its value; empty where it is not given."""
    return next((value for word, value in itertools.pairwise(argv) if word == name), "")
