"""One deployment of four machines for the whole folder; every test leaves it without an active run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.real_mesh import RealMesh, real_mesh
from tests.s3_fixture import s3_server

__all__ = ["s3_server"]


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMesh]:
    with real_mesh(tmp_path_factory.mktemp("e2e"), "--machines", "4", "--gpu", "H100:1") as mesh:
        yield mesh


@pytest.fixture
def mesh(deployment: RealMesh) -> Iterator[RealMesh]:
    yield deployment
    deployment.end_runs()
    # what a test lost (a killed machine) is made up for, so that the next one finds four
    deployment.call("POST", "/v1/machines", {"count": 4})
