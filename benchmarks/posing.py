"""GPUs of NVIDIA's that pose as AMD's beside the same GPUs as they are, by turns: what does another vendor cost?

    python benchmarks/posing.py [--gpus 2|4] [--rounds 12] [--json FILE]

1+1 and, on four GPUs, 2+2: the second half goes through hip-python, hipRTC and RCCL's names over CUDA's driver, NVRTC
and NCCL (tests/fakes/posing), against HETCOLL_ISLANDS in the same places. Both jobs stay for all rounds, on arrays
of hetcoll's own. A round is a short row of all-reduces by each, in alternating order; what counts is the median of the
rounds' ratios (posing to not posing, in time), since machines change their pace within minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import results
from gpus import COMMON, free_port
from staying import StayingRanks

HERE = Path(__file__).resolve().parent
M = 1 << 20
SIZES = (64 * M, 256 * M)
BYTES = 3 << 29  # in a row


def posing() -> dict[str, str]:
    """What a rank needs for its GPU to pose as AMD's."""
    sys.path.append(str(HERE.parent / "tests"))
    import fakes

    return fakes.posing()


class Job(StayingRanks):
    """So many GPUs in two halves, of which the second one poses."""

    def __init__(self, gpus: int, poses: bool, errors: Path) -> None:
        half = gpus // 2
        islands = "|".join(",".join(map(str, each)) for each in (range(half), range(half, gpus)))
        common = {**os.environ, **COMMON, "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus),
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HETCOLL_ISLANDS": islands}  # fmt: skip
        words = [sys.executable, str(HERE / "gpu_worker.py"), "hetcoll"]
        commands = []
        for rank in range(gpus):
            device = posing() if poses and rank >= half else {"HETCOLL_DEVICE": "cuda"}
            commands.append((words, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **device}))
        super().__init__("posing" if poses else "as they are", commands, errors, 120.0)

    def check(self, nbytes: int) -> int:
        """Elements that came wrong."""
        return int(self._perf(nbytes, "--iters", "1")["wrong"])

    def time(self, nbytes: int) -> float:
        """Microseconds of one call in a short row."""
        calls = min(100, max(4, BYTES // nbytes))
        return float(self._perf(nbytes, "-c", "0", "-w", "1", "--iters", str(calls))["us"])

    def _perf(self, nbytes: int, *words: str) -> dict[str, float]:
        """`hetcoll perf allreduce` of one size, which tells all ranks the same."""
        size = ["-b", str(nbytes), "-e", str(nbytes)]
        return self.ask({"do": "measure", "words": ["allreduce", *size, *words], "place": "out"})[0]


def compare(gpus: int, rounds: int, sizes: Sequence[int], home: Path) -> list[dict[str, object]]:
    """Prints a line for each size, and gives what stands there with all times."""
    found: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        jobs = [Job(gpus, poses, home / f"{gpus} {poses}") for poses in (False, True)]
        for job in jobs:
            stack.callback(job.close)
        for nbytes in sizes:
            wrong = sum(job.check(nbytes) for job in jobs)
            times: list[list[float]] = [[], []]
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    times[which].append(jobs[which].time(nbytes))
            ratios = sorted(posed / plain for plain, posed in zip(*times, strict=True))
            plain, posed = (nbytes / statistics.median(each) / 1e3 for each in times)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(
                f"{gpus // 2}+{gpus // 2} {results.human(nbytes)}: posing {posed:.1f} GB/s, as they are {plain:.1f};"
                f" time {statistics.median(ratios):.3f} times (middle half of {rounds} rounds {low:.3f} to {high:.3f});"
                f" {wrong} elements wrong",
                flush=True,
            )
            found.append({"gpus": gpus, "nbytes": nbytes, "wrong": wrong, "us": times})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as home:
        for gpus in range(2, args.gpus + 1, 2):
            found += compare(gpus, args.rounds, args.sizes, Path(home))
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    return int(any(each["wrong"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
