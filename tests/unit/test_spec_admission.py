"""What a deployment takes, refuses as not available yet, and warns about: one test per rule of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import SpecError
from mesh.reasons import Reason
from mesh.resources import Machine
from mesh.spec import DeploymentFacts, Job, admit, job_from_data, job_from_flags, resolve
from mesh.submission import facts_now

LAPTOP = DeploymentFacts(machines=2, gpus={"H100": 1})
RENTED = DeploymentFacts(
    machines=0, machines_cost_nothing=False, grows_by_itself=True, single_site=False, relay_possible=True
)


def job(**fields: Any) -> Job:
    return job_from_data({"spec": {"command": ["true"], **fields}}, source="")


def warnings(given: Job, facts: DeploymentFacts = LAPTOP) -> list[str]:
    return [warning.type for warning in admit(given, facts)]


def refusal(given: Job, facts: DeploymentFacts = LAPTOP) -> SpecError:
    with pytest.raises(SpecError) as caught:
        admit(given, facts)
    return caught.value


def test_the_documented_commands_run_on_a_laptop_without_a_warning_or_a_price() -> None:
    first = job_from_flags(
        command=["torchrun", "train.py"], gpu=["H100"], nodes=2, launcher="torchrun", max_cost="2.00"
    )
    assert warnings(first) == []
    across = job_from_flags(
        command=["torchrun", "train.py"],
        gpu=["H100"],
        nodes=2,
        launcher="torchrun",
        network="global",
        transport="auto",
        startup_timeout="15m",
        max_cost="2.00",
    )
    assert warnings(across) == ["WANBound"]


@pytest.mark.parametrize("launcher", ["Ray", "Verl", "Accelerate", "Deepspeed"])
def test_a_launcher_that_does_not_exist_yet_is_refused(launcher: str) -> None:
    error = refusal(job(distributed={"launcher": launcher}))
    assert error.reason is Reason.NOT_AVAILABLE_YET
    assert error.details["field"] == "spec.distributed.launcher"
    assert "Plain and Torchrun" in error.message


def test_everything_that_is_not_available_is_said_at_once() -> None:
    error = refusal(
        job(
            image="nvcr.io/x:1",
            maxCost="2.00",
            distributed={"launcher": "verl"},
        ),
        RENTED,
    )
    assert error.reason is Reason.NOT_AVAILABLE_YET
    assert error.details["problems"] == 4
    for field in ("launcher", "image", "maxCost", "distributed.network"):
        assert f"{field}: got " in error.message


def test_a_gang_may_be_restarted_when_its_command_fails() -> None:
    assert warnings(job(recovery={"onProcessFailure": "RestartGang", "maxAttempts": 5})) == []


def test_one_rank_may_be_restarted_where_ranks_share_nothing() -> None:
    alone = {"recovery": {"onProcessFailure": "RestartRank"}}
    assert warnings(job(distributed={"nodes": 2}, **alone)) == []
    assert warnings(job(**alone)) == ["RestartsWholeGang"]
    assert warnings(job(distributed={"nodes": 2, "launcher": "torchrun"}, **alone)) == ["RestartsWholeGang"]


def test_where_machines_are_in_one_place_every_network_scope_holds() -> None:
    for scope in ("Colocated", "Regional"):
        assert warnings(job(distributed={"network": scope})) == []
    assert "Global is available" in refusal(job(distributed={"network": "Regional"}), RENTED).message


def test_a_relayed_path_is_warned_about_only_where_there_can_be_one() -> None:
    auto = job(distributed={"network": "global", "transport": "auto"})
    assert warnings(auto) == ["WANBound"]
    assert warnings(auto, RENTED) == ["WANBound", "RelayedLowBandwidth"]
    three = job(distributed={"network": "global", "transport": "auto", "nodes": 3})
    assert warnings(three, replace(LAPTOP, machines=3, relay_possible=True)) == ["WANBound"]


def test_clear_text_is_warned_about_where_machines_may_be_reached_so() -> None:
    public = replace(LAPTOP, public_possible=True)
    assert warnings(job(distributed={"nodes": 2}), public) == ["PublicClearText"]
    assert warnings(job(), public) == []


def test_where_no_checkpoint_is_kept_a_run_that_may_start_again_is_warned() -> None:
    nowhere = replace(LAPTOP, keeps_checkpoints=False)
    assert warnings(job(), nowhere) == ["NoCheckpoints"]
    assert warnings(job(recovery={"maxAttempts": 0}), nowhere) == []
    assert warnings(job(), LAPTOP) == []


def test_machines_in_several_places_bound_a_gang_where_they_are_there_already() -> None:
    several = replace(LAPTOP, single_site=False)
    assert warnings(job(distributed={"nodes": 2, "network": "colocated"}), several) == []
    assert warnings(job(distributed={"nodes": 2, "network": "regional"}), several) == []


def test_what_machines_say_of_their_networks_is_what_is_possible() -> None:
    def machine(name: str, *, region: str, dialable: bool, public: str | None) -> Machine:
        return {
            "name": name, "address": "198.19.0.1", "labels": {"region": region}, "state": "Ready", "run": None,
            "gpus": {"type": None, "count": 0}, "waitsFor": None,
            "network": {"dialable": dialable, "privateNetwork": None, "privateAddress": None, "publicAddress": public},
        }  # fmt: skip

    here = machine("m1", region="eu", dialable=True, public="203.0.113.1")
    there = machine("m2", region="us", dialable=True, public="203.0.113.2")
    hidden = machine("m3", region="us", dialable=False, public=None)
    facts = facts_now(LAPTOP, [here, there])
    assert (facts.single_site, facts.relay_possible, facts.public_possible) == (False, False, True)
    facts = facts_now(LAPTOP, [there, hidden])
    assert (facts.single_site, facts.relay_possible, facts.public_possible) == (True, True, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"distributed": {"nodes": 3}}, ["needs 3 machines and this deployment has 2"]),
        ({"resources": {"gpu": "B200:1"}}, ["needs 1 × B200 on each machine", "at most 1 × H100"]),
        ({"resources": {"gpu": "H100:8"}}, ["needs 8 × H100"]),
        ({"distributed": {"gpusPerNode": 4}}, ["needs 4 × GPU"]),
        ({"resources": {"gpu": "h100,b200"}}, []),
        ({"distributed": {"gpusPerNode": 1}}, []),
    ],
)
def test_what_the_machines_do_not_have_is_a_warning_and_no_error(
    fields: dict[str, Any], words: list[str]
) -> None:
    found = [str(warning) for warning in admit(job(**fields), LAPTOP)]
    assert len(found) == (1 if words else 0)
    for word in words:
        assert word in found[0]
        assert found[0].startswith("NoSuchCapacity: The run will wait: ")


def test_machines_without_gpus_are_said_to_have_none() -> None:
    (warning,) = admit(job(resources={"gpu": "H100"}), DeploymentFacts(machines=1))
    assert "have no GPU" in warning.message


def test_a_deployment_that_buys_machines_does_not_count_those_it_has() -> None:
    big = job(distributed={"nodes": 8, "network": "global"}, resources={"gpu": "H100:8"})
    assert warnings(big, RENTED) == ["WANBound"]


def test_the_shape_of_a_total_follows_the_machines_that_there_are() -> None:
    total = job(distributed={"totalGPUs": 4})
    assert resolve(total, facts=DeploymentFacts(machines=4, gpus={"T4": 2})).nodes == 2
    assert resolve(total, facts=DeploymentFacts(machines=4)).nodes == 1
    assert resolve(total, facts=RENTED).nodes == 1
    assert resolve(total).nodes == 1


def test_rank_variables_of_the_user_are_overridden_under_plain_with_a_warning() -> None:
    env = {"RANK": "7", "WORLD_SIZE": "9", "OK": "1"}
    (warning,) = admit(job(env=env), LAPTOP)
    assert (warning.type, "RANK, WORLD_SIZE in env" in warning.message) == ("EnvOverridden", True)
    assert warnings(job(env=env, command=["torchrun", "t.py"], distributed={"launcher": "torchrun"})) == []


def test_a_command_that_makes_worlds_of_its_own_is_refused() -> None:
    error = refusal(
        job(
            command=["torchrun", "--nnodes=1", "--standalone", "t.py"],
            distributed={"nodes": 2, "launcher": "torchrun"},
        )
    )
    assert error.reason is Reason.INVALID_SPEC
    assert (error.details["field"], error.details["got"]) == ("spec.command", "--nnodes=1")
    assert "--standalone" in error.message
    assert error.hint == "Leave it out: the gang gives it to torchrun."


def test_a_command_that_overrides_the_contract_is_a_warning() -> None:
    (warning,) = admit(
        job(
            command=["torchrun", "--master-port=8008", "t.py"],
            distributed={"nodes": 2, "launcher": "torchrun"},
        ),
        LAPTOP,
    )
    assert warning.type == "CommandOverridesContract"
    assert "--master-port=8008" in warning.message
