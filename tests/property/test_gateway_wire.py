"""What an agent tells its gateway arrives as it was meant, and nothing else is taken for a request."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from agents.gateway_wire import (
    CarryRelay,
    Counters,
    Fence,
    Forget,
    Host,
    Offer,
    Probe,
    ProbeRelay,
    Request,
    Revoke,
    SetApi,
    SetIdentity,
    SetLocal,
    SetMachines,
    SetRelays,
    SetRoster,
    SourceOf,
    TakeReport,
    from_wire,
    to_wire,
)
from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, MachineName
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace
from mesh.net.tls import Credentials
from mesh.wire import FrameParser, encode_frame
from tests.net_world import RUN, roster

KEYS = Credentials(certificate_pem=b"certificate", key_pem=b"key", bundle_pem=b"bundle")
PLACE = MachinePlace(gateway=(("10.0.0.1", 7000), ("fd00::1", 7000)), overlay=("198.19.0.1",))
REQUESTS: tuple[Request, ...] = (
    SetIdentity(credentials=KEYS),
    SetMachines(machines={MachineName("a"): PLACE, MachineName("b"): MachinePlace(gateway=())}),
    SetRoster(roster=roster(7)),
    Host(credentials=KEYS, deliver_to=("198.18.0.1", "fd67:6d00::1")),
    Fence(run=RUN, floor=Epoch(3)),
    Forget(run=RUN),
    Revoke(machines=frozenset({MachineName("a")})),
    Offer(ports=frozenset({6379, 8265}), deliver_to=("127.0.0.1",)),
    SetRelays(
        places=(
            RelayPlace(machine=MachineName("r"), addresses=(("10.0.0.9", 7001),)),
            RelayPlace(machine=MachineName("head"), addresses=(), is_gateway=True),
        )
    ),
    SetRelays(places=()),
    SetLocal(addresses=("198.19.0.2", "fd67:6d00:1::2")),
    SetApi(credentials=KEYS, target=("127.0.0.1", 8470)),
    CarryRelay(streams_max=7, streams_per_machine_max=3),
    Probe(machine=MachineName("a"), addresses=(("10.0.0.1", 7000), ("fd00::1", 7000))),
    Probe(machine=MachineName("a"), addresses=()),
    ProbeRelay(relay=MachineName("r"), addresses=(("10.0.0.9", 7001),)),
    TakeReport(life="a", delivered=3),
    SourceOf(port=40000),
    Counters(),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
keys = ("certificate", "key", "bundle", "machines", "members", "run", "epoch", "floor", "ports")


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    [words] = FrameParser().feed(encode_frame(to_wire(request_)))
    assert from_wire(words) == request_


@given(anything | st.fixed_dictionaries({"do": st.sampled_from([type(r).__name__ for r in REQUESTS])}))
def test_nothing_but_a_request_is_one(words: object) -> None:
    try:
        from_wire(words)
    except RemoteProtocolError:
        return
    assert words in ({"do": "Counters"}, {"do": "SetRelays", "relays": ()})


@given(
    st.sampled_from([type(r).__name__ for r in REQUESTS]), st.dictionaries(st.sampled_from(keys), anything)
)
def test_wrong_fields_are_a_protocol_error_and_no_other(do: str, fields: dict[str, object]) -> None:
    words = msgpack.unpackb(msgpack.packb({"do": do, "deliver_to": ["x"], **fields}), strict_map_key=False)
    try:
        from_wire(words)
    except RemoteProtocolError:
        return


def test_a_number_without_end_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError):
        from_wire({"do": "Fence", "run": RUN, "floor": float("inf")})
