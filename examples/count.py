"""Counts, once a second, and goes on from where it was: what to rehearse a recovery with. Needs nothing but Python.

It keeps its count in the rank's state directory, written under another name and renamed, so that whoever reads it finds
a whole one.
"""

import os
import time
from pathlib import Path

saved = Path(os.environ["NODUS_STATE_DIR"]) / "count"
count = int(saved.read_text()) if saved.exists() else 0
print(f"epoch {os.environ['NODUS_GANG_EPOCH']}: going on from {count}", flush=True)
while count < 600:
    time.sleep(1)
    count += 1
    draft = saved.with_suffix(".tmp")
    draft.write_text(str(count))
    draft.replace(saved)
    print(f"counted to {count}", flush=True)
