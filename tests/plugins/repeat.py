"""A failure can be repeated with one printed command.

Theory of operation: one number, the session's seed, stands in the header and in the command under every failure.
A test that wants randomness takes the fixture `seed` (its own number, made of the session's and the test's name, so
that it is the same whether the test runs alone or among others). The default is 0, so that two people see the same;
`make soak` passes others. Hypothesis runs derandomized for the same reason; under `--soak` its own `--hypothesis-seed`
counts, and is repeated too.
"""

from __future__ import annotations

import shlex
import sys
import zlib
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

SOAK_EXAMPLES = 2_000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gangmesh")
    group.addoption(
        "--seed", type=int, default=0, help="the number that all randomness of the tests comes from"
    )
    group.addoption("--soak", action="store_true", help="more and other examples in property tests")


def pytest_configure(config: pytest.Config) -> None:
    soak = config.getoption("--soak")
    # No deadline: this must pass on a machine that is busy with something else.
    hypothesis.settings.register_profile(
        "gangmesh",
        deadline=None,
        derandomize=not soak,
        database=None,
        print_blob=True,
        max_examples=SOAK_EXAMPLES if soak else 100,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("gangmesh")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (all randomness comes from it; repeat with --seed)"


def repeat_command(item: pytest.Item) -> str:
    """The command that runs this one test again with the same numbers."""
    python = Path(sys.executable)
    if python.is_relative_to(item.config.rootpath):
        python = python.relative_to(item.config.rootpath)
    words = [str(python), "-m", "pytest", item.nodeid, "--seed", str(item.config.getoption("--seed"))]
    if item.config.getoption("--soak"):
        words.append("--soak")
    if (hypothesis_seed := item.config.getoption("--hypothesis-seed", None)) is not None:
        words += ["--hypothesis-seed", str(hypothesis_seed)]
    return shlex.join(words)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("repeat", repeat_command(item)))
    return report


def _seed_of(item: pytest.Item) -> int:
    return zlib.crc32(f"{item.config.getoption('--seed')}:{item.nodeid}".encode())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed, 32 bits: `random.Random(seed)`."""
    return _seed_of(request.node)
