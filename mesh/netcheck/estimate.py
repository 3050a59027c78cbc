"""How long one all-reduce of a model's gradients takes over a way that was measured. Pure.

Theory of operation. A ring all-reduce (what NCCL and gloo do with much data) of S bytes between n members sends
2 (n - 1) / n x S bytes over every way, in 2 (n - 1) steps, each of which waits for its neighbour: with the slowest
way's bytes per second B and its round trip R

    time = 2 (n - 1) / n x S / B  +  2 (n - 1) x R / 2

(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009: no algorithm sends
less.) It is what one step of plain data parallel training adds at least, when nothing of it is hidden behind the
backward pass. One stream's throughput was measured; several at once may get more on a long path.
"""

from __future__ import annotations

import re

from mesh.errors import SpecError

BYTES_PER_PARAMETER = 2
"""Gradients in bfloat16 or float16."""
MODEL_PARAMETERS_MAX = 1e14
MEMBERS_MIN = 2
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT])?", re.IGNORECASE)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_model_size(text: str) -> float:
    """Parameters, from `7B`, `350M`, `1.3B` or a plain number. Raises SpecError."""
    matched = _SIZE.fullmatch(text.strip())
    parameters = float(matched[1]) * _UNITS[(matched[2] or "").upper()] if matched else 0.0
    if not 1 <= parameters <= MODEL_PARAMETERS_MAX:
        raise SpecError(
            f"A model's size is its number of parameters, such as 7B or 350M; got {text[:40]!r}.",
            field="modelSize",
            got=text[:40],
        )
    return parameters


def all_reduce_s(
    parameters: float, *, members: int = MEMBERS_MIN, bytes_per_s: float, round_trip_s: float
) -> float:
    """Seconds of one all-reduce of all gradients."""
    if members < MEMBERS_MIN or bytes_per_s <= 0:
        raise ValueError("an all-reduce needs two members and a way between them")
    steps = 2 * (members - 1)
    return steps / members * parameters * BYTES_PER_PARAMETER / bytes_per_s + steps * round_trip_s / 2
