"""Counts, once a second, and goes on from where it was: what to rehearse a recovery with. Needs nothing but Python.

Every five counts it saves into the rank's state directory, under a name that says the step, and keeps the last three. Each
file is written under another name and renamed, so that whoever reads it finds a whole one.
"""

import os
import time
from pathlib import Path

folder = Path(os.environ["NODUS_STATE_DIR"])
saved = sorted(folder.glob("step-*"))
count = int(saved[-1].read_text()) if saved else 0
print(f"epoch {os.environ['NODUS_GANG_EPOCH']}: going on from {count}", flush=True)
while count < 600:
    time.sleep(1)
    count += 1
    print(f"counted to {count}", flush=True)
    if count % 5 == 0:
        draft = folder / "draft"
        draft.write_text(str(count))
        draft.replace(folder / f"step-{count:04d}")
        for old in sorted(folder.glob("step-*"))[:-3]:
            old.unlink()
