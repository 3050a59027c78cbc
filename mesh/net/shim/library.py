"""What a program's environment needs for the shim to be in it. The library is compiled by the package's build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import DeploymentError
from mesh.net.shim import addresses
from mesh.reasons import Reason

LIBRARY = Path(__file__).with_name("native") / "gangmesh-shim.so"
TABLE_NAME = "shim.table"
"""In the folder of the gateway."""
OVERLAY = addresses.OVERLAY
CONFIG_VARIABLE = "GANGMESH_SHIM"
PRELOAD_VARIABLE = "LD_PRELOAD"
ADDRESSES_MAX = 8
_VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimPlace:
    """A program's place on the overlay, on a machine whose gateway runs with `--shim`.

    Attributes:
        gateway_folder: absolute; of the gateway that the program speaks to.
        device: the name under which `getifaddrs` shows the overlay; 15 characters at most.
        addresses: the overlay addresses of this machine and of the member on it. The first of a family is the one that
            the program's own sockets are told to have.
    """

    gateway_folder: Path
    device: str
    addresses: tuple[str, ...]


def read_place(text: str) -> ShimPlace:
    """What a program was told, from the variable. Raises ValueError."""
    version, device, addresses_text, table = text.split(";", 3)
    if version != _VERSION:
        raise ValueError(f"a shim's place of version {version[:20]!r}")
    return ShimPlace(
        gateway_folder=Path(table).parent, device=device, addresses=tuple(addresses_text.split(","))
    )


def missing() -> str | None:
    """Why there is no shim on this machine, and what to do; None when there is one."""
    if any(sign in str(LIBRARY) for sign in " :"):
        return f"The shim cannot be loaded from {LIBRARY}: LD_PRELOAD takes no path with a space or a colon."
    if LIBRARY.exists():
        return None
    return (
        f"The shim was not built ({LIBRARY} is not there): gangmesh was installed without a C compiler. "
        "Install gcc and the C library's headers (Debian: apt-get install gcc libc6-dev), then gangmesh again, "
        "or run as root with nftables, where no shim is needed."
    )


def shim_environment(environment: Mapping[str, str], place: ShimPlace) -> dict[str, str]:
    """The variables to put over a program's environment; what it preloads itself stays behind the shim.

    Raises DeploymentError when the shim was not built, ValueError for a place that cannot be.
    """
    lacking = missing()
    if lacking is not None:
        raise DeploymentError(lacking, reason=Reason.SHIM_NOT_LOADED)
    if not 0 < len(place.addresses) <= ADDRESSES_MAX or len(place.device) > 15 or ";" in place.device:
        raise ValueError(f"no place for the shim: {place}")
    wrong = [address for address in place.addresses if addresses.loopback_of(address) is None]
    if wrong or not place.gateway_folder.is_absolute():
        raise ValueError(f"no place for the shim: {wrong or place.gateway_folder}")
    table = str(place.gateway_folder / TABLE_NAME)
    own = str(LIBRARY)
    others = [
        name
        for name in environment.get(PRELOAD_VARIABLE, "").replace(" ", ":").split(":")
        if name not in ("", own)
    ]
    return {
        CONFIG_VARIABLE: ";".join((_VERSION, place.device, ",".join(place.addresses), table)),
        PRELOAD_VARIABLE: ":".join((own, *others)),
    }
