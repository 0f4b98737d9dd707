"""What the suites of one-sided messages share: pieces, and what moved while they went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hetcoll

PIECE, PIECES = 4096, 64  # elements of float32
FEW = 64 + 24 * PIECES + 128  # bytes of a request of so many pieces, and of its answers
NAMES = ("direct_bytes", "zero_copy_bytes", "staged_bytes", "copied_bytes")


def moved(comm: hetcoll.Communicator, act: Callable[[], Any]) -> list[int]:
    """By how much the counters grew while both ranks had this, and until both were through."""
    before = comm.counters()
    comm.barrier()
    if comm.rank == 0:
        act()
    comm.recv(np.zeros(1), 0) if comm.rank == 1 else comm.send(np.zeros(1), 1)
    after = comm.counters()
    return [after[name] - before[name] for name in NAMES]
