"""Why the mesh refused something: a closed set that is counted, logged, and sent to the peer where there is one."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """The value goes over the wire and into counters: never rename one."""

    # Before a peer is known: nothing is answered
    NOT_TLS = "NotTls"
    TLS_VERSION = "TlsVersion"
    NO_CERTIFICATE = "NoCertificate"
    HANDSHAKE_FAILED = "HandshakeFailed"
    HANDSHAKE_TIMEOUT = "HandshakeTimeout"
    SOURCE_LIMIT = "SourceLimit"
    """One address has too many connections that are not streams yet."""

    # The peer's certificate
    NOT_OUR_NAME = "NotOurName"
    """Signed by our authority, but the name in it is none of ours."""
    OTHER_DEPLOYMENT = "OtherDeployment"
    EXPIRED = "Expired"
    NOT_YET_VALID = "NotYetValid"
    CLOCK_SKEW = "ClockSkew"
    """Its times do not fit, and the two machines' clocks are why."""
    REVOKED = "Revoked"

    # What it asked for
    PREFACE_TIMEOUT = "PrefaceTimeout"
    BAD_PREFACE = "BadPreface"
    WRONG_VERSION = "WrongVersion"
    WRONG_MACHINE = "WrongMachine"
    """This is not the machine that the peer meant to reach."""
    OTHER_RUN = "OtherRun"
    STALE_EPOCH = "StaleEpoch"
    UNKNOWN_MACHINE = "UnknownMachine"
    """The epoch's roster has that rank on another machine, or not at all."""
    NOT_HERE = "NotHere"
    """The epoch or rank that is meant has not come up here, and the wait for it is over."""
    PORT_NOT_OFFERED = "PortNotOffered"
    STREAM_LIMIT = "StreamLimit"
    WAITING_LIMIT = "WaitingLimit"
    TARGET_REFUSED = "TargetRefused"
    """Nobody listens on the port that is meant."""
    TARGET_UNREACHABLE = "TargetUnreachable"

    # On the way out
    UNKNOWN_TARGET = "UnknownTarget"
    """An overlay address that no roster has."""
    NOT_REDIRECTED = "NotRedirected"
    """Somebody dialled the capture port itself."""
    PEER_UNREACHABLE = "PeerUnreachable"
    PEER_NOT_TRUSTED = "PeerNotTrusted"
    """Who answered could not prove to be the machine that was meant."""

    # Relay
    UNKNOWN_TICKET = "UnknownTicket"
    NOT_LISTENING = "NotListening"
    """The machine that is meant has no line to this relay."""
    RELAY_MEMBERS = "RelayMembers"
    """A gang may have two members on a relayed path; this would be another one."""
