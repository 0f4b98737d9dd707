"""Measure hetcoll over RDMA beside perftest's ib_write_bw and ib_write_lat, on the same devices, in turns.

    python benchmarks/verbs.py                  # in a virtual machine with Soft-RoCE devices (tests/verbs/guest.py)
    python benchmarks/verbs.py --chunks         # and the instructions of one posted chunk, by callgrind

Rank 0 sends to rank 1, over one device or over two, from memory of `comm.empty`. Its bandwidth is that of a batch of
messages until the last has been received; ib_write_bw's is its own average of as many bytes. The latency is half a
round trip. Every round measures everything once, in turn; medians are kept. The emulated processors are what limits
both, so only the ratios mean anything. Soft-RoCE does all work of a write on the processor that posted it, so a second
device brings something only to who posts from two: verbs_limit.c measures what one thread can write to two devices, and
what two threads can.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import verbs_instructions

ROOT = Path(__file__).resolve().parents[1]
GUEST = ROOT / "tests/verbs/guest.py"
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LIMIT = "verbs_limit"
BATCH = 12 << 20  # bytes that each measurement moves
ENDS = (("rxe0", "rxe1"), ("rxe2", "rxe3"))  # of two cables
LEAST = {"1 device": 0.85, "2 devices": 1.5}  # of ib_write_bw on one
Samples = dict[str, dict[int, list[float]]]


# In the guest ---------------------------------------------------------------------------------------------------------


def perftest(tool: str, ends: tuple[str, str], port: int, *words: str) -> list[str]:
    """The last row of numbers of a perftest tool between two devices of this machine."""
    common = [tool, "-x", "1", "-F", "-p", str(port), *words]
    server = subprocess.Popen([*common, "-d", ends[0]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):  # until the server listens
            time.sleep(0.1)
            done = subprocess.run(
                [*common, "-d", ends[1], "127.0.0.1"], capture_output=True, text=True, timeout=60, check=False
            )
            if done.returncode == 0:
                break
        else:
            raise SystemExit(f"verbs.py: {tool}: {done.stdout}{done.stderr}")
        server.wait(20)
    finally:
        server.kill()
        server.wait()
    return [line.split() for line in done.stdout.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+", line)][-1]


def write_bandwidth(nbytes: int, ends: tuple[str, str], port: int) -> float:
    """ib_write_bw's average in bytes per second."""
    count = max(BATCH // nbytes, 5)
    row = perftest("ib_write_bw", ends, port, "-s", str(nbytes), "-n", str(count), "--report_gbits")
    return float(row[3]) * 1e9 / 8


def limit(tool: Path, nbytes: int, *words: str) -> float:
    """What verbs_limit.c moves over both cables, in bytes per second; sleeping, not polling, which would cost it the
    processors that do the devices' work."""
    command = [str(tool), "-e", *words, "-s", str(nbytes), "-n", str(max(BATCH // nbytes, 5))]
    command += [":".join(ends) for ends in ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise SystemExit(f"verbs.py: {done.stderr}")
    return float(done.stdout)


def rank_main(rank: int, devices: str, port: int, pipe: int) -> None:
    """One rank: bandwidth by size, and the latency as that of size 0; rank 0 writes them as JSON."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "HETCOLL_TRANSPORT": "verbs", "HETCOLL_IB_HCA": devices,
    }  # fmt: skip
    import numpy as np

    import hetcoll

    with hetcoll.init() as comm:
        found = {nbytes: bandwidth(comm, comm.empty(nbytes, "uint8")) for nbytes in SIZES}
        word = np.zeros(8, np.uint8)
        times = [round_trip(comm, word) for _ in range(200)]
        found[0] = statistics.median(times[50:]) / 2
        told = comm.explain("p2p", 8)
        if told.transport != "verbs" or comm.counters()["lost_rails"]:
            raise SystemExit(f"verbs.py: {told}")
        comm.barrier()
        if rank == 0:
            os.write(pipe, json.dumps(found).encode())


def bandwidth(comm: Any, data: Any) -> float:
    """Bytes per second from rank 0 to rank 1, until the last is there and rank 0 has heard of it."""
    count = max(BATCH // data.nbytes, 5)
    for turn in range(2):  # the first is to get warm
        comm.barrier()
        start = time.perf_counter()
        for _ in range(count if turn else 2):
            if comm.rank == 0:
                comm.send(data, 1)
            else:
                comm.recv(data, 0)
        if comm.rank == 0:
            comm.recv(data[:1].copy(), 1)
        else:
            comm.send(data[:1].copy(), 0)
    return float(count * data.nbytes / (time.perf_counter() - start))


def round_trip(comm: Any, word: Any) -> float:
    """Seconds of 8 bytes to the other rank and back."""
    start = time.perf_counter()
    if comm.rank == 0:
        comm.send(word, 1)
        comm.recv(word, 1)
    else:
        comm.recv(word, 0)
        comm.send(word, 0)
    return time.perf_counter() - start


def hetcoll_job(cables: int, port: int) -> dict[int, float]:
    """What two ranks at the ends of so many cables measure."""
    context = multiprocessing.get_context("fork")  # after the imports, which take seconds there
    out, into = os.pipe()
    ranks = []
    for rank in range(2):
        devices = "=" + ",".join(ends[rank] for ends in ENDS[:cables])
        ranks.append(context.Process(target=rank_main, args=(rank, devices, port, into)))
        ranks[-1].start()
    for process in ranks:
        process.join(120)
        process.kill()
        process.join()
    os.close(into)
    with os.fdopen(out) as answer:
        text = answer.read()
    if any(process.exitcode for process in ranks):
        raise SystemExit("verbs.py: a rank failed")
    return {int(size): value for size, value in json.loads(text).items()}


def inside(rounds: int, output: Path) -> None:
    """All measurements, written to `output` as JSON."""
    import hetcoll
    from hetcoll.links.verbs import local_nics

    del hetcoll, local_nics  # loaded for the ranks
    samples: Samples = {}
    port = 20000

    def note(name: str, size: int, value: float) -> None:
        samples.setdefault(name, {}).setdefault(size, []).append(value)

    for _ in range(rounds):
        for size in SIZES:
            port += 1
            note("ib_write_bw", size, write_bandwidth(size, ENDS[0], port))
            note("1 thread", size, limit(output.with_name(LIMIT), size))
            note("2 threads", size, limit(output.with_name(LIMIT), size, "-t"))
        port += 1
        row = perftest("ib_write_lat", ENDS[0], port, "-s", "8", "-n", "500")
        note("ib_write_lat", 0, float(row[4]) * 1e-6)
        for cables, name in ((1, "1 device"), (2, "2 devices")):
            port += 1
            for size, value in hetcoll_job(cables, port).items():
                note(name, size, value)
    output.write_text(json.dumps(samples))


# Outside --------------------------------------------------------------------------------------------------------------


def table(samples: Samples) -> tuple[list[str], bool]:
    """The rows of a Markdown table, and whether all ratios are what they should be."""
    middle = {name: {int(size): statistics.median(v) for size, v in of.items()} for name, of in samples.items()}
    heads = ["", "ib_write", "2 devices, 1 thread", "ratio", "2 devices, 2 threads", "ratio"]
    heads += ["hetcoll, 1 device", "ratio", "hetcoll, 2 devices", "ratio"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    good = True
    for size in SIZES:
        base = middle["ib_write_bw"][size]
        cells = [f"{size >> 10} KiB", f"{base / 1e6:.1f} MB/s"]
        for name in ("1 thread", "2 threads", *LEAST):
            value = middle[name][size]
            good &= value >= LEAST.get(name, 0) * base
            cells += [f"{value / 1e6:.1f} MB/s", f"{value / base:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    base = middle["ib_write_lat"][0]
    cells = ["8 B, one way", f"{base * 1e6:.1f} us", "", "", "", ""]
    for name in LEAST:
        value = middle[name][0]
        cells += [f"{value * 1e6:.1f} us", f"{value / base:.2f}"]
    lines.append(f"| {' | '.join(cells)} |")
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (default 3)")
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 2, help="the guest's processors")
    parser.add_argument("--chunks", action="store_true", help="count the instructions of a posted chunk as well")
    parser.add_argument("--inside", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.rounds, args.inside)
        return 0
    with tempfile.TemporaryDirectory(prefix="hetcoll-bench-") as folder:
        source = Path(__file__).with_name(f"{LIMIT}.c")
        compile_it = ["cc", "-O2", "-o", f"{folder}/{LIMIT}", str(source), "-libverbs", "-lpthread"]
        subprocess.run(compile_it, check=True)  # Debian: libibverbs-dev
        words = [sys.executable, __file__, "--rounds", str(args.rounds), "--inside", f"{folder}/samples.json"]
        guest = [sys.executable, str(GUEST), "--cpus", str(args.cpus), "--write", folder, "--timeout", "600", *words]
        status = subprocess.run(guest, check=False).returncode
        if status != 0:
            return status
        samples = json.loads(Path(f"{folder}/samples.json").read_text())
    lines, good = table(samples)
    print("\n".join(lines))
    if args.chunks:
        print("\n".join(verbs_instructions.report(None)))
    print("all ratios are as aimed at" if good else f"not all ratios are as aimed at: {LEAST} of ib_write_bw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
