"""The key with which a join token is used: the same one until the head's answer has come.

The head binds a token to the first key that it was used with. So who asked, and did not hear the answer, asks again
with the same token and the same key (mesh/net/tokens.py), also as another process.
"""

from __future__ import annotations

import json
from pathlib import Path

from mesh.net.authority import new_key_pem
from mesh.net.tokens import JoinToken
from mesh.private_files import write_private

FILE_NAME = "join-key.json"


def join_key(folder: Path, token: JoinToken) -> bytes:
    """PEM; on disk when it returns, for its owner only. Blocking. Raises OSError."""
    path = folder / FILE_NAME
    try:
        kept = json.loads(path.read_text(encoding="ascii"))
        if kept["token"] == token.id:
            return str(kept["key"]).encode()
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or one that a crash has cut off
        pass
    key = new_key_pem()
    write_private(path, json.dumps({"token": token.id, "key": key.decode()}))
    return key


def forget_join_key(folder: Path) -> None:
    """The answer has come, and is on disk. Raises OSError."""
    (folder / FILE_NAME).unlink(missing_ok=True)
