"""Small programs of the system that are run to their end: `nft`, `ip`. Each run has a limit. Blocking."""

from __future__ import annotations

import shutil
import subprocess

LIMIT_S = 10.0
PACKAGES = {"nft": "nftables", "ip": "iproute2"}
"""What the overlay's rules and routes are set with, and Debian's packages that have it."""


class ProgramFailed(Exception):
    """A program did not do it; the message has what it said."""


def not_installed() -> str | None:
    """Which of PACKAGES this machine lacks, in words; None when it has all."""
    lacking = [f"{name} (package {package})" for name, package in PACKAGES.items() if not shutil.which(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def run_program(*command: str, given: str = "") -> str:
    """What it printed. Raises ProgramFailed."""
    try:
        done = subprocess.run(
            command,
            input=given.encode(),
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(f"{' '.join(command)} took over {LIMIT_S:g} s") from error
    except OSError as error:
        raise ProgramFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProgramFailed(f"{' '.join(command)}: {words[0][:200] if words else done.returncode}")
    return done.stdout.decode(errors="replace")
