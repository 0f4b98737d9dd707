"""What the suites on faults share: ranks that add up until something has happened, and what they say of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ranks import Outcome, RankError, Ranks, wait_until

import hetcoll

Launch = Callable[..., Ranks]
PROMPT = {"HETCOLL_IB_TIMEOUT": "15", "HETCOLL_IB_RETRY_CNT": "7"}  # a dead path is given up after a second
COUNT = 150_000


def add_up(comm: hetcoll.Communicator, calls: int) -> None:
    """All-reduces whose every element is checked."""
    x = np.empty(COUNT, np.float32)
    for i in range(calls):
        x[:] = comm.rank + i
        comm.allreduce(x)
        assert (x == sum(range(comm.size)) + comm.size * i).all(), i


def reduced(comm: hetcoll.Communicator, x: np.ndarray) -> np.ndarray:
    """The sum of the ranks' `x`, which may lie there."""
    comm.allreduce(x)
    return x


def add_up_until(
    comm: hetcoll.Communicator, folder: Path, reduced: Callable[..., np.ndarray] = reduced, count: int = COUNT
) -> None:
    """The same until rank 0 finds the file `done`, and some more. After each call every rank notes its counters."""
    x, left, calls = np.empty(count, np.float32), 4, 0
    while left > 0:
        x[:] = comm.rank
        x[-1] = comm.rank == 0 and (folder / "done").exists()
        found = reduced(comm, x)
        assert (found[:-1] == sum(range(comm.size))).all()
        left -= int(found[-1])
        calls += 1
        note = folder / f"next{comm.rank}"
        note.write_text(json.dumps(comm.counters() | {"calls": calls}))
        os.replace(note, folder / f"rank{comm.rank}")


class Progress:
    """What ranks have noted of their calls so far."""

    def __init__(self, folder: Path, size: int) -> None:
        self.files = [folder / f"rank{rank}" for rank in range(size)]

    def notes(self) -> list[dict[str, int]]:
        """The counters of each rank after its last call, and `calls`; of those that had one."""
        return [json.loads(file.read_text()) for file in self.files if file.exists()]

    def until(self, so: Callable[[dict[str, int]], bool]) -> None:
        """Wait until it is so on every rank."""
        try:
            wait_until(lambda: sum(map(so, self.notes())) == len(self.files), 60)
        except RankError as error:
            raise AssertionError(f"{error}: {self.notes()}") from error

    def until_call(self, number: int) -> None:
        """Wait until every rank is through with so many calls."""
        self.until(lambda counters: counters["calls"] >= number)


def told(comm: hetcoll.Communicator) -> tuple[dict[str, int], str]:
    return comm.counters(), str(comm.explain("allreduce", 4 * COUNT))


def in_the_middle(ranks: Ranks, happens: Callable[[Progress], None], *how: Any, seconds: float = 60) -> list[Outcome]:
    """`happens` while the ranks `add_up_until`, told `how`; how that ended on each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks.start(add_up_until, folder, *how)
        progress = Progress(folder, ranks.size)
        progress.until_call(3)
        happens(progress)
        (folder / "done").touch()
        return ranks.finish(seconds)
