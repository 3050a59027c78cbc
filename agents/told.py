"""What is said in the log of an agent and also to whoever has started it as a daemon and waits for its word."""

from __future__ import annotations

import logging

TOLD = logging.getLogger(__name__)
