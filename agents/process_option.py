"""Options of a process that only prctl(2) sets. Standard library only, and as little of it as there is."""

from __future__ import annotations

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def set_process_option(option: int, value: int) -> bool:
    """prctl(2), through the C half of ctypes (the whole costs 4 ms more). False where it cannot be reached."""
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        return bool(_ctypes.call_function(address, (option, value, 0, 0, 0)) == 0)
    except (ImportError, OSError):
        return False
