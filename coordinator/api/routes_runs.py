"""Runs: submit, look, suspend, resume, cancel, delete; and the attempts of their ranks."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from coordinator.api.endpoints import CONTEXT, Answer, Endpoint, Parameter, Query, read_json
from coordinator.api.retry import ask
from coordinator.api.routes_deployment import SELECTOR
from coordinator.api.streams import compact_json
from coordinator.would_wait import why_it_would_wait
from mesh.errors import ConflictError, MeshTimeoutError, NotFoundError, SpecError, TransportError
from mesh.ids import new_run_uid
from mesh.netcheck.estimate import MEMBERS_MIN, parse_model_size
from mesh.path_estimates import path_estimates
from mesh.reasons import Reason
from mesh.resources import Attempt, DryRun, Run, Submission
from mesh.selectors import JOB_LABEL, attempt_labels, parse_selector, run_labels
from mesh.spec import Job, job_from_data
from mesh.submission import Prepared, dry_run_answer, facts_now, prepare

NO_SUCH_CAPACITY = "NoSuchCapacity"
IDEMPOTENCY_HEADER = "Idempotency-Key"
IDEMPOTENCY_KEY_LENGTH_MAX = 255


class RunList(TypedDict):
    """Runs, oldest first."""

    runs: list[Run]


class AttemptList(TypedDict):
    """Attempts, by epoch and rank."""

    attempts: list[Attempt]


class CancelRequest(TypedDict):
    """Why, in one word (a Reason); Cancelled when left out."""

    reason: str


class Deleted(TypedDict):
    """What was deleted."""

    deleted: str


async def submit_run(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_json(request, what="a Job")
    parameters = _model_size(query)
    machines = await ask(context.service.list_machines)
    facts = facts_now(context.facts, machines)
    # up to a megabyte of environment is validated: off the loop, so that no stream stutters
    prepared = await asyncio.to_thread(lambda: prepare(job_from_data(body, source=""), facts=facts))
    if query["dryRun"]:
        nodes = max(prepared.plan.nodes, MEMBERS_MIN)
        known = await ask(lambda: context.service.list_paths(parameters, nodes))
        paths = path_estimates(prepared.plan, machines, known)
        prepared = _with_wait(prepared, why_it_would_wait(prepared.plan, machines, known))
        return web.json_response(dry_run_answer(prepared, paths=paths))
    request_id = _request_id(request, body)
    run = await ask(lambda: context.service.submit(prepared.job, prepared.plan.to_record(), request_id))
    return web.json_response(
        {"run": run, "warnings": list(prepared.warnings)},
        status=HTTPStatus.CREATED,
        headers={"Location": f"/v1/runs/{run['metadata']['name']}"},
    )


def _with_wait(prepared: Prepared, why: str | None) -> Prepared:
    """With a warning of what it would wait for, unless it has one of fewer machines or accelerators."""
    if why is None or any(warning.startswith(NO_SUCH_CAPACITY) for warning in prepared.warnings):
        return prepared
    told = f"{NO_SUCH_CAPACITY}: With the machines that there are the run will wait. {why}"
    return replace(prepared, warnings=(*prepared.warnings, told))


def _model_size(query: Query) -> float | None:
    """Of a dry run. Raises SpecError."""
    if query["modelSize"] is None:
        return None
    if not query["dryRun"]:
        raise SpecError(
            "modelSize is for a dry run: what an all-reduce takes is estimated there.", field="modelSize"
        )
    return parse_model_size(query["modelSize"])


def _request_id(request: web.Request, body: Any) -> str:
    """What makes a repeated submit one: the client's key *and* what it asks for.

    Without a key the id is fresh; it still makes our own repeats (`ask`) harmless.
    """
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return f"once-{new_run_uid()}"
    if not 0 < len(key) <= IDEMPOTENCY_KEY_LENGTH_MAX:
        raise SpecError(
            f"{IDEMPOTENCY_HEADER} has {len(key)} characters; it takes 1 to {IDEMPOTENCY_KEY_LENGTH_MAX}.",
            field=IDEMPOTENCY_HEADER,
        )
    digest = hashlib.sha256(f"{key}\n{compact_json(body)}".encode("utf-8", "surrogatepass"))
    return f"key-{digest.hexdigest()[:32]}"


async def list_runs(request: web.Request, query: Query) -> web.StreamResponse:
    selector = parse_selector(query["labelSelector"] or "")
    wanted = {key: value for key, value in selector.equalities.items() if key != JOB_LABEL}
    runs = await ask(lambda: request.app[CONTEXT].service.list_runs(wanted))
    return web.json_response({"runs": [run for run in runs if selector.selects(run_labels(run))]})


async def get_run(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    name = request.match_info["name"]
    run = await ask(lambda: context.service.get_run(name))
    last_output_at = await context.logs.last_output_at(run["metadata"]["uid"])
    for rank in run["status"]["ranks"]:
        rank["lastOutputAt"] = last_output_at.get(rank["rank"])
    return web.json_response(run)


async def cancel_run(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    reason = ""
    if await request.read():
        body = await read_json(request, what='{"reason": "Cancelled"}')
        given = body.get("reason", Reason.CANCELLED) if isinstance(body, dict) else None
        if given not in (Reason.CANCELLED, Reason.CLIENT_INTERRUPTED):
            raise SpecError(
                f"reason must be {Reason.CANCELLED} or {Reason.CLIENT_INTERRUPTED}.",
                field="reason",
                got=str(given)[:80],
            )
        reason = str(given) if given == Reason.CLIENT_INTERRUPTED else ""
    run = await ask(lambda: request.app[CONTEXT].service.cancel(name, reason))
    return web.json_response(run, status=HTTPStatus.ACCEPTED)


async def suspend_run(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    run = await ask(lambda: request.app[CONTEXT].service.suspend(name))
    return web.json_response(run, status=HTTPStatus.ACCEPTED)


async def resume_run(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    service = request.app[CONTEXT].service
    unanswered = False

    async def resume_once() -> Run:
        nonlocal unanswered
        try:
            return await service.resume(name)
        except (TransportError, MeshTimeoutError):
            unanswered = True
            raise
        except ConflictError:
            if not unanswered:
                raise
            return await service.get_run(name)  # it was the earlier, unanswered call that resumed it

    return web.json_response(await ask(resume_once), status=HTTPStatus.ACCEPTED)


async def delete_run(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    context = request.app[CONTEXT]
    service = context.service
    uid = (await ask(lambda: service.get_run(name)))["metadata"]["uid"]
    unanswered = False

    async def delete_once() -> None:
        nonlocal unanswered
        try:
            await service.delete(name)
        except (TransportError, MeshTimeoutError):
            unanswered = True
            raise
        except NotFoundError:
            if not unanswered:
                raise  # else it was the earlier, unanswered call that deleted it

    await ask(delete_once)
    await context.logs.delete(uid)
    return web.json_response({"deleted": name})


async def list_attempts(request: web.Request, query: Query) -> web.StreamResponse:
    selector = parse_selector(query["labelSelector"] or "")
    attempts = await ask(lambda: request.app[CONTEXT].service.list_attempts(selector.equalities))
    return web.json_response({"attempts": [a for a in attempts if selector.selects(attempt_labels(a))]})


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/runs",
        operation="submitRun",
        summary="Submit a Job, or with dryRun see what it would come to",
        handler=submit_run,
        parameters=(
            Parameter(name="dryRun", kind="boolean", text="Validate, resolve and estimate; create nothing."),
            Parameter(
                name="modelSize",
                kind="string",
                text="Of a dry run: parameters of a model, such as 7B. How long one all-reduce of its gradients takes "
                "over relayed and wide-area paths, by what was measured.",
            ),
        ),
        headers={
            IDEMPOTENCY_HEADER: "A repeated request, same key and same body, gets the first one's run.",
        },
        body=Job,
        answers=(
            Answer(text="The run, durably accepted.", shape=Submission, status=HTTPStatus.CREATED),
            Answer(text="With dryRun: the resolved shape, what it can cost, warnings.", shape=DryRun),
        ),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.INSUFFICIENT_STORAGE),
    ),
    Endpoint(
        method="GET",
        path="/v1/runs",
        operation="listRuns",
        summary="All runs, ended ones too, until they are deleted",
        handler=list_runs,
        parameters=(SELECTOR,),
        answers=(Answer(text="Runs.", shape=RunList),),
    ),
    Endpoint(
        method="GET",
        path="/v1/runs/{name}",
        operation="getRun",
        summary="One run",
        handler=get_run,
        answers=(Answer(text="The run.", shape=Run),),
        errors=(HTTPStatus.NOT_FOUND,),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/runs/{name}",
        operation="deleteRun",
        summary="Forget an ended run and its logs; its name is free again",
        handler=delete_run,
        answers=(Answer(text="It is gone.", shape=Deleted),),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="POST",
        path="/v1/runs/{name}/cancel",
        operation="cancelRun",
        summary="Stop a run: SIGTERM, then SIGKILL after its grace period; cancelling twice is harmless",
        handler=cancel_run,
        body=CancelRequest,
        body_required=False,
        answers=(
            Answer(
                text="The run; it has stopped when its state is final.", shape=Run, status=HTTPStatus.ACCEPTED
            ),
        ),
        errors=(HTTPStatus.NOT_FOUND,),
    ),
    Endpoint(
        method="POST",
        path="/v1/runs/{name}/suspend",
        operation="suspendRun",
        summary="Stop a run for now and give its machines back; suspending twice is harmless",
        handler=suspend_run,
        answers=(
            Answer(
                text="The run; it has stopped when its state is Suspended.",
                shape=Run,
                status=HTTPStatus.ACCEPTED,
            ),
        ),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="POST",
        path="/v1/runs/{name}/resume",
        operation="resumeRun",
        summary="Let a suspended run go on in a new epoch",
        handler=resume_run,
        answers=(Answer(text="The run, waiting for machines.", shape=Run, status=HTTPStatus.ACCEPTED),),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="GET",
        path="/v1/attempts",
        operation="listAttempts",
        summary="Every rank's part in every epoch",
        handler=list_attempts,
        parameters=(SELECTOR,),
        answers=(Answer(text="Attempts.", shape=AttemptList),),
    ),
)
