"""The port that an agent's gateway or relay will listen on: looked at before the head is asked."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

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
        raise DeploymentError(
            f"Nothing can listen on {host} port {port} here: {error.strerror}.",
            hint="Another program has it; name another port: --listen."
            if is_taken
            else "Name another one: --listen.",
            reason=Reason.PORT_TAKEN if is_taken else Reason.FORBIDDEN,
        ) from error
