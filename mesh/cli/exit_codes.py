"""What `mesh` exits with. The table is part of `mesh --help` and of the promise to scripts.

Rules of this file:
1. `mesh run` and `mesh wait` speak for the run: 0 when it succeeded, else its own exit code (128 + n for
   signal n).
2. What goes wrong in `mesh` itself has codes of its own, below 10, and 123 to 125 when it is about a run that
   may go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    MeshError,
    MeshTimeoutError,
    NotFoundError,
    RemoteProtocolError,
    SpecError,
    StorageError,
    TransportError,
)
from mesh.reasons import Reason
from mesh.states import RunState


class ExitCode(IntEnum):
    """Exit codes of `mesh` itself."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DEPLOYMENT = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAUTHENTICATED = 6
    SUSPENDED = 123
    TIMEOUT = 124
    LOST_SIGHT = 125
    HUNG_UP = 129
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    TERMINATED = 143


TABLE = """Exit codes:

\b
    0    done; the run succeeded
    1    failed, and nothing more precise is known
    2    the command line or the job is not acceptable; nothing was created
    3    no deployment is running, or it cannot be reached
    4    there is no such run, rank or log
    5    the name is taken, or the run's state does not allow this
    6    no token, or a wrong one
    123  the run was suspended while `mesh run` or `mesh logs -f` was with it; it has not ended
    124  `mesh wait --timeout` or `mesh chaos --timeout` ran out, or the deployment did not answer in time
    125  `mesh run` lost sight of a run that may still go on
    129  the terminal was closed (the run goes on)
    130  Ctrl-C, or the run was cancelled
    141  the reader of the output has gone, as after `| head -1` (the run goes on)
    143  SIGTERM

For `mesh join` and `mesh relay` 3 is that the head cannot be reached, cannot take it in now (its disk is full), or
cannot reach the relay, or that something was not up in time: it may be tried again. 5 is that a port, the
folder or the identity is in use or that the versions differ, 6 that the head refuses who asks, and 1 that this
machine lacks something. They end with 0 when they were told to stop. `mesh leave` ends with 3 when the head of
a relay could not be told.

`mesh run` and `mesh wait` exit with the run's own code: that of the rank that failed first, 128 + n when it
was ended by signal n, 126 and 127 when its command could not be executed or was not found. In a pipeline
such as `mesh run … | tee log`, use `set -o pipefail`: a shell reports the last program's code otherwise."""

_CODE_OF_CLASS: tuple[tuple[type[MeshError], ExitCode], ...] = (
    (SpecError, ExitCode.USAGE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (ConflictError, ExitCode.CONFLICT),
    (AuthenticationError, ExitCode.UNAUTHENTICATED),
    (DeploymentError, ExitCode.NO_DEPLOYMENT),
    (TransportError, ExitCode.NO_DEPLOYMENT),
    (MeshTimeoutError, ExitCode.TIMEOUT),
)


def code_of_error(error: MeshError) -> ExitCode:
    """The exit code for an error of `mesh` itself."""
    return next((code for cls, code in _CODE_OF_CLASS if isinstance(error, cls)), ExitCode.FAILED)


_CODE_OF_REASON = {
    Reason.UNREACHABLE: ExitCode.NO_DEPLOYMENT,
    Reason.DEPLOYMENT_NOT_RUNNING: ExitCode.NO_DEPLOYMENT,
    Reason.PORT_TAKEN: ExitCode.CONFLICT,
    Reason.DEPLOYMENT_BUSY: ExitCode.CONFLICT,
    Reason.CONFLICT: ExitCode.CONFLICT,
}


_HEADS_FAULTS = (RemoteProtocolError, MeshTimeoutError, StorageError)
"""Where a machine or a relay has nothing to mend itself."""


def code_of_agent(error: MeshError) -> ExitCode:
    """The exit code of `mesh join`, `mesh relay` and `mesh leave`, where not everything is about the deployment."""
    if isinstance(error, DeploymentError):
        return _CODE_OF_REASON.get(error.reason, ExitCode.FAILED)
    return ExitCode.NO_DEPLOYMENT if isinstance(error, _HEADS_FAULTS) else code_of_error(error)


def code_of_run(run: Mapping[str, Any]) -> int:
    """The exit code that an ended or suspended run stands for; never 0 for one that did not succeed."""
    status = run["status"]
    state = RunState(status["state"])
    if state is RunState.SUCCEEDED:
        return ExitCode.OK
    if state is RunState.SUSPENDED:
        return ExitCode.SUSPENDED
    if status["exitCode"]:
        return int(status["exitCode"])
    if state is RunState.CANCELLED:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED
