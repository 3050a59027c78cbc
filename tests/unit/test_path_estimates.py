"""What a dry run says of the ways between the machines that there are."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.network_view import path_resource
from coordinator.would_wait import why_it_would_wait
from mesh.cli.dry_run import print_dry_run
from mesh.cli.options import OutputFormat
from mesh.cli.terminal import Terminal
from mesh.ids import RunName
from mesh.netcheck.estimate import parse_model_size
from mesh.netcheck.path_book import PathLine
from mesh.network_resources import PathEstimate, ProviderPath
from mesh.path_estimates import path_estimates
from mesh.plan import RunPlan
from mesh.resources import Machine
from mesh.spec import job_from_data
from mesh.states import LauncherKind, NetworkScope, TransportPolicy
from mesh.submission import dry_run_answer, facts_for, prepare


def machine(
    name: str,
    provider: str | None,
    *,
    region: str = "eu",
    is_on_mesh: bool = True,
    dialable: bool = True,
    private: str | None = None,
    public: str | None = None,
    state: str = "Ready",
    gpus: tuple[str | None, int] = (None, 0),
) -> Machine:
    labels = {"region": region} | ({} if provider is None else {"provider": provider})
    return {
        "name": name, "address": "198.19.0.1", "labels": labels, "state": state, "run": None, "waitsFor": None,
        "gpus": {"type": gpus[0], "count": gpus[1]},
        "network": {
            "dialable": dialable, "privateNetwork": private, "privateAddress": "10.0.0.1" if private else None,
            "publicAddress": public,
        } if is_on_mesh else None,
    }  # fmt: skip


def plan(
    nodes: int = 2,
    *,
    network: NetworkScope = NetworkScope.GLOBAL,
    transport: TransportPolicy = TransportPolicy.AUTO,
    gpus: int = 0,
    gpu_types: tuple[str, ...] = (),
) -> RunPlan:
    return RunPlan(
        name=RunName("job"), command=("true",), nodes=nodes, launcher=LauncherKind.PLAIN, network=network,
        transport_policy=transport, gpus_per_node=gpus, gpu_types=gpu_types,
    )  # fmt: skip


def measured(one: str, other: str, path: str, *, size: str | None = "7B", members: int = 2) -> ProviderPath:
    """1 Gbit/s and 20 ms."""
    line = PathLine(
        providers=(one, other), path=path, passed=1, passed_at=1.7e9, round_trip_s=0.02, bytes_per_s=125e6
    )
    parameters = None if size is None else parse_model_size(size)
    return path_resource(line, parameters=parameters, members=members)


def ways(estimates: list[PathEstimate]) -> list[tuple[list[str], str, str | None]]:
    return [(found["providers"], found["path"], found["measuredOver"]) for found in estimates]


AWS, GCP = machine("a", "aws"), machine("g", "gcp")


def test_each_two_places_are_told_with_the_path_that_the_run_would_have() -> None:
    hidden = machine("h", "home", dialable=False)
    known = [measured("aws", "gcp", "direct"), measured("aws", "home", "relayed")]
    assert ways(path_estimates(plan(), [AWS, GCP, hidden], known)) == [
        (["aws", "gcp"], "direct", "direct"),
        (["aws", "home"], "relayed", "relayed"),
        (["gcp", "home"], "relayed", None),
    ]


def test_what_was_never_measured_has_no_figure() -> None:
    [found] = path_estimates(plan(), [AWS, GCP], [measured("aws", "gcp", "relayed")])
    assert found == {
        "providers": ["aws", "gcp"], "path": "direct", "measuredOver": None, "roundTripSeconds": None,
        "bytesPerSecond": None, "allReduceSeconds": None,
    }  # fmt: skip


def test_a_check_that_only_failed_gives_no_figure_either() -> None:
    line = PathLine(providers=("aws", "gcp"), path="direct", failed=1, failed_at=1.7e9)
    [found] = path_estimates(plan(), [AWS, GCP], [path_resource(line, parameters=7e9, members=2)])
    assert found["measuredOver"] is None


def test_a_relay_is_told_only_to_who_admits_one() -> None:
    pair = [AWS, machine("h", "home", dialable=False)]
    assert path_estimates(plan(transport=TransportPolicy.DIRECT), pair, []) == []
    assert path_estimates(plan(nodes=3), [*pair, GCP], []) != []
    assert {e["path"] for e in path_estimates(plan(nodes=3), [*pair, GCP], [])} == {"direct"}


def test_places_that_the_run_may_not_span_are_left_out() -> None:
    far = machine("f", "aws", region="us")
    near = machine("n", "gcp")
    assert ways(path_estimates(plan(network=NetworkScope.REGIONAL), [AWS, far, near], [])) == [
        (["aws", "gcp"], "direct", None)
    ]
    assert path_estimates(plan(network=NetworkScope.COLOCATED), [AWS, far, near], []) == []


def test_machines_that_the_run_cannot_use_are_left_out() -> None:
    """A run for eight H100 was told of a link between machines without any."""
    there = [
        machine("a", "aws", gpus=("H100", 8)), machine("g", "gcp", gpus=("H100", 8)), machine("c", "cpu"),
        machine("h", "half", gpus=("H100", 4)), machine("o", "other", gpus=("A100", 8)),
        machine("u", "untyped", gpus=(None, 8)),
    ]  # fmt: skip
    assert ways(path_estimates(plan(gpus=8, gpu_types=("H100",)), there, [])) == [
        (["aws", "gcp"], "direct", None)
    ]
    of_any = {name for e in path_estimates(plan(gpus=8), there, []) for name in e["providers"]}
    assert of_any == {"aws", "gcp", "other", "untyped"}
    assert len(path_estimates(plan(gpu_types=("H100",)), there, [])) == 15


def test_providers_that_are_apart_are_left_out_and_come_back_when_a_check_has_passed() -> None:
    apart = [
        PathLine(providers=("aws", "gcp"), path=path, failed=2, failed_at=1.7e9)
        for path in ("direct", "relayed")
    ]
    known = [path_resource(line, parameters=7e9, members=2) for line in apart]
    assert ways(path_estimates(plan(), [AWS, GCP, machine("h", "home")], known)) == [
        (["aws", "home"], "direct", None),
        (["gcp", "home"], "direct", None),
    ]
    assert path_estimates(plan(), [AWS, GCP], [known[0], measured("aws", "gcp", "relayed")]) != []


def test_a_trusted_network_in_one_place_is_nothing_to_wait_for() -> None:
    rack = [machine(name, "aws", private="rack") for name in ("a", "b")]
    assert path_estimates(plan(), rack, []) == []
    plain = [machine(name, None, is_on_mesh=False) for name in ("a", "b")]
    assert path_estimates(plan(), plain, []) == []
    line = [machine("a", "aws", private="line"), machine("g", "gcp", private="line")]
    assert ways(path_estimates(plan(), line, [])) == [(["aws", "gcp"], "private", None)]


def test_machines_of_one_provider_that_share_no_network_are_told() -> None:
    assert ways(path_estimates(plan(), [AWS, machine("b", "aws")], [])) == [(["aws", "aws"], "direct", None)]
    assert path_estimates(plan(), [AWS], []) == [], "one machine alone is no pair"
    assert ways(path_estimates(plan(), [machine("a", None), machine("b", None)], [])) == [
        (["", ""], "direct", None)
    ]


def test_the_clear_path_has_the_figure_of_the_gateways_and_says_so() -> None:
    pair = [machine("a", "aws", public="203.0.113.1"), machine("g", "gcp", public="203.0.113.2")]
    [found] = path_estimates(plan(), pair, [measured("aws", "gcp", "direct")])
    assert (found["path"], found["measuredOver"]) == ("public", "direct")
    assert found["allReduceSeconds"] == pytest.approx(112.02)


def test_machines_that_are_going_are_no_part_of_it() -> None:
    for state in ("Lost", "Leaving"):
        assert path_estimates(plan(), [AWS, machine("g", "gcp", state=state)], []) == []
    assert path_estimates(plan(nodes=1), [AWS, GCP], []) == []


def printed(
    capfd: pytest.CaptureFixture[str], estimates: list[PathEstimate], *, model_size: str | None
) -> str:
    fields: dict[str, Any] = {"command": ["true"], "distributed": {"nodes": 2}}
    job = job_from_data({"metadata": {"name": "job"}, "spec": fields}, source="")
    answer = dry_run_answer(prepare(job, facts=facts_for(job)), paths=estimates)
    print_dry_run(Terminal(tty_free=True), answer, OutputFormat.TABLE, model_size=model_size)
    return capfd.readouterr().out


def test_people_read_the_length_what_it_is_from_and_what_was_never_measured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hidden = machine("h", None, dialable=False)
    found = path_estimates(plan(), [AWS, GCP, hidden], [measured("aws", "gcp", "direct")])
    lines = printed(capfd, found, model_size="7B").splitlines()
    told = [line for line in lines if "direct" in line or "relayed" in line]
    assert told == [
        "all-reduce      relayed between machines without a provider and aws: never measured, so nothing is estimated; "
        "mesh check measures it",
        "                relayed between machines without a provider and gcp: never measured, so nothing is estimated; "
        "mesh check measures it",
        "                direct between aws and gcp: 112 s for 7B on 2 machines (1.0 Gbit/s, round trip 20 ms)",
    ]


def test_without_a_size_the_measurement_is_told_and_how_to_get_the_length(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = path_estimates(plan(), [AWS, GCP], [measured("aws", "gcp", "direct", size=None)])
    text = printed(capfd, found, model_size=None)
    assert "direct between aws and gcp: 1.0 Gbit/s, round trip 20 ms; --model-size 7B says" in text
    assert "all-reduce" not in printed(capfd, [], model_size=None)
    assert "no relayed or wide-area path between the members" in printed(capfd, [], model_size="7B")


def test_what_no_path_joins_is_waited_for_and_said_in_the_words_of_the_wait() -> None:
    two = [machine("a-1", "aws"), machine("g-1", "gcp")]
    why = why_it_would_wait(plan(network=NetworkScope.COLOCATED), two, [])
    assert why is not None
    assert why.startswith(
        "Waiting for 2 machines, all at once: a-1 free; g-1 free. No allowed path joins so many"
    )
    assert why_it_would_wait(plan(), two, []) is None
    same = [machine("a-1", "aws"), machine("a-2", "aws"), machine("g-1", "gcp")]
    assert why_it_would_wait(plan(network=NetworkScope.COLOCATED), same, []) is None
    busy: Machine = {**same[0], "state": "InUse", "run": "other"}
    assert why_it_would_wait(plan(network=NetworkScope.COLOCATED), [busy, *same[1:]], []) is None


def test_two_providers_that_are_apart_are_waited_for_with_what_a_check_found() -> None:
    two = [machine("a-1", "aws"), machine("g-1", "gcp")]
    apart = PathLine(providers=("aws", "gcp"), path="direct", failed=2, failed_at=1.7e9, fault="Silent.")
    why = why_it_would_wait(plan(), two, [path_resource(apart, parameters=None, members=2)])
    assert why is not None
    assert "Not offered together: aws and gcp never passed a network check. Silent." in why
