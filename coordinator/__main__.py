"""`python -m coordinator serve`: the head process of a local deployment.

Rules of this file:
1. The user's environment is kept as it was and replaced by a clean one before Ray is imported: Ray reads it then.
2. Whoever starts the head is told on `--ready-fd`, one JSON object a line: `{"stage": …}` any number of times, then
   `{"ready": true, "url": …}` or `{"error": …}`. The exit code is 0 after a stop that was asked for, 1 otherwise.
3. When Ray was lost, the process replaces itself by a fresh one (same pid, same port, same record), a few times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

RESTARTS_MAX = 3
RESTARTS_WITHIN_S = 900.0
RESTARTS_VARIABLE = "GANGMESH_HEAD_RESTARTS"
"""When this process began again before: seconds since 1970, with commas."""

_log = logging.getLogger("coordinator")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator",
        description="The parts of gangmesh that decide. People use `mesh up` and `mesh down`, which call this.",
    )
    serve = parser.add_subparsers(dest="command", required=True).add_parser(
        "serve",
        help="run the head process of a local deployment until SIGTERM or SIGINT",
        description="Starts Ray, simulated machines, the coordinator, the rendezvous store, the log sink and the REST "
        "API on this host, and serves until SIGTERM or SIGINT. Then every run is cancelled and fenced, and all "
        "of it is taken down. Everything is kept in the state folder.",
    )
    serve.add_argument(
        "--state", metavar="DIR", help="state folder (default: $GANGMESH_STATE, else ~/.gangmesh)"
    )
    serve.add_argument(
        "--machines",
        metavar="N",
        type=int,
        help="simulated machines, 1 to 64 (default: 2; none with --listen or --address)",
    )
    serve.add_argument(
        "--address",
        metavar="ADDRESS",
        help="let machines join from elsewhere: the IPv4 address of this host at which they reach it. Ray, the store, "
        "the log sink and the API listen there, Ray on every interface, all of it unencrypted: for a network in "
        "which everybody may be trusted",
    )
    serve.add_argument(
        "--gpu",
        metavar="TYPE:COUNT",
        help="accelerators that every machine declares, such as H100:8; they are simulated",
    )
    serve.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        help="let machines join from anywhere by `mesh join`, through this one port: TLS 1.3 with certificates on both "
        "sides. Needs root and nftables",
    )
    serve.add_argument(
        "--api",
        metavar="HOST:PORT",
        help="where the plain REST API listens; port 0 takes a free one (default: 127.0.0.1:0, or port 0 of --address)",
    )
    serve.add_argument(
        "--db",
        metavar="URL",
        help="the journal's database, sqlite or postgresql (default: $GANGMESH_DB, where others cannot read a "
        "password, else journal.db in the state folder)",
    )
    serve.add_argument(
        "--allow-chaos",
        action="store_true",
        help="ranks may be harmed on purpose (mesh chaos), with --address too",
    )
    serve.add_argument(
        "--checkpoints",
        metavar="URL",
        help="where gang checkpoints are kept, any store that fsspec knows; every machine has to reach it (default: "
        "$GANGMESH_CHECKPOINTS, else a folder beside the state of a deployment on this host, none with --address)",
    )
    serve.add_argument(
        "--ready-fd",
        metavar="FD",
        type=int,
        help="file descriptor for progress, one JSON object a line; closed when ready or failed",
    )
    serve.add_argument(
        "--foreground",
        action="store_true",
        help="stay in the terminal and log there (for systemd, containers and debugging); otherwise the "
        "process makes a session of its own and logs to head.log in the state folder",
    )
    return parser


class Teller:
    """Writes progress to `--ready-fd`. A reader that has gone away is no reason to stop."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def __call__(self, news: Mapping[str, Any]) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps(news).encode() + b"\n")
            if "ready" in news or "error" in news:
                os.close(self._descriptor)
                self._descriptor = None
        except OSError:
            self._descriptor = None


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    tell = Teller(options.ready_fd)
    try:
        from agents.shadow_check import advice, shadowed_packages
    except ImportError as error:
        tell({"error": _plain_error("PackageShadowed", f"'agents' is another package's: {error}.")})
        return _fail(f"'agents' is another package's: {error}")
    if problems := shadowed_packages():
        tell({"error": _plain_error("PackageShadowed", advice(problems))})
        return _fail(advice(problems))
    return _serve(options, given, tell)


