"""Whatever is heard of an epoch, and in whatever order: the same evidence leads to the same verdict."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.reasons import Reason
from tests.unit import blame_cases as cases
from tests.unit.blame_cases import Case, Heard, failure
from tests.unit.blame_player import NODES, Found, Player

ANY = failure(0, Reason.COMMAND_FAILED)
ORDERS = 6


def endings(rank: int) -> st.SearchStrategy[tuple[Heard, ...]]:
    """What one rank's command may come to, and then its member."""
    exits = st.sampled_from(
        [
            (),
            (cases.plain(rank, code=0),),
            (cases.plain(rank, code=42, at_s=0.01 * rank),),
            (cases.plain(rank, signal=9, oom_killed=True),),
            (cases.plain(rank, signal=15),),
            (cases.torchrun(rank, code=-11),),
            (cases.closed_by("10.0.0.1", rank),),
            (cases.torchrun(rank, error=cases.GLOO_TIMEOUT),),
            (cases.taken_down(rank),),
            (cases.StartFailed(rank=rank, reason=Reason.COMMAND_NOT_FOUND),),
        ]
    )
    lives_on: tuple[Heard, ...] = ()
    ends = st.sampled_from(
        [
            lives_on,
            lives_on,
            (cases.FencedItself(rank=rank),),
            (cases.Suspected(rank=rank),),
        ]
    )
    notice = st.sampled_from([(), (), (), (cases.Reclaimed(rank=rank),)])
    return st.tuples(notice, exits, ends).map(lambda parts: (*parts[0], *parts[1], *parts[2]))


LATER = st.sampled_from(
    [
        (),
        ((3.3, (cases.Lapsed(rank=1),)),),
        ((3.3, (cases.Lapsed(rank=1), cases.Lapsed(rank=2))),),
        ((9.0, (cases.Lapsed(rank=1),)),),
        ((5.0, (cases.Reclaimed(rank=2),)),),
    ]
)


def essence(found: Found) -> tuple[object, ...]:
    return found.kind, found.cause.rank, found.cause.reason, found.victims, found.lost


@settings(max_examples=40, deadline=None)
@given(
    streams=st.tuples(*(endings(rank) for rank in range(NODES))), later=LATER, number=st.integers(0, 10**6)
)
def test_the_same_evidence_leads_to_the_same_verdict(
    streams: tuple[tuple[Heard, ...], ...],
    later: tuple[tuple[float, tuple[Heard, ...]], ...],
    number: int,
) -> None:
    if not any(stops(stream) for stream in streams):
        return  # nothing ends this epoch but success
    heard = tuple(h for stream in streams for h in stream)
    done = {h.rank for h in heard if isinstance(h, cases.FencedItself)}
    later = tuple((at_s, tuple(h for h in more if h.rank not in done)) for at_s, more in later)
    case = Case(name="any", moments=((0.0, heard), *later), expected=ANY)
    verdicts = {}
    for order in range(ORDERS):
        by_chance = random.Random(f"{number}/{order}")
        player = Player(choose=by_chance.randrange, repeat=lambda: by_chance.random() < 0.2)
        verdicts[essence(player.play(case))] = order
    assert len(verdicts) == 1, verdicts


def stops(stream: tuple[Heard, ...]) -> bool:
    """True when the others cannot go on, whatever they do."""
    has_finished = any(isinstance(h, cases.Exited) and h.exit.ok for h in stream)
    fails = any(isinstance(h, cases.Exited) and not h.exit.ok for h in stream)
    is_called = any(isinstance(h, (cases.StartFailed, cases.Reclaimed)) for h in stream)
    is_fenced = any(isinstance(h, cases.FencedItself) for h in stream)
    return fails or is_called or (is_fenced and not has_finished)
