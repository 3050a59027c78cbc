"""The part of `mesh describe` that tells how a run recovered: its epochs, what each ended of, what was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LAST_LINES_SHOWN = 5
EPOCHS_SHOWN = 20
_KINDS = {
    "failure": "for a command that failed",
    "loss": "for lost machines",
    "reclaim": "for reclaimed machines",
}
_CHARGED = {
    "Failure": "a command that failed",
    "Loss": "lost machines",
    "Reclaim": "reclaimed machines",
    "Ours": "the deployment itself",
}


def describe_progress(run: Mapping[str, Any]) -> list[str]:
    """Restarts, the newest checkpoint, the network, and how much of the time led somewhere."""
    from mesh.cli.output import age, clock, span
    from mesh.cli.terminal import printable

    status = run["status"]
    restarts, checkpoint, productive = status["restarts"], status["checkpoint"], status["productive"]
    lines = []
    if restarts["total"]:
        counted = [f"{restarts[k]} of {restarts['of']} {text}" for k, text in _KINDS.items() if restarts[k]]
        counted += [f"{restarts['ours']} that count for nothing"] if restarts["ours"] else []
        now = f"; counted now: {', '.join(counted)}" if counted else "; all of them earned back"
        lines.append(f"{'Restarts:':<14}{restarts['total']}{now}")
    if checkpoint is not None:
        step = "" if checkpoint["step"] is None else f"step {checkpoint['step']}, "
        what = f"{checkpoint['id']}, {step}{size(checkpoint['bytes'])}, {checkpoint['uri']}"
        when = f"{clock(checkpoint['at'])} ({age(checkpoint['at'])} ago)"
        lines.append(f"{'Checkpoint:':<14}{printable(what)}, committed {when}")
    if status["epochs"] and status["epochs"][-1]["network"]:
        lines.append(f"{'Network:':<14}{printable(status['epochs'][-1]['network'])}")
    if status["startedAt"] is not None:
        share = f"{productive['share']:.0%} of the time since it was submitted"
        lines.append(f"{'Productive:':<14}{span(productive['seconds'])}, {share}")
    return lines


def describe_epochs(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the epochs, and what those ended of that were not meant to end. Nothing for a single one."""
    from mesh.cli.output import PIPE_COLUMNS, clock, lay_out

    epochs = run["status"]["epochs"]
    if len(epochs) < 2:
        return []
    shown = epochs[-EPOCHS_SHOWN:]
    title = "Epochs:" if len(shown) == len(epochs) else f"Epochs (the last {len(shown)}):"
    rows = [["  EPOCH", "BEGAN", "ASSEMBLED", "STARTED", "RAN", "LOST", "STOPPED", "FROM", "ENDED OF"]]
    for epoch in shown:
        cause = epoch["cause"]
        rows.append(
            [
                f"  {epoch['epoch']}",
                clock(epoch["beganAt"]),
                _between(epoch["beganAt"], epoch["openedAt"]),
                _between(epoch["openedAt"], epoch["runningAt"]),
                _ran(epoch),
                "-" if not epoch["lostSeconds"] else _span(epoch["lostSeconds"]),
                _between(epoch["stoppedAt"], epoch["endedAt"]),
                _from(epoch),
                (epoch["reason"] or "-") if cause is None else f"{cause['reason']} (rank {cause['rank']})",
            ]
        )
    lines = [title, *lay_out(rows, PIPE_COLUMNS, [])]
    for epoch, then in zip(shown, [*shown[1:], None], strict=True):
        # the last one's cause has a section of its own
        if epoch["cause"] is not None and then is not None:
            lines += _how_it_ended(epoch, then, events)
    return lines


def _how_it_ended(
    epoch: Mapping[str, Any], then: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> list[str]:
    from mesh.cli.output import end_of
    from mesh.cli.terminal import printable

    cause = epoch["cause"]
    lines = [f"Epoch {epoch['epoch']} ended: {printable(cause['message'])}"]
    rehearsed = [e for e in events if e["kind"] == "Rehearsed" and e["epoch"] == epoch["epoch"]]
    lines += [f"  on purpose: {printable(event['message'])}" for event in rehearsed]
    if cause["exit"] is not None:
        lines.append(f"  rank {cause['rank']}'s command ended with {end_of(cause['exit'])}")
    if cause["workerExit"] is not None:
        worker = "a worker" if cause["globalRank"] is None else f"worker {cause['globalRank']}"
        lines.append(f"  {worker} ended with {end_of(cause['workerExit'])}, says the launcher's report")
    if cause["hint"] and not rehearsed:  # it would guess at what is known
        lines.append(f"  {printable(cause['hint'])}")
    if epoch["victims"]:
        lines.append(f"  {_ranks(epoch['victims'])} failed because of it")
    if cause["lastLines"]:
        lines.append("  its last lines:")
        lines += [f"    {printable(line)}" for line in cause["lastLines"][-LAST_LINES_SHOWN:]]
    if epoch["chargedTo"] is not None:
        lines.append(f"  the restart was charged to {_CHARGED.get(epoch['chargedTo'], epoch['chargedTo'])}")
    kept = f"{_ranks(then['kept'])} kept" if then["kept"] else "nobody kept"
    replaced = f", {_ranks(then['replaced'])} got another" if then["replaced"] else ""
    lines.append(f"  {kept} the machine{replaced}; epoch {then['epoch']} {_went_on(then)}")
    return lines


def _went_on(epoch: Mapping[str, Any]) -> str:
    return "had no checkpoint to restore" if epoch["restored"] is None else f"went on from {_from(epoch)}"


def _ran(epoch: Mapping[str, Any]) -> str:
    from mesh.cli.output import age

    if epoch["runningAt"] is None:
        return "-"
    return age(epoch["runningAt"], epoch["stoppedAt"] or epoch["endedAt"])


def _from(epoch: Mapping[str, Any]) -> str:
    if epoch["restored"] is None:
        return "-"
    return str(epoch["restored"]) if epoch["restoredStep"] is None else f"step {epoch['restoredStep']}"


def _between(since: float | None, until: float | None) -> str:
    return "-" if since is None or until is None else _span(until - since)


def _span(seconds: float) -> str:
    from mesh.cli.output import span

    return span(seconds)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def size(count: int) -> str:
    """Bytes for people: `1.5 MiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
