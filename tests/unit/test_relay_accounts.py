"""What relays have carried, from their counts to the head's ledger: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import relay_ledger
from coordinator.relay_ledger import RelayLedger
from mesh.errors import RemoteProtocolError
from mesh.ids import MachineName, RunUid
from mesh.net import relay_outbox
from mesh.net.relay_book import Pair, RelayBook
from mesh.net.relay_outbox import Outbox, Report, report_in, report_out

R = MachineName("relay-1")


def pair(number: int, run: str | None = "run") -> Pair:
    uid = None if run is None else RunUid(run)
    return Pair(run=uid, dialler=MachineName(f"a-{number}"), target=MachineName("b"))


def test_a_report_is_the_same_until_the_head_has_it() -> None:
    book, outbox = RelayBook(), Outbox(life="x")
    assert outbox.next_report() is None
    book.count(pair(1), 10)
    assert outbox.fill(book)
    first = outbox.next_report()
    assert first == Report(life="x", number=1, amounts={pair(1): 10})
    book.count(pair(1), 5)
    outbox.fill(book)
    assert outbox.next_report() is first
    outbox.on_delivered("x", 2)
    outbox.on_delivered("of another life", 1)
    assert outbox.next_report() is first
    outbox.on_delivered("x", 1)
    assert outbox.next_report() == Report(life="x", number=2, amounts={pair(1): 5})
    assert not outbox.fill(book)


@given(
    st.lists(
        st.sampled_from(["carry", "send", "lose the answer", "restart the relay", "restart the head"]),
        max_size=40,
    )
)
def test_whatever_is_ended_and_lost_in_between_the_sum_is_what_passed(steps: list[str]) -> None:
    book, outbox, ledger, carried = RelayBook(), Outbox(life="x"), RelayLedger(), 0
    for step in [*steps, "send", "send"]:
        if step == "carry":
            carried += 7
            book.count(pair(carried % 3), 7)
        elif step == "restart the head":
            ledger = RelayLedger.from_json(json.loads(json.dumps(ledger.to_json())))
        else:
            outbox.fill(book)
            outbox = Outbox.from_json(json.loads(json.dumps(outbox.to_json())))
        if step in ("send", "lose the answer"):
            report = outbox.next_report()
            outbox = Outbox.from_json(json.loads(json.dumps(outbox.to_json())))
            if report is not None:
                ledger.enter(R, report)
                if step == "send":
                    outbox.on_delivered(report.life, report.number)
    assert ledger.bytes_of(R) == carried
    assert sum(amount for _, _, amount in ledger.rows_of(None)) == carried


def test_an_outbox_that_nobody_empties_takes_no_more_and_the_relay_forgets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_outbox, "PAIRS_MAX", 3)
    monkeypatch.setattr(relay_outbox, "PAIRS_PER_REPORT_MAX", 2)
    book, outbox = RelayBook(), Outbox(life="x")
    for number in range(4):
        book.count(pair(number), 1)
    assert outbox.fill(book)
    book.count(pair(9), 1)
    assert not outbox.fill(book)
    report = outbox.next_report()
    assert report is not None
    assert list(report.amounts) == [pair(0), pair(1)]
    assert outbox.fill(book), "there is room again"
    assert book.usage == {}


def test_another_life_of_a_relay_begins_its_numbers_anew() -> None:
    ledger = RelayLedger()
    for life in ("x", "y"):
        report = Report(life=life, number=1, amounts={pair(1): 10, pair(1, None): 1})
        assert ledger.enter(R, report)
        assert not ledger.enter(R, report)
    assert ledger.bytes_of(R) == 22
    assert ledger.rows_of(RunUid("run")) == [(R, pair(1), 20)]
    assert ledger.bytes_of(MachineName("nobody")) == 0


def test_old_rows_go_and_the_sum_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_ledger, "ROWS_MAX", 2)
    monkeypatch.setattr(relay_ledger, "ACCOUNTS_MAX", 2)
    ledger = RelayLedger()
    for number, amounts in enumerate(({pair(1): 1, pair(2): 1}, {pair(1): 1}, {pair(3): 1}), start=1):
        ledger.enter(R, Report(life="x", number=number, amounts=amounts))
    assert [(at, amount) for _, at, amount in ledger.rows_of(None)] == [(pair(1), 2), (pair(3), 1)]
    assert ledger.bytes_of(R) == 4
    for name in ("s", "t"):
        ledger.enter(MachineName(name), Report(life="x", number=1, amounts={}))
    assert list(ledger.accounts) == ["s", "t"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=200) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    anything
    | st.fixed_dictionaries(
        {"life": anything, "number": anything | st.just(1), "amounts": st.lists(anything, max_size=3)}
    )
    | st.fixed_dictionaries(
        {
            "life": st.just("x"),
            "number": st.just(1),
            "amounts": st.lists(st.lists(anything, min_size=4, max_size=4)),
        }
    )
)
def test_nothing_but_a_report_is_one(data: object) -> None:
    for read in (report_in, Outbox.from_json):
        try:
            found = read(data)
        except RemoteProtocolError:
            continue
        if read is report_in:
            assert found is None or report_in(report_out(found)) == found  # type: ignore[arg-type]


def test_a_report_has_an_end_of_rows() -> None:
    rows = [["r", f"a{n}", "b", 1] for n in range(relay_outbox.PAIRS_PER_REPORT_MAX + 1)]
    with pytest.raises(RemoteProtocolError):
        report_in({"life": "x", "number": 1, "amounts": rows})
