"""Count instructions with callgrind: per small call from Python to Python, and per KiB of a large all-reduce.

    python benchmarks/instructions.py             # compare with instructions.json; a rise above 3 % fails
    python benchmarks/instructions.py --update    # write instructions.json

Times on a shared machine say little about a change of one per cent; instruction counts do. Rank 1 of 2 runs under
callgrind and so some fifty times slower than rank 0, which spins and never sleeps: whatever rank 1 asks for is there
already, and it does not wait, unless rank 0 has just lost its core. So rank 1 counts many short batches one by one and
the smallest count stands. The difference between long and short batches leaves out what counting itself costs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from ports import free_port

BASELINE = Path(__file__).resolve().with_name("instructions.json")
MOST_RISE = 0.03
LAUNCH_TIMEOUT = 240.0
SMALL_BYTES, SMALL_BATCHES = 8, (2, 12)  # calls in a short and in a long batch
LARGE_BYTES, LARGE_BATCHES = 1 << 20, (1, 3)
REPEATS = 60
WARM_UP = 20
COUNTER = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_DUMP_STATS; }
"""


def rank_body(counter: str, op: str, nbytes: int, short: int, long: int) -> None:
    """What both ranks run: out-of-place all-reduces or exchanges of `nbytes`, in short and long batches by turns."""
    import numpy as np

    import hetcoll

    count = ctypes.CDLL(counter)
    send, recv = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    with hetcoll.init() as comm:
        other = 1 - comm.rank
        method: Callable[..., object] = getattr(comm, op)
        words = (send, recv) if op == "allreduce" else (send, other, recv, other)
        for _ in range(WARM_UP):
            method(*words)
        for calls in (short, long) * REPEATS:
            count.begin()
            for _ in range(calls):
                method(*words)
            count.end()
        comm.barrier()
    if not (recv == (2 if op == "allreduce" else 1)).all():
        raise SystemExit("the result is wrong")


def count(counter: Path, op: str, nbytes: int, batches: tuple[int, int]) -> float:
    """Instructions of rank 1 for one call."""
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONHASHSEED": "0", "HETCOLL_SPIN_US": "100000000",
        "HETCOLL_SHM_STORES": "cached", "HETCOLL_SHM_READ": "never",  # the kernel's copying would not be counted
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--rank", str(counter), op, str(nbytes), *map(str, batches)]
    with tempfile.TemporaryDirectory(prefix="hetcoll-callgrind-") as folder:
        callgrind = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
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
        totals = [total(Path(f"{folder}/out.{i}").read_text()) for i in range(1, 2 * REPEATS + 1)]
    return (min(totals[1::2]) - min(totals[::2])) / (batches[1] - batches[0])


def total(profile: str) -> int:
    """The sum of all instructions in a callgrind file."""
    found = re.search(r"^(?:totals|summary):\s*(\d+)", profile, re.MULTILINE)
    if found is None:
        raise ValueError("this is no callgrind file: it has no total")
    return int(found.group(1))


def measure() -> dict[str, float]:
    """All figures, in instructions."""
    with tempfile.TemporaryDirectory(prefix="hetcoll-callgrind-") as folder:
        counter = Path(folder) / "counter.so"
        compile_words = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(counter)]
        subprocess.run(compile_words, input=COUNTER, text=True, check=True)
        small, exchange = (count(counter, op, SMALL_BYTES, SMALL_BATCHES) for op in ("allreduce", "sendrecv"))
        large = count(counter, "allreduce", LARGE_BYTES, LARGE_BATCHES)
    return {
        f"allreduce of {SMALL_BYTES} B": round(small, 1),
        f"sendrecv of {SMALL_BYTES} B": round(exchange, 1),
        f"KiB of an allreduce of {LARGE_BYTES >> 20} MiB": round(large / (LARGE_BYTES >> 10), 1),
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
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_body(args.rank[0], args.rank[1], *map(int, args.rank[2:]))
        return 0
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        raise SystemExit("instructions.py: valgrind and a C compiler are needed: apt install valgrind gcc")
    if not (args.update or BASELINE.exists()):
        raise SystemExit("instructions.py: there is no instructions.json to compare with; --update writes it")
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
