"""Every transcript is reproduced word for word.

After a wanted change: `GANGMESH_REWRITE_TRANSCRIPTS=1 pytest tests/scenarios`, then read the difference.
"""

import os
from pathlib import Path

import pytest

from tests.scenarios.transcript import replay, transcripts


@pytest.mark.parametrize("path", transcripts(), ids=lambda p: p.stem)
def test_the_core_answers_as_the_transcript_says(path: Path) -> None:
    told = path.read_text()
    answered = replay(told)
    if os.environ.get("GANGMESH_REWRITE_TRANSCRIPTS"):
        path.write_text(answered)
    else:
        assert answered == told
