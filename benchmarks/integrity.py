"""Count what checksums over TCP cost: all instructions of all ranks and of the kernel, for one all-reduce.

    python tests/verbs/guest.py --count --memory 3000 python benchmarks/integrity.py
    python tests/verbs/guest.py --count python benchmarks/integrity.py --ranks 2 --bytes 8 --most 1.01

Times of a busy machine do not tell one hundredth. There (`guest.py --count`) each instruction takes a nanosecond, and
the ranks share the one processor: elsewhere the same command measures time. Ranks sleep at once, so that nobody counts
how long others wait. The kernel's copies are loops of eight bytes a turn, which counts more for them than a processor
needs that copies by vectors, and checksums are by three instructions for eight bytes or fewer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from ports import free_port

MODES = ("off", "sampled", "all")
BYTES = (8, 1 << 10, 1028, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
BATCHES = 5
MOVED = 24 << 20  # bytes of a batch, in 200 calls at most: samples are of pieces, and a batch has some


def call(size: int, rank: int, mode: str, nbytes: int, port: int) -> tuple[float, float]:
    """Nanoseconds of a call, and bytes that this rank checked in it."""
    import numpy as np

    import hetcoll

    os.environ |= {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HETCOLL_TRANSPORT": "tcp", "HETCOLL_INTEGRITY": mode,
        "HETCOLL_CHECK": "off", "HETCOLL_SPIN_US": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    calls = max(2, min(200, MOVED // nbytes))
    x, y = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    took = []
    with hetcoll.init() as comm:
        for _ in range(max(2, calls // 10)):
            comm.allreduce(x, y)
        before = comm.counters()["checked_bytes"]
        for _ in range(BATCHES):
            comm.barrier()
            start = time.monotonic_ns()
            for _ in range(calls):
                comm.allreduce(x, y)
            took.append((time.monotonic_ns() - start) / calls)
        checked = (comm.counters()["checked_bytes"] - before) / (BATCHES * calls)
        comm.barrier()
    if not (y == size).all():
        raise SystemExit("the result is wrong")
    return statistics.median(took), checked


def measure(size: int, mode: str, nbytes: int) -> tuple[float, float]:
    """Of rank 0 of `size`, which are forked: an emulated processor takes long to import."""
    port, told = free_port(), os.pipe()
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                found = call(size, rank, mode, nbytes, port)
                if rank == 0:
                    os.write(told[1], f"{found[0]} {found[1]}".encode())
                status = 0
            finally:
                os._exit(status)
        ranks.append(pid)
    failed = [rank for rank, pid in enumerate(ranks) if os.waitpid(pid, 0)[1] != 0]
    if failed:
        raise SystemExit(f"ranks {failed} failed")
    took, checked = os.read(told[0], 100).split()
    for end in told:
        os.close(end)
    return float(took), float(checked)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=BYTES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--most", type=float, help="fail where samples cost more than so many times `off`")
    args = parser.parse_args(argv)
    import hetcoll  # noqa: F401  # before ranks are forked

    dear = []
    print("| Ranks | Bytes | " + " | ".join(f"{mode}: ns, bytes checked" for mode in args.modes) + " |")
    for size in args.ranks:
        for nbytes in args.bytes:
            found = {mode: measure(size, mode, nbytes) for mode in args.modes}
            off = found[args.modes[0]][0]
            cells = [f"{took:,.0f} ({took / off:.3f}), {checked:,.0f}" for took, checked in found.values()]
            print(f"| {size} | {nbytes:,} | " + " | ".join(cells) + " |", flush=True)
            if args.most is not None and found["sampled"][0] > args.most * off:
                dear.append((size, nbytes))
    for size, nbytes in dear:
        print(f"FAILED: samples of {nbytes} bytes on {size} ranks cost more than {args.most} times no checks")
    return 1 if dear else 0


if __name__ == "__main__":
    sys.exit(main())
