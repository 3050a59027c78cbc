"""The one tree of errors.

Rules of this file:
1. Every error has a `Reason`, says whether trying again can help, and carries its facts as keyword fields.
2. Every class pickles, fields and all (Ray moves exceptions between processes); one test walks the tree.
3. The message is a sentence for a person: what happened and where. `hint` is what to do next.
4. Across a process or network boundary an error travels as data (`to_wire` / `from_wire`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from mesh.reasons import Reason

Detail = str | int | float | bool | None


class MeshError(Exception):
    """Root of the tree. Raise a subclass.

    Args:
        message: one sentence: what happened, where.
        hint: what the user can do next; empty when there is nothing.
        reason: overrides the class's reason with a narrower one.
        details: facts a program may want (field, value, rank, path …).
    """

    default_reason: ClassVar[Reason] = Reason.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, hint: str = "", reason: Reason | None = None, **details: Detail
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason or self.default_reason
        self.details: dict[str, Detail] = details

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip() if self.hint else self.message

    def __reduce__(self) -> tuple[Callable[..., MeshError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.hint, self.reason, self.details)

    def to_wire(self) -> dict[str, Any]:
        """This error as plain data: class name, reason, message, hint, details."""
        return {
            "error": type(self).__name__,
            "reason": str(self.reason),
            "message": self.message,
            "hint": self.hint,
            "details": dict(self.details),
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> MeshError:
        """The error that `to_wire` described; an unknown class or reason becomes an `InternalError`."""
        error_class = _by_name(str(data.get("error", "")))
        try:
            reason = Reason(data.get("reason", ""))
        except ValueError:
            reason = error_class.default_reason
        return _rebuild(
            error_class,
            str(data.get("message") or ""),
            str(data.get("hint") or ""),
            reason,
            _known_details(data.get("details")),
        )

    @classmethod
    def tree(cls) -> list[type[Self]]:
        """Every class below this one, this one first."""
        found: list[type[Self]] = [cls]
        for sub in cls.__subclasses__():
            found.extend(sub.tree())
        return found


def _rebuild(
    error_class: type[MeshError], message: str, hint: str, reason: Reason, details: dict[str, Detail]
) -> MeshError:
    error = error_class(message, hint=hint, reason=reason)
    # Not as keywords: a detail that came over the wire may have the name of a parameter.
    error.details.update(details)
    return error


def _known_details(sent: Any) -> dict[str, Detail]:
    """What a peer sent as details, without whatever is none: a peer may be of another version, or no peer at all."""
    if not isinstance(sent, dict):
        return {}
    return {
        str(name): value
        for name, value in sent.items()
        if value is None or isinstance(value, str | int | float | bool)
    }


def _by_name(name: str) -> type[MeshError]:
    return next((c for c in MeshError.tree() if c.__name__ == name), InternalError)


class SpecError(MeshError):
    """What the user wrote cannot be accepted. Fields: `field`, `got`."""

    default_reason = Reason.INVALID_SPEC


class NotFoundError(MeshError):
    """There is no such run, machine or log."""

    default_reason = Reason.NOT_FOUND


class ConflictError(MeshError):
    """The resource is in a state that does not allow this (a name that is taken, a run that has ended)."""

    default_reason = Reason.CONFLICT


class TransportError(MeshError):
    """A connection could not be made or broke; the peer said nothing wrong."""

    default_reason = Reason.UNREACHABLE
    retryable = True


class ProtocolError(MeshError):
    """Bytes that are not the protocol. Raise one of the two below."""

    default_reason = Reason.PROTOCOL


class LocalProtocolError(ProtocolError):
    """This side tried to send something illegal; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something illegal; the connection is of no use any more."""


class AuthenticationError(MeshError):
    """No credentials, or wrong ones."""

    default_reason = Reason.UNAUTHENTICATED


class FencedError(MeshError):
    """A message of an older epoch: it changed nothing, and its sender must stop. Fields: `epoch`, `floor`."""

    default_reason = Reason.STALE_EPOCH


class LeaseLostError(MeshError):
    """The member's right to run is over. Fields: `rank`, `epoch`."""

    default_reason = Reason.LEASE_LOST


class RendezvousError(MeshError):
    """The store could not do what was asked (unknown gang, missing key, full)."""

    default_reason = Reason.UNKNOWN_GANG
    retryable = True


class MeshTimeoutError(MeshError):
    """A wait reached its limit. The message says which wait; field `timeout_s`."""

    default_reason = Reason.TIMEOUT
    retryable = True


class PlacementError(MeshError):
    """The machines that were asked for cannot be had."""

    default_reason = Reason.NO_CAPACITY
    retryable = True


class LaunchError(MeshError):
    """A rank's command could not be started. Fields: `rank`, `command`."""

    default_reason = Reason.COMMAND_START_FAILED


class StorageError(MeshError):
    """The journal or a log could not be written or read."""

    default_reason = Reason.STORAGE_FULL


class CheckpointError(MeshError):
    """A checkpoint is damaged, incomplete or not of our making. Fields: `checkpoint`, `file`, `rank`."""

    default_reason = Reason.CHECKPOINT_CORRUPT


class CheckpointStoreError(MeshError):
    """The checkpoint store did not do what was asked: away, slow, full, or not ours to write. Field: `url`."""

    default_reason = Reason.CHECKPOINT_STORE_FAILED
    retryable = True


class DeploymentError(MeshError):
    """The deployment is not running, cannot start, or is busy."""

    default_reason = Reason.DEPLOYMENT_NOT_RUNNING


class InternalError(MeshError):
    """A fault of this program."""

    default_reason = Reason.INTERNAL
