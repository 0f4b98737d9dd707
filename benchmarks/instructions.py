"""Count instructions with callgrind: per small all-reduce from Python to Python, and per KiB of a large one.

    python benchmarks/instructions.py             # compare with instructions.json; a rise above 3 % fails
    python benchmarks/instructions.py --update    # write instructions.json

Times on a shared machine say little about a change of one per cent; instruction counts do. Rank 1 of 2 runs under
callgrind and so some fifty times slower than rank 0, which spins and never sleeps: whatever rank 1 asks for is there
already, and it does not wait. What starting and ending cost is measured with no calls at all, and subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

BASELINE = Path(__file__).resolve().with_name("instructions.json")
MOST_RISE = 0.03
LAUNCH_TIMEOUT = 240.0
SMALL_BYTES, SMALL_CALLS = 8, 20_000
LARGE_BYTES, LARGE_CALLS = 1 << 20, 40
WARM_UP = 20


def rank_body(nbytes: int, calls: int) -> None:
    """What both ranks run: `calls` out-of-place all-reduces of `nbytes`, after a few to warm up."""
    import numpy as np

    import hetcoll

    send, recv = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    with hetcoll.init() as comm:
        for _ in range(WARM_UP):
            comm.allreduce(send, recv)
        for _ in range(calls):
            comm.allreduce(send, recv)
        comm.barrier()
    if not (recv == 2).all():
        raise SystemExit("the sum is wrong")


def count(nbytes: int, calls: int) -> int:
    """Instructions of rank 1, from its first to its last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONHASHSEED": "0", "HETCOLL_SPIN_US": "100000000", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--rank", str(nbytes), str(calls)]
    with tempfile.TemporaryDirectory(prefix="hetcoll-callgrind-") as folder:
        out = Path(folder) / "out"
        callgrind = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}"]
        ranks = [
            subprocess.Popen(words, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank})
            for rank, words in (("0", command), ("1", callgrind + command))
        ]
        try:
            codes = [rank.wait(LAUNCH_TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"instructions.py: the ranks ended with {codes}")
        return total(out.read_text())


def total(profile: str) -> int:
    """The sum of all instructions in a callgrind file."""
    found = re.search(r"^(?:totals|summary):\s*(\d+)", profile, re.MULTILINE)
    if found is None:
        raise ValueError("this is no callgrind file: it has no total")
    return int(found.group(1))


def measure() -> dict[str, float]:
    """Both figures, in instructions."""
    small_start, small_end = count(SMALL_BYTES, 0), count(SMALL_BYTES, SMALL_CALLS)
    large_start, large_end = count(LARGE_BYTES, 0), count(LARGE_BYTES, LARGE_CALLS)
    return {
        f"allreduce of {SMALL_BYTES} B": round((small_end - small_start) / SMALL_CALLS, 1),
        f"KiB of an allreduce of {LARGE_BYTES >> 20} MiB": round(
            (large_end - large_start) / LARGE_CALLS / (LARGE_BYTES >> 10), 1
        ),
    }


def machine() -> dict[str, str]:
    """What the counts depend on besides the code."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }  # fmt: skip


def compare(now: Mapping[str, float], then: Mapping[str, float]) -> list[str]:
    """What rose by more than 3 %."""
    return [
        f"{name}: {now[name]:.1f} instructions, {before:.1f} before: {100 * (now[name] / before - 1):+.1f} %"
        for name, before in then.items()
        if now[name] > before * (1 + MOST_RISE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write instructions.json instead of comparing")
    parser.add_argument("--rank", nargs=2, type=int, metavar=("BYTES", "CALLS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_body(*args.rank)
        return 0
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions.py: valgrind is needed: apt install valgrind")
    now = measure()
    for name, value in now.items():
        print(f"{name}: {value:.1f} instructions")
    if args.update:
        BASELINE.write_text(json.dumps({"machine": machine(), "instructions": now}, indent=1) + "\n")
        return 0
    baseline = json.loads(BASELINE.read_text())
    if baseline["machine"] != machine():
        print(f"not compared: instructions.json is of {baseline['machine']}, this is {machine()}")
        return 0
    risen = compare(now, baseline["instructions"])
    for line in risen:
        print(f"FAILED: {line}")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
