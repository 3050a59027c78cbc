"""Which accelerators this machine has, by NVML. Without any, or without a driver, it has none; that is no error."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass

_log = logging.getLogger(__name__)
_MAKERS = re.compile(r"^(nvidia|tesla|quadro|geforce)\s+", re.IGNORECASE)
_SERIES = re.compile(r"^(RTX|GTX)\s+(A?\d+)(\s+Ada)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Of one kind: what is offered. Others of the machine are left out."""

    type: str
    count: int


def find_gpus() -> Gpus | None:
    """Never raises for what a machine can lack."""
    try:
        import pynvml  # of nvidia-ml-py
    except ImportError as error:
        _log.debug("no accelerators are looked for: %s", error)
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("no accelerators: %s", error)
        return None
    names: list[str] = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            names.append(name.decode() if isinstance(name, bytes) else name)
    except pynvml.NVMLError as error:
        _log.warning("the driver does not tell of all accelerators: %s", error)
    finally:
        pynvml.nvmlShutdown()
    return of_names(names)


def of_names(names: list[str]) -> Gpus | None:
    """Those of the kind that there are most of, as NVML names them."""
    kinds = Counter(short_name(name) for name in names)
    if not kinds:
        return None
    kind, count = kinds.most_common(1)[0]
    if len(kinds) > 1:
        _log.warning("accelerators of %d kinds: %s is offered, %s", len(kinds), kind, dict(kinds))
    return Gpus(type=kind, count=count)


def short_name(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` is H100, `Tesla V100-SXM2-16GB` V100, `NVIDIA GeForce RTX 4090` RTX4090."""
    rest = name.strip()
    while _MAKERS.match(rest):
        rest = _MAKERS.sub("", rest)
    series = _SERIES.match(rest)
    if series:
        return f"{series[1].upper()}{series[2].upper()}{'ADA' if series[3] else ''}"
    word = re.split(r"[\s-]", rest, maxsplit=1)[0]
    return re.sub(r"[^A-Za-z0-9_.]", "", word) or "GPU"
