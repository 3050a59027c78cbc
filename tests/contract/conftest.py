"""An S3 server of this host, for the checkpoint stores' suites."""

from __future__ import annotations

from tests.s3_fixture import s3_server

__all__ = ["s3_server"]
