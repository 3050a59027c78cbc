"""One lab for the whole folder: a head, three machines and a spare host; every test leaves it as it found it.

Its stories are told over two paths, one lab after the other: `private`, machines that joined by their addresses, and
`direct`, machines that joined through a mesh port and reach each other by their gateways.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.net.programs import not_installed
from tests.lab.deployment import Lab, build_lab
from tests.lab.direct_deployment import DirectLab
from tests.lab.network import why_not

HOSTS = 4
JOINED = 3
ALL_VARIABLE = "LAB"
"""`all` runs the tests that are marked `soak` as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_not() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.lab)
        item.add_marker(pytest.mark.root)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "soak" in item.keywords and os.environ.get(ALL_VARIABLE) != "all":
            item.add_marker(pytest.mark.skip(reason="takes long; `make lab` runs it"))


@pytest.fixture(scope="package", params=["private", pytest.param("direct", marks=pytest.mark.soak)])
def the_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    kind = DirectLab if request.param == DirectLab.path else Lab
    lacking = not_installed() if kind is DirectLab else None
    if lacking is not None:
        pytest.skip(f"no redirect here: {lacking}")
    with build_lab(tmp_path_factory.mktemp("lab"), hosts=HOSTS, joined=JOINED, kind=kind) as lab:
        yield lab


@pytest.fixture
def lab(the_lab: Lab) -> Iterator[Lab]:
    yield the_lab
    the_lab.restore(joined=JOINED)