def _serve(options: argparse.Namespace, given: list[str], tell: Teller) -> int:
    from coordinator.deployment import claim
    from mesh.deployment import state_folder
    from mesh.errors import InternalError, MeshError

    original = dict(os.environ)
    restart: tuple[list[str], dict[str, str]] | None = None
    try:
        with claim(state_folder(options.state)) as state:
            restart = _serve_claimed(options, given, tell, state, original)
    except MeshError as error:
        tell({"error": error.to_wire()})
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the guard: whoever waits must be told
        _log.exception("the head failed")
        tell({"error": InternalError(f"The head process failed: {type(error).__name__}: {error}.").to_wire()})
        return 1
    if restart is not None:
        os.execve(sys.executable, *restart)
    return 0


def _serve_claimed(
    options: argparse.Namespace, given: list[str], tell: Teller, state: Any, original: dict[str, str]
) -> tuple[list[str], dict[str, str]] | None:
    """One life; the command and environment of the next one when there shall be one."""
    from agents import ray_environment
    from agents.child import become_subreaper
    from agents.mesh_ports import free_ports
    from agents.orphans import OrphanReaper
    from agents.raylet import LOOPBACK
    from coordinator import daemon
    from coordinator.deployment import MACHINES_MAX, GpuShape
    from coordinator.listen import bind, checked_address, listen_default, mesh_listen, parse_listen, url_of
    from mesh.deployment import CHECKPOINTS_VARIABLE, DB_VARIABLE
    from mesh.net.overlay import HEAD_NUMBER, machine_overlay
    from mesh.own_source import source_folder

    machines, address = _checked_machines(options.machines, MACHINES_MAX), LOOPBACK
    if options.address is not None:
        machines, address = 0, checked_address(options.address, has_machines=options.machines is not None)
    mesh_port = None
    if options.listen is not None:
        mesh_port = mesh_listen(
            options.listen,
            has_machines=options.machines is not None,
            has_address=options.address is not None,
        )
        machines, address = 0, machine_overlay(HEAD_NUMBER)[0]
    gpu = GpuShape.parse(options.gpu) if options.gpu else None
    db = options.db or original.get(DB_VARIABLE)
    if db:
        from coordinator.journal.sql import journal_url

        journal_url(db)
    listener = bind(*parse_listen(options.api or listen_default(LOOPBACK if mesh_port else address)))
    log = daemon.HeadLog(state.head_log)
    if not options.foreground:
        daemon.leave_terminal()
        log.open()
    become_subreaper()
    state.prepare()
    given_checkpoints = options.checkpoints or original.get(CHECKPOINTS_VARIABLE)
    checkpoints = _checkpoints_url(
        given_checkpoints,
        default=f"file://{state.checkpoints}" if address == LOOPBACK else None,
    )
    os.chdir(state.ray)  # Ray puts the driver's folder on its workers' path: let it be one without packages

    source = source_folder()
    state.secret("ray-token")
    clean = ray_environment.ray_environment(
        original, token_file=state.path / "ray-token", deployment_id=state.deployment_id, source=source
    )
    os.environ.clear()
    os.environ.update(clean)
    reaper = OrphanReaper()

    def keep_house() -> None:
        reaper.look()
        if not options.foreground:
            log.rotate()

    from coordinator.head import HeadSettings, MeshSettings, Outcome

    settings = HeadSettings(
        machines=machines,
        address=address,
        mesh=MeshSettings(listen=mesh_port, ports=free_ports()) if mesh_port else None,
        gpu=gpu,
        db=db,
        allows_chaos=options.allow_chaos,
        checkpoints=checkpoints,
        started_with=_started_with(options, db=db, checkpoints=given_checkpoints and checkpoints),
        user_environment=ray_environment.user_environment(original, source=source),
        ray_environment=clean,
    )
    # Not `asyncio.run`: at its end it waits for threads, and a call into a Ray that is lost may never return.
    url = url_of(listener)
    outcome = asyncio.new_event_loop().run_until_complete(_run(state, settings, listener, tell, keep_house))
    if outcome is not Outcome.RESTART:
        return None
    return _next_life(given, url, original)


