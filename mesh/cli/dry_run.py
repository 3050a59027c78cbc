"""What a dry run prints."""

from __future__ import annotations

from mesh.cli.options import OutputFormat
from mesh.cli.output import print_document, span
from mesh.cli.terminal import Terminal, printable
from mesh.resources import DryRun


def print_dry_run(terminal: Terminal, answer: DryRun, output: OutputFormat) -> None:
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
    for title, text in rows:
        terminal.out(f"{title:<16}{printable(text)}")
    if estimate["note"]:
        terminal.out(f"{'':<16}{printable(estimate['note'])}")
    terminal.out("Nothing was created.")
    for warning in answer["warnings"]:
        terminal.warn(warning)
