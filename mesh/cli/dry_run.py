"""What a dry run prints."""

from __future__ import annotations

from mesh.cli.options import OutputFormat
from mesh.cli.output import print_document, span
from mesh.cli.terminal import Terminal, printable
from mesh.netcheck.words import length, rate, round_trip
from mesh.network_resources import PathEstimate
from mesh.resources import DryRun


def print_dry_run(
    terminal: Terminal, answer: DryRun, output: OutputFormat, *, model_size: str | None = None
) -> None:
    """Shape, cost, bound and warnings; the warnings go to stderr, as those of a real run do."""
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, answer, output)
        return
    topology, estimate = answer["topology"], answer["estimate"]
    job = answer["job"]
    gpus = f", {topology['gpusPerNode']} GPUs each" if topology["gpusPerNode"] else ""
    machines = "1 machine" if topology["nodes"] == 1 else f"{topology['nodes']} machines"
    processes = topology["worldSize"]
    bound = f"{estimate['assemblyTries']} tries, at most {span(estimate['assemblyBoundSeconds'])} in all"
    rows = [
        ("run", str(job["metadata"]["name"])),
        ("command", " ".join(map(str, job["spec"]["command"]))),
        ("topology", f"{machines}{gpus}, world size {processes}"),
        ("launcher", str(job["spec"]["distributed"]["launcher"])),
        ("rate", f"{estimate['ratePerHourUSD']:.2f} USD per hour"),
        ("gangHoldUSD", f"{estimate['gangHoldUSD']:.2f}"),
        ("assembly bound", f"{estimate['assemblyBoundUSD']:.2f} USD ({bound})"),
    ]
    if estimate["note"]:
        rows.append(("", estimate["note"]))
    rows += _all_reduces(answer, model_size)
    for title, text in rows:
        terminal.out(f"{title:<16}{printable(text)}")
    terminal.out("Nothing was created.")
    for warning in answer["warnings"]:
        terminal.warn(warning)


def _all_reduces(answer: DryRun, model_size: str | None) -> list[tuple[str, str]]:
    """One line for each way that leaves a trusted network; one that says so when there is none."""
    nodes = answer["topology"]["nodes"]
    found = [_all_reduce(path, nodes, model_size) for path in answer["paths"]]
    if not found and model_size is not None:
        found = ["no relayed or wide-area path between the members"]
    return [("all-reduce" if place == 0 else "", text) for place, text in enumerate(found)]


def _all_reduce(path: PathEstimate, nodes: int, model_size: str | None) -> str:
    way = f"{path['path']} {_between(*path['providers'])}"
    if path["bytesPerSecond"] is None:
        return f"{way}: never measured, so nothing is estimated; mesh check measures it"
    measured = rate(path["bytesPerSecond"])
    if path["roundTripSeconds"] is not None:
        measured += f", round trip {round_trip(path['roundTripSeconds'])}"
    if path["measuredOver"] != path["path"]:
        measured += f", measured as {path['measuredOver']}"
    if path["allReduceSeconds"] is None:
        return f"{way}: {measured}; --model-size 7B says how long one takes"
    took = f"{length(path['allReduceSeconds'])} for {model_size} on {nodes} machines"
    return f"{way}: {took} ({measured})"


def _between(one: str, other: str) -> str:
    if one == other:
        return f"within {one}" if one else "between machines without a provider"
    return f"between {one or 'machines without a provider'} and {other}"
