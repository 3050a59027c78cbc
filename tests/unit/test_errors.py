"""The tree of errors: every class crosses a process (pickle) and a connection (wire) with all that it says."""

from __future__ import annotations

import copy
import json
import pickle

import msgpack
import pytest

from mesh.errors import FencedError, InternalError, LaunchError, MeshError, SpecError
from mesh.reasons import Reason

TREE = MeshError.tree()


def filled(error_class: type[MeshError]) -> MeshError:
    return error_class(
        "Something happened on rank 1 – „nicht gut“.",
        hint="Try the other thing.",
        reason=Reason.LIMIT_EXCEEDED,
        rank=1,
        share=0.5,
        path="/tmp/a b",
        known=None,
        ours=False,
    )


def facts(error: MeshError) -> tuple[object, ...]:
    return type(error), error.message, error.hint, error.reason, error.details, error.args, str(error)


@pytest.mark.parametrize("error_class", TREE, ids=lambda c: c.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling_whole(error_class: type[MeshError], protocol: int) -> None:
    error = filled(error_class)
    assert facts(pickle.loads(pickle.dumps(error, protocol=protocol))) == facts(error)


def test_every_error_survives_the_way_that_ray_sends_and_raises_it() -> None:
    from ray import cloudpickle  # late: importing ray takes longer than the rest of this file
    from ray.exceptions import RayTaskError

    for error_class in TREE:
        error = filled(error_class)
        assert facts(pickle.loads(cloudpickle.dumps(error))) == facts(error)
        raised = RayTaskError("submit", "a traceback", error).as_instanceof_cause()
        with pytest.raises(error_class):
            raise raised
        assert facts(raised.cause) == facts(error)
        assert facts(pickle.loads(cloudpickle.dumps(raised)).cause) == facts(error)


@pytest.mark.parametrize("error_class", TREE, ids=lambda c: c.__name__)
def test_a_copy_of_an_error_says_the_same(error_class: type[MeshError]) -> None:
    error = filled(error_class)
    assert facts(copy.copy(error)) == facts(error) == facts(copy.deepcopy(error))


@pytest.mark.parametrize("error_class", TREE, ids=lambda c: c.__name__)
def test_every_error_survives_the_wire_whole_as_json_and_as_msgpack(error_class: type[MeshError]) -> None:
    error = filled(error_class)
    wire = error.to_wire()
    assert facts(MeshError.from_wire(json.loads(json.dumps(wire)))) == facts(error)
    assert facts(MeshError.from_wire(msgpack.unpackb(msgpack.packb(wire)))) == facts(error)


@pytest.mark.parametrize("error_class", TREE, ids=lambda c: c.__name__)
def test_an_error_without_fields_has_its_class_reason_and_reads_as_its_message(
    error_class: type[MeshError],
) -> None:
    error = error_class("It broke.")
    assert str(error) == "It broke."
    assert error.reason is error_class.default_reason
    assert facts(MeshError.from_wire(error.to_wire())) == facts(error)


def test_no_two_classes_share_a_name_since_the_wire_tells_them_apart_by_it() -> None:
    names = [c.__name__ for c in TREE]
    assert len(names) == len(set(names))


def test_every_class_says_in_its_docstring_what_it_is_for() -> None:
    assert [c.__name__ for c in TREE if not (c.__doc__ or "").strip()] == []


def test_the_hint_follows_the_message_for_a_person() -> None:
    assert str(SpecError("nodes is 0.", hint="Give 1 to 8.")) == "nodes is 0. Give 1 to 8."


def test_a_cause_does_not_travel_but_does_not_keep_the_error_from_travelling() -> None:
    try:
        raise LaunchError("No such command.") from OSError(2, "x")
    except LaunchError as error:
        assert facts(pickle.loads(pickle.dumps(error))) == facts(error)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"error": "ErrorOfANewerVersion", "reason": "ReasonOfANewerVersion", "message": "m", "hint": "h"},
        {"error": None, "reason": None, "message": None, "hint": None, "details": None},
        {"error": "ErrorOfANewerVersion", "reason": "StaleEpoch", "message": "m", "details": {}},
    ],
)
def test_what_another_version_sends_is_still_an_error(data: dict[str, object]) -> None:
    assert type(MeshError.from_wire(data)) is InternalError


def test_an_unknown_reason_falls_back_to_the_one_of_its_class() -> None:
    error = MeshError.from_wire({"error": "FencedError", "reason": "New", "message": "Epoch 1 is over."})
    assert type(error) is FencedError
    assert error.reason is Reason.STALE_EPOCH


def test_a_reason_of_another_version_under_an_unknown_class_is_kept_when_it_is_known() -> None:
    assert MeshError.from_wire({"error": "New", "reason": "StaleEpoch"}).reason is Reason.STALE_EPOCH


def test_details_from_the_wire_cannot_take_the_place_of_the_error_s_own_fields() -> None:
    wire = SpecError("m", field="nodes").to_wire()
    wire["details"] = {"message": "forged", "hint": "forged", "reason": "forged", "self": 1, "field": "nodes"}
    error = MeshError.from_wire(wire)
    assert error.message == "m"
    assert error.details["field"] == "nodes"


@pytest.mark.parametrize("details", ["text", 5, [1, 2], {"a": {"nested": [1]}}, {1: "one"}])
def test_details_of_any_shape_never_raise(details: object) -> None:
    wire = {"error": "SpecError", "message": "m", "details": details}
    assert MeshError.from_wire(wire).message == "m"
