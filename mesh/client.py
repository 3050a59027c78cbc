"""The SDK: everything that the API does, async and typed. The `mesh` command has no other way in.

    async with mesh.connect() as client:
        run = (await client.submit(job))["run"]
        async for line in client.follow_logs(run["metadata"]["name"]):
            print(line["rank"], line["text"])

Every call has a time limit and raises a `MeshError`. Streams come back by themselves after a lost
connection or a restarted server, from the cursor of the last item that was given: nothing is left out and
nothing is repeated.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast
from urllib.parse import quote

from mesh.deployment import (
    AUTHORITY_VARIABLE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    DeploymentRecord,
    live_record,
    not_running,
    read_record,
    state_folder,
)
from mesh.errors import (
    AuthenticationError,
    DeploymentError,
    MeshError,
    MeshTimeoutError,
    NotFoundError,
    TransportError,
)
from mesh.http_transport import CALL_LIMIT_S, Backoff, HttpTransport, checked_url
from mesh.netcheck.limits import CHECK_CALL_LIMIT_S
from mesh.reasons import Reason
from mesh.states import HarmKind, RunState
from mesh.stream_items import event_items, item_of

if TYPE_CHECKING:
    from mesh.network_resources import NetworkReport, ProviderPath
    from mesh.resources import (
        Attempt,
        DeploymentStatus,
        DryRun,
        Event,
        Harm,
        JoinTokenFacts,
        LogLine,
        Machine,
        NewJoinToken,
        RelayedBytes,
        RelayFacts,
        RotationFacts,
        Run,
        Submission,
        VersionInfo,
    )

STREAM_PATIENCE_S = 120.0
"""How long a stream keeps trying to come back: a laptop's sleep, a server's restart."""
POLL_WAIT_S = 20.0
EVENTS_PER_POLL = 1000
GROW_LIMIT_S = 120.0
HARM_LIMIT_S = 90.0

WaitFor = Literal["running", "suspended", "ended"]


def connect(
    url: str | None = None, token: str | None = None, state: str | os.PathLike[str] | None = None
) -> MeshClient:
    """A client of one deployment; use it with `async with`.

    Args:
        url: address of the API; else `$GANGMESH_URL`; else the deployment of the state folder is used.
        token: its token; else `$GANGMESH_TOKEN`; else that in the state folder, when it is of this
        deployment. state: the state folder; else `$GANGMESH_STATE`; else `~/.gangmesh`.

    Raises:
        DeploymentError: no address is given and no deployment runs from the state folder.
        AuthenticationError: there is no token for this address.
        SpecError: the address is none.
    """
    folder = state_folder(Path(state) if state is not None else None)
    wanted = url or (os.environ.get(URL_VARIABLE) if state is None else None)
    if wanted is None:
        record = live_record(folder)
        if record is None:
            raise not_running(folder)
        return MeshClient(url=record.url, token=token or record.token, record=record, folder=folder)
    address = checked_url(wanted)
    return MeshClient(url=address, token=token or _token_for(address, folder))


def _token_for(address: str, folder: Path) -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    record = read_record(folder)
    if record is not None and record.url == address:
        return record.token
    raise AuthenticationError(
        f"There is no token for {address}.",
        hint=f"Put it into ${TOKEN_VARIABLE}; it is in deployment.json in that deployment's state folder.",
    )


def _trust(url: str) -> dict[str, Any]:
    """How the API behind a mesh port is known: by the deployment's authority, where $GANGMESH_AUTHORITY has it.

    Raises AuthenticationError when that is no authority's certificate.
    """
    path = os.environ.get(AUTHORITY_VARIABLE)
    if not path or not url.startswith("https://"):
        return {}
    from mesh.net.tls import API_NAME, authority_context

    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise AuthenticationError(
            f"${AUTHORITY_VARIABLE} names {path}, which cannot be read: {error.strerror}.",
            hint="Copy authority/bundle.pem from the deployment's state folder.",
        ) from error
    return {"tls": authority_context(pem), "tls_name": API_NAME}


class MeshClient:
    """One deployment's API. Made by `connect`."""

    def __init__(
        self, *, url: str, token: str, record: DeploymentRecord | None = None, folder: Path | None = None
    ) -> None:
        self._record = record
        self._folder = folder
        self._http = HttpTransport(url=url, token=token, fate=self._fate, **_trust(url))

    async def __aenter__(self) -> Self:
        await self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def is_local(self) -> bool:
        """True when the deployment runs on this machine, under this account."""
        return self._record is not None and self._record.local

    def _fate(self) -> MeshError | None:
        """A deployment whose process is gone does not come back under this address."""
        if self._record is None or self._record.is_alive:
            return None
        return DeploymentError(
            f"The deployment at {self.url} has ended (its process {self._record.pid} is gone).",
            hint=f"Its log is {self._folder or '~/.gangmesh'}/head.log; `mesh up` starts it again.",
            reason=Reason.DEPLOYMENT_NOT_RUNNING,
        )

    # -- runs ------------------------------------------------------------------------------------------------

    async def submit(self, job: Mapping[str, Any], *, request_id: str | None = None) -> Submission:
        """Submits a Job. Repeating with the same `request_id` and job gives the run of the first time.

        Raises:
            SpecError: the job is not acceptable; nothing was created.
            ConflictError: the name is taken.
        """
        key = request_id or secrets.token_hex(16)
        return cast(
            "Submission",
            await self._http.call("POST", "/v1/runs", body=job, headers={"Idempotency-Key": key}),
        )

    async def dry_run(self, job: Mapping[str, Any], *, model_size: str | None = None) -> DryRun:
        """What submitting this Job would come to. Creates nothing. Raises SpecError.

        `model_size` such as 7B: how long one all-reduce takes over ways that leave a trusted network.
        """
        query = {"dryRun": True, "modelSize": model_size}
        return cast("DryRun", await self._http.call("POST", "/v1/runs", query=query, body=job))

    async def get_run(self, name: str) -> Run:
        """Raises NotFoundError."""
        return cast("Run", await self._http.call("GET", _run_path(name)))

    async def list_runs(self, labels: str = "") -> list[Run]:
        """Runs that a label selector selects (`key=value,key!=value`), oldest first."""
        reply = await self._http.call("GET", "/v1/runs", query={"labelSelector": labels})
        return cast("list[Run]", reply["runs"])

    async def list_attempts(self, labels: str = "") -> list[Attempt]:
        """Attempts, by `nodus.dev/job=NAME,nodus.dev/rank=R` for example."""
        reply = await self._http.call("GET", "/v1/attempts", query={"labelSelector": labels})
        return cast("list[Attempt]", reply["attempts"])

    async def cancel(self, name: str, *, reason: Reason = Reason.CANCELLED) -> Run:
        """Asks for the run to be stopped and returns at once. Raises NotFoundError."""
        reply = await self._http.call("POST", _run_path(name) + "/cancel", body={"reason": str(reason)})
        return cast("Run", reply)

    async def suspend(self, name: str) -> Run:
        """Asks for the run to be stopped for now and returns at once. Raises NotFoundError, ConflictError."""
        return cast("Run", await self._http.call("POST", _run_path(name) + "/suspend"))

    async def resume(self, name: str) -> Run:
        """Lets a suspended run go on and returns at once. Raises NotFoundError, ConflictError."""
        return cast("Run", await self._http.call("POST", _run_path(name) + "/resume"))

    async def chaos(
        self, name: str, kind: HarmKind, rank: int, *, seconds: float | None = None, one_way: bool = False
    ) -> Harm:
        """Does a rank harm on purpose, at once, to rehearse its recovery. Raises NotFoundError, ConflictError."""
        body: dict[str, Any] = {"kind": str(kind), "rank": rank, "oneWay": one_way}
        if seconds is not None:
            body["seconds"] = seconds
        reply = await self._http.call("POST", _run_path(name) + "/chaos", body=body, limit_s=HARM_LIMIT_S)
        return cast("Harm", reply)

    async def delete(self, name: str) -> None:
        """Forgets an ended run and its logs. Raises NotFoundError, ConflictError while it is active."""
        await self._http.call("DELETE", _run_path(name))

    async def wait(self, name: str, for_: WaitFor = "ended", *, timeout_s: float | None = None) -> Run:
        """The run once all its ranks run, once it is suspended, or once it has ended, which ends every wait.

        Raises:
            MeshTimeoutError: not within `timeout_s`.
        """
        import asyncio

        try:
            async with asyncio.timeout(timeout_s):
                async for run, _ in self.watch_run(name):
                    state = RunState(run["status"]["state"])
                    if state.is_terminal or state is _STATE_FOR.get(for_):
                        break
                return run
        except TimeoutError as error:
            raise MeshTimeoutError(
                f"The run {name} is not {for_} after {timeout_s:g} s.",
                hint=f"`mesh describe {name}` says what it waits for.",
                timeout_s=timeout_s,
            ) from error

    async def watch_run(self, name: str) -> AsyncGenerator[tuple[Run, list[Event]], None]:
        """The run as it is now, then again whenever something happened, until it has ended.

        With each comes what has happened since the one before, the whole story with the first. Raises NotFoundError.
        """
        backoff = Backoff(patience_s=STREAM_PATIENCE_S)
        after = 0
        uid: str | None = None
        wait_s = 0.0
        while True:
            try:
                if uid is None:
                    uid = (await self.get_run(name))["metadata"]["uid"]
                events = await self.events(after=after, run=uid, wait_s=wait_s)
                run = await self.get_run(name)
                is_over = RunState(run["status"]["state"]).is_terminal
                if is_over and len(events) < EVENTS_PER_POLL:  # it may have ended between the two questions
                    events += await self.events(after=events[-1]["seq"] if events else after, run=uid)
            except (TransportError, MeshTimeoutError) as error:
                await backoff.pause(error)
                continue
            backoff.succeeded()
            if run["metadata"]["uid"] != uid:
                raise NotFoundError(f"The run {name} has been deleted; another run has its name now.")
            if events or is_over or wait_s == 0.0:
                yield run, events
            after = events[-1]["seq"] if events else after
            if is_over and len(events) < EVENTS_PER_POLL:
                return
            wait_s = POLL_WAIT_S

    # -- the mesh ---------------------------------------------------------------------------------------------

    async def create_token(self, *, ttl_s: float | None = None, relay: bool = False) -> NewJoinToken:
        """A token that lets one machine join, or one relay start, once, within 15 minutes when nothing is said.

        Raises SpecError; DeploymentError where there is no mesh port.
        """
        body: dict[str, Any] = {"relay": relay} | ({} if ttl_s is None else {"ttlSeconds": ttl_s})
        return cast("NewJoinToken", await self._http.call("POST", "/v1/tokens", body=body))

    async def list_tokens(self) -> list[JoinTokenFacts]:
        """The join tokens that were made, without their secrets. Raises DeploymentError where there is no mesh port."""
        return cast("list[JoinTokenFacts]", (await self._http.call("GET", "/v1/tokens"))["tokens"])

    async def revoke_token(self, token_id: str) -> JoinTokenFacts:
        """Nobody joins with it any more. Raises NotFoundError, ConflictError when somebody has."""
        reply = await self._http.call("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
        return cast("JoinTokenFacts", reply)

    async def authority(self) -> RotationFacts:
        """Whom the machines of the mesh trust. Raises DeploymentError where there is no mesh port."""
        return cast("RotationFacts", await self._http.call("GET", "/v1/authority/rotation"))

    async def rotate_authority(self, *, overlap_s: float | None = None) -> RotationFacts:
        """Begins to replace the certificate authority; it signs after the overlap, 7 days when nothing is said.

        Raises SpecError; ConflictError while a rotation is under way; DeploymentError where there is no mesh port.
        """
        body = {} if overlap_s is None else {"overlapSeconds": overlap_s}
        return cast("RotationFacts", await self._http.call("POST", "/v1/authority/rotation", body=body))

    # -- relays ----------------------------------------------------------------------------------------------

    async def list_relays(self) -> list[RelayFacts]:
        """The relays of the deployment, the head's own first. Raises DeploymentError where there is no mesh port."""
        return cast("list[RelayFacts]", (await self._http.call("GET", "/v1/relays"))["relays"])

    async def list_relayed(self, run: str | None = None) -> list[RelayedBytes]:
        """Bytes that relays have carried, of the run with this uid or of all. Raises as `list_relays`."""
        query = {} if run is None else {"run": run}
        reply = await self._http.call("GET", "/v1/relayed", query=query)
        return cast("list[RelayedBytes]", reply["relayed"])

    async def remove_relay(self, name: str) -> None:
        """Nobody uses or believes this relay any more. Raises NotFoundError."""
        await self._http.call("DELETE", f"/v1/relays/{quote(name, safe='')}")

    # -- what goes on ----------------------------------------------------------------------------------------

    async def events(
        self,
        *,
        after: int = 0,
        run: str | None = None,
        labels: str = "",
        limit: int = EVENTS_PER_POLL,
        wait_s: float = 0.0,
    ) -> list[Event]:
        """At most `limit` events behind `after`; waits up to `wait_s` for the first one."""
        query = {"after": after, "run": run, "labelSelector": labels, "limit": limit, "wait": wait_s}
        reply = await self._http.call("GET", "/v1/events", query=query, limit_s=CALL_LIMIT_S + wait_s)
        return cast("list[Event]", reply["events"])

    async def list_events(self, *, run: str | None = None, labels: str = "") -> list[Event]:
        """Every event so far that a label selector selects, oldest first."""
        found: list[Event] = []
        after = 0
        while True:
            query = {"after": after, "run": run, "labelSelector": labels, "limit": EVENTS_PER_POLL}
            reply = await self._http.call("GET", "/v1/events", query=query)
            found.extend(reply["events"])
            if reply["next"] == after:
                return found
            after = reply["next"]

    async def watch_events(
        self, *, after: int = 0, run: str | None = None, labels: str = ""
    ) -> AsyncGenerator[Event, None]:
        """Events behind `after`, those to come too. Ends only with an error."""
        query = {"run": run, "labelSelector": labels}
        backoff = Backoff(patience_s=STREAM_PATIENCE_S)
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            try:
                async with self._http.stream("/v1/events", query=query, headers=headers) as stream:
                    async for data in event_items(stream, backoff):
                        after = data["seq"]
                        yield cast("Event", data)
                await backoff.pause(TransportError("The server ended the stream of events."))
            except (TransportError, MeshTimeoutError) as error:
                await backoff.pause(error)

    async def logs(
        self, name: str, *, rank: int | None = None, epoch: int | None = None, tail: int | None = None
    ) -> AsyncGenerator[LogLine, None]:
        """What has been printed so far, all ranks merged by time. Raises NotFoundError."""
        async for line in self._lines(name, rank=rank, epoch=epoch, tail=tail, cursor=None, follow=False):
            yield line

    async def follow_logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        epoch: int | None = None,
        tail: int | None = None,
        cursor: str | None = None,
    ) -> AsyncGenerator[LogLine, None]:
        """What has been and will be printed; ends when the run has ended and all of it was given.

        `cursor` is that of the last line seen, to go on behind it. A line that is `partial` is a preview of
        one that has not ended; the whole line follows.
        """
        async for line in self._lines(name, rank=rank, epoch=epoch, tail=tail, cursor=cursor, follow=True):
            yield line

    async def _lines(
        self,
        name: str,
        *,
        rank: int | None,
        epoch: int | None,
        tail: int | None,
        cursor: str | None,
        follow: bool,
    ) -> AsyncGenerator[LogLine, None]:
        backoff = Backoff(patience_s=STREAM_PATIENCE_S)
        uid: str | None = None
        while True:
            query = {"rank": rank, "epoch": epoch, "follow": follow or None, "cursor": cursor, "uid": uid}
            if cursor is None:
                query["tail"] = tail
            try:
                async with self._http.stream(_run_path(name) + "/logs", query=query) as stream:
                    uid = stream.headers.get("X-Run-Uid", uid)
                    async for line in stream.lines():
                        backoff.succeeded()
                        if not line:
                            continue  # a heartbeat
                        item = item_of(line)
                        if "error" in item:
                            raise MeshError.from_wire(item["error"])
                        cursor = item["cursor"]
                        yield cast("LogLine", item)
                return
            except (TransportError, MeshTimeoutError) as error:
                await backoff.pause(error)

    async def raw_log(self, name: str, *, rank: int, epoch: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes that one rank printed, exactly; of the current epoch unless another is named."""
        query = {"rank": rank, "epoch": epoch}
        async with self._http.stream(_run_path(name) + "/logs/raw", query=query) as stream:
            async for chunk in stream.chunks():
                yield chunk

    # -- the deployment --------------------------------------------------------------------------------------

    async def check_network(self, *, machines: Sequence[str] = (), nodes: int | None = None) -> NetworkReport:
        """Measures the network between free machines: these, or all; of them `nodes`. Takes seconds.

        Raises:
            NotFoundError: there is no such machine.
            ConflictError: one is in use or lost, there are too few or too many, or another check is under way.
        """
        body = {"machines": list(machines), "nodes": nodes}
        limit_s = CALL_LIMIT_S + CHECK_CALL_LIMIT_S
        return cast(
            "NetworkReport", await self._http.call("POST", "/v1/network/check", body=body, limit_s=limit_s)
        )

    async def list_paths(
        self, *, model_size: str | None = None, nodes: int | None = None
    ) -> list[ProviderPath]:
        """What all checks have shown, by pairs of providers; for a model (`7B`) with the length of an all-reduce."""
        reply = await self._http.call("GET", "/v1/paths", query={"modelSize": model_size, "nodes": nodes})
        return cast("list[ProviderPath]", reply["paths"])

    async def list_machines(self, labels: str = "") -> list[Machine]:
        """Machines that a label selector selects, by name."""
        reply = await self._http.call("GET", "/v1/machines", query={"labelSelector": labels})
        return cast("list[Machine]", reply["machines"])

    async def grow(self, count: int) -> list[Machine]:
        """Brings a local deployment to at least `count` machines and returns all of them."""
        reply = await self._http.call("POST", "/v1/machines", body={"count": count}, limit_s=GROW_LIMIT_S)
        return cast("list[Machine]", reply["machines"])

    async def reclaim(self, machine: str, *, grace_s: float = 120.0, message: str = "") -> Machine:
        """A notice that the machine goes away: whoever has it saves and leaves, nobody gets it any more.

        Returns at once. Raises NotFoundError.
        """
        path = "/v1/machines/" + quote(machine, safe="") + "/reclaim"
        body = {"graceSeconds": grace_s, "message": message}
        return cast("Machine", await self._http.call("POST", path, body=body))

    async def status(self) -> DeploymentStatus:
        """The deployment as a whole."""
        return cast("DeploymentStatus", await self._http.call("GET", "/v1/status"))

    async def version(self) -> VersionInfo:
        """The server's version and the API's."""
        return cast("VersionInfo", await self._http.call("GET", "/v1/version"))

    async def openapi(self) -> dict[str, Any]:
        """The API's OpenAPI document."""
        return cast("dict[str, Any]", await self._http.call("GET", "/v1/openapi.json"))


_STATE_FOR = {"running": RunState.RUNNING, "suspended": RunState.SUSPENDED}


def _run_path(name: str) -> str:
    return "/v1/runs/" + quote(name, safe="")
