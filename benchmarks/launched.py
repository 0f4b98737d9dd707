"""Ranks of one library on this machine, which measure once and end: the last line of rank 0 is what they found."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from ports import free_port


class Meeting:
    """Two ranks that know one folder: each call gives the other's bytes."""

    def __init__(self, rank: int, folder: Path, seconds: float) -> None:
        self._rank, self._folder, self._seconds, self._calls = rank, folder, seconds, 0

    def exchange(self, mine: bytes = b"") -> bytes:
        own, other = (self._folder / f"{self._calls}.{rank}" for rank in (self._rank, 1 - self._rank))
        new = own.with_suffix(f".{self._rank}.new")
        new.write_bytes(mine)
        new.rename(own)
        self._calls += 1
        deadline = time.monotonic() + self._seconds
        while not other.exists():
            assert time.monotonic() < deadline, "the other rank did not come"
            time.sleep(0.001)
        return other.read_bytes()


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """They took too long."""
    for rank in ranks:
        rank.kill()


def launched(name: str, words: Sequence[str], size: int, env: Mapping[str, str], seconds: float) -> list[float]:
    """What `size` ranks of a command print, in torchrun's environment. SystemExit where one fails, or takes longer."""
    common = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
              "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    with tempfile.TemporaryFile("w+") as out:
        ranks = [
            subprocess.Popen(
                words,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        alarm = threading.Timer(seconds, _end, [ranks])
        alarm.start()
        codes = [rank.wait() for rank in ranks]
        alarm.cancel()
        if any(codes):
            raise SystemExit(f"{name}: exit statuses {codes}")
        out.seek(0)
        found: list[float] = json.loads(out.read().splitlines()[-1])
        return found
