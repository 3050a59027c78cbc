"""The documents say the truth about what can be checked: paths, commands, tables, variables, exit codes."""

from __future__ import annotations

import ast
import hashlib
import re
from itertools import product
from pathlib import Path

import click
import pytest
import typer

from agents.launcher.torchrun import ERROR_FILE_VARIABLE
from coordinator.api.app import ENDPOINTS
from mesh.cli.app import app
from mesh.cli.exit_codes import TABLE, ExitCode
from mesh.contract import rank_environment
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.spec import parse_job
from mesh.states import LauncherKind, RunState, Transport

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])
PLACES = "mesh|agents|coordinator|tests|docs|examples|tools|deploy"
TRAIN_SHA256 = "ff2ef76e2b56aa8406cc72098d468feea2f86c20e3955fafac677b2d577c178d"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def table_rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = text.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_path_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{PLACES})/[\w./-]*)`", text))
    missing = sorted(path for path in named if not (ROOT / path).exists())
    links = {target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    missing += sorted(link for link in links if link and not (document.parent / link).exists())
    assert missing == []


def test_every_file_on_the_map_of_the_code_is_there() -> None:
    [block] = [b for b in fences(text_of("CONTRIBUTING.md"), "") if b.startswith("mesh/")]
    package, missing = "", []
    for line in block.splitlines():
        if not line.startswith(" "):
            package = line.split("/")[0]
        for name in re.findall(r"\b(\w+\.py|\w+/)(?=[\s:;.]|$)", line):
            bare = name.rstrip("/")
            known = bare == package or (ROOT / bare).exists() or any((ROOT / package).rglob(bare))
            if not known:
                missing.append(f"{package}/{name}")
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_make_target_that_a_document_names_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )(?:[A-Z_]+=\S+ )*make ([a-z]+)", document.read_text(encoding="utf-8")))
    assert named - targets == set()


def test_the_makefile_lists_every_target_in_its_help() -> None:
    makefile = text_of("Makefile")
    targets = set(re.findall(r"^([a-z]+):(?!=)", makefile, flags=re.MULTILINE))
    assert targets == set(re.findall(r"^([a-z]+):.*## ", makefile, flags=re.MULTILINE))


def test_the_readme_s_exit_codes_are_those_of_the_program() -> None:
    rows = table_rows(text_of("README.md"), "Exit codes")
    assert {int(code) for code, _ in rows} == {int(code) for code in ExitCode}
    said = {int(code): meaning.replace("\\|", "|") for code, meaning in rows}
    in_help = dict(re.findall(r"^    (\d+) +(.+)$", TABLE, flags=re.MULTILINE))
    assert {str(code): meaning for code, meaning in said.items()} == in_help


def test_the_readme_s_states_are_those_of_a_run() -> None:
    named = {
        name for row in table_rows(text_of("README.md"), "States of a run") for name in row[0].split(", ")
    }
    assert named == {str(state) for state in RunState}


def test_the_api_s_page_names_every_endpoint_and_no_other() -> None:
    served = {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}
    named = set(re.findall(r"`((?:GET|POST|DELETE|PUT|PATCH) /v1/[^`?]*)`", text_of("docs/api.md")))
    assert named == served


def test_the_command_line_s_page_names_every_command_and_every_option() -> None:
    program = typer.main.get_command(app)
    assert isinstance(program, click.Group | typer.core.TyperGroup)
    page = text_of("docs/cli.md")
    missing = [name for name in program.commands if f"`mesh {name}" not in page]
    for command in [program, *program.commands.values()]:
        names = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
        missing += [f"{command.name} {name}" for name in names if not re.search(rf"`{name}[`/ ]", page)]
    assert missing == []
    options = {
        name for command in [program, *program.commands.values()] for p in command.params for name in p.opts
    }
    assert set(re.findall(r"`(--[a-z-]+)", page)) - options - {"--help"} == set()


def every_variable() -> set[str]:
    names = {ERROR_FILE_VARIABLE}  # the launchers' own
    launchers = (LauncherKind.PLAIN, LauncherKind.TORCHRUN)
    for launcher, nodes, transport in product(launchers, (1, 2), Transport):
        names |= rank_environment(
            plan=RunPlan(name=RunName("r"), command=("x",), launcher=launcher, nodes=nodes),
            incarnation=Incarnation(
                run_uid=RunUid("u"), epoch=Epoch(1), rank=Rank(0), token=IncarnationToken("t")
            ),
            addresses=["127.0.0.2", "127.0.0.3"][:nodes],
            master_port=29500,
            transport=transport,
            state_dir="/s",
            interface="lo",
            restore_uri="file:///c",
        ).keys()
    return names


def test_the_contract_s_page_names_every_variable_and_no_other() -> None:
    page = text_of("docs/contract.md")
    names = every_variable()
    assert {name for name in names if f"`{name}`" not in page} == set()
    in_tables = {
        n
        for line in page.splitlines()
        if line.startswith("| `")
        for n in re.findall(r"`([A-Z_]+)`", line.split("|")[1])
    }
    assert in_tables - names == set()


def test_the_readme_s_contract_names_only_what_a_rank_gets() -> None:
    rows = table_rows(text_of("README.md"), "What your command gets")
    named = {name for row in rows for name in re.findall(r"`([A-Z_]+\*?)`", row[0])}
    assert {n for n in named if not n.endswith("*")} - every_variable() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_in_a_document_is_python(document: Path) -> None:
    for block in fences(document.read_text(encoding="utf-8"), "python"):
        compile(block, str(document), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_example_job_is_a_job() -> None:
    job = parse_job(text_of("examples/job.yaml"), source="job.yaml")
    assert job.spec.distributed.nodes == 2


def test_the_documents_own_script_stays_word_for_word() -> None:
    assert hashlib.sha256((ROOT / "examples/train.py").read_bytes()).hexdigest() == TRAIN_SHA256


def test_no_document_is_without_a_way_to_it() -> None:
    linked = "".join(text_of(name) for name in ("README.md", "CONTRIBUTING.md"))
    linked += text_of("examples/README.md")
    lost = [d.name for d in (ROOT / "docs").glob("*.md") if f"docs/{d.name}" not in linked]
    lost += [e.name for e in (ROOT / "examples").iterdir() if e.is_file() and e.name not in linked]
    assert lost == []
