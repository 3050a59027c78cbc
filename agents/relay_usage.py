"""What a relay has carried, into the log of its process: what is billed can be added up from there."""

from __future__ import annotations

import json
import logging

from mesh.net.relay import Relay

USAGE_EVERY_S = 60.0
_log = logging.getLogger(__name__)


def write_usage(relay: Relay) -> None:
    """What has passed since the last time, for each run and pair of machines, as one JSON object each."""
    for pair, amount in relay.book.take_usage().items():
        words = {"run": pair.run, "from": pair.dialler, "to": pair.target, "bytes": amount}
        _log.info("relayed %s", json.dumps(words))
