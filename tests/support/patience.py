"""How long tests wait for what is to happen soon: a deadline ends a hang, and says nothing of speed."""

from __future__ import annotations

import os

_LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1" if _LANES == 1 else "3"))
"""All deadlines are longer by it: in lanes, which share the processors, and where processors are emulated."""

DEADLINE = 100.0 * PATIENCE
"""Of a process that a test starts, in seconds."""