def _started_with(options: argparse.Namespace, *, db: str | None, checkpoints: str | None) -> dict[str, str]:
    """What `mesh up` was given and cannot change while the head runs, to be said and compared."""
    from mesh.deployment import without_password

    given = {
        "--listen": options.listen,
        "--address": options.address,
        "--gpu": options.gpu,
        "--api": options.api,
        "--db": without_password(db) if db else None,
        "--checkpoints": checkpoints,
        "--allow-chaos": "" if options.allow_chaos else None,
    }
    return {flag: value for flag, value in given.items() if value is not None}


def _checkpoints_url(given: str | None, *, default: str | None) -> str | None:
    """What was asked for is tried before anything else is started. Raises CheckpointStoreError."""
    if not given:
        return default
    from coordinator.checkpoint_store import CheckpointStore

    store = CheckpointStore(given)
    store.check_now()
    return store.url


def _checked_machines(given: int | None, largest: int) -> int:
    from mesh.errors import SpecError

    count = 2 if given is None else given
    if not 1 <= count <= largest:
        raise SpecError(f"--machines takes 1 to {largest}; got {count}.", field="--machines", got=str(count))
    return count


async def _run(state: Any, settings: Any, listener: Any, tell: Teller, keep_house: Any) -> Any:
    from coordinator.head import Head
    from coordinator.head_parts import RayActors, SinkLogs

    loop = asyncio.get_running_loop()
    ports = settings.mesh.ports if settings.mesh is not None else None

    def catch_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, head.stop, signal.Signals(number).name)
        # A handler, not SIG_IGN: ignoring would be inherited by everything that is started.
        loop.add_signal_handler(signal.SIGHUP, _log.info, "the terminal is gone; going on")

    head = Head(
        state=state,
        settings=settings,
        listener=listener,
        logs=SinkLogs(settings.address, ports.logs if ports else 0),
        actors=RayActors(settings.address, ports.store if ports else None),
        tell=tell,
        housekeeping=keep_house,
        catch_signals=catch_signals,
    )
    catch_signals()
    return await head.run()


def _next_life(
    given: list[str], url: str, original: Mapping[str, str]
) -> tuple[list[str], dict[str, str]] | None:
    """None when it has begun again too often."""
    from mesh.errors import DeploymentError

    now = time.time()
    earlier = [float(t) for t in original.get(RESTARTS_VARIABLE, "").split(",") if t]
    recent = [t for t in earlier if now - t < RESTARTS_WITHIN_S]
    if len(recent) >= RESTARTS_MAX:
        raise DeploymentError(
            f"Ray was lost {len(recent) + 1} times within {RESTARTS_WITHIN_S / 60:g} minutes; giving up.",
            hint="The reason is in head.log and in the ray folder beside it.",
        )
    interpreter = sys.orig_argv[1 : len(sys.orig_argv) - len(given)]
    command = [
        sys.executable,
        *interpreter,
        *_without_ready_fd(given),
        "--api",
        url.removeprefix("http://"),
    ]
    times = ",".join(f"{t:.0f}" for t in [*recent, now])
    return command, {**original, RESTARTS_VARIABLE: times}


def _without_ready_fd(given: list[str]) -> list[str]:
    kept, skip = [], False
    for word in given:
        if skip:
            skip = False
        elif word == "--ready-fd":
            skip = True
        elif not word.startswith("--ready-fd="):
            kept.append(word)
    return kept


def _plain_error(reason: str, message: str) -> dict[str, Any]:
    """As `MeshError.to_wire`, for when our own packages cannot be trusted."""
    return {"error": "DeploymentError", "reason": reason, "message": message, "hint": "", "details": {}}


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # see _serve_claimed: threads may be stuck, and everything of ours is down
