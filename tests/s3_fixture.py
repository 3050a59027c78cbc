"""A fixture: a real S3 server on this host (moto's), with conditional writes, for checkpoint stores.

A folder's conftest has it by `from tests.s3_fixture import s3_server`.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.blob_store import BlobStore

STOP_LIMIT_S = 20.0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Its URL."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("s3_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    with server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.stdin.close()
        assert server.wait(STOP_LIMIT_S) == 0


def s3_environment(server: str) -> dict[str, str]:
    """What tells any program that speaks S3 to go to this server."""
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def s3_store(server: str) -> BlobStore:
    """In a bucket of its own."""
    options = {"endpoint_url": server, "key": "test", "secret": "test"}
    return BlobStore(f"s3://{new_bucket(server)}/sto re", options=options)


def new_bucket(server: str) -> str:
    """Its name."""
    name = f"b{secrets.token_hex(8)}"
    with urllib.request.urlopen(
        urllib.request.Request(f"{server}/{name}", method="PUT"), timeout=STOP_LIMIT_S
    ):
        return name
