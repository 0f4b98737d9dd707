"""Scattered pieces from one rank to another: puts beside torch's `batch_isend_irecv` over Gloo, in one run.

    python benchmarks/serving.py [--pieces 16384 65536] [--count 512] [--rounds 5]

Two processes of this machine. One sends `count` pieces of its cache to other places of the other's, as a hand-off of KV
blocks does, over loopback TCP and over shared memory (Gloo has TCP alone). The receiver compares every byte. The link's
rate is that of one TCP socket that sends as many bytes at once. Libraries take turns; the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

WAYS = ("socket", "gloo", "hetcoll tcp", "hetcoll shm")
_SECONDS = 300


def places(count: int) -> tuple[Any, Any]:
    """Which pieces go where."""
    return np.random.default_rng(1).permutation(count), np.random.default_rng(2).permutation(count)


def content(piece: int, count: int, turn: int) -> Any:
    """The sender's cache: each word is its own."""
    return (np.arange(piece * count // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(turn)).view(
        np.uint8
    )


def check(cache: Any, piece: int, count: int, turn: int) -> None:
    source, target = places(count)
    rows = cache.reshape(count, piece)
    assert (rows[target] == content(piece, count, turn).reshape(count, piece)[source]).all(), "wrong bytes"


def measure(
    rank: int, piece: int, count: int, rounds: int, begin: Callable[[], object], move: Callable[[Any], Any]
) -> list[float]:
    """Seconds of each round on the sender, until all is there. `move` takes the sender's cache, or gives what came."""
    found = []
    for turn in range(rounds + 1):
        mine = content(piece, count, turn) if rank == 0 else None
        begin()
        start = time.perf_counter()
        came = move(mine)
        if rank == 0:
            found.append(time.perf_counter() - start)
        else:
            check(came, piece, count, turn)
    return found[1:]


def with_hetcoll(rank: int, piece: int, count: int, rounds: int) -> list[float]:
    import hetcoll

    source, target = places(count)
    cache, calls = np.zeros(piece * count, np.uint8), [0]
    with hetcoll.init() as comm, comm.window(cache if rank == 1 else None) as window:

        def move(mine: Any) -> Any:
            calls[0] += 1
            if rank == 0:
                window.put(mine, 1, target * piece, src_offset=source * piece, count=piece, signal=0)
            else:
                window.wait_signal(0, calls[0])
            return cache

        found = measure(rank, piece, count, rounds, comm.barrier, move)
        comm.barrier()
        return found


def with_gloo(rank: int, piece: int, count: int, rounds: int) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    source, target = places(count)
    cache = torch.zeros(count, piece, dtype=torch.uint8)

    def move(mine: Any) -> Any:
        rows = cache if mine is None else torch.from_numpy(mine).view(count, piece)
        order, call = (source, dist.isend) if rank == 0 else (target, dist.irecv)
        for work in dist.batch_isend_irecv([dist.P2POp(call, rows[i], 1 - rank) for i in order]):
            work.wait()
        done = torch.zeros(1)  # as a put is over when its data is there
        dist.recv(done, 1) if rank == 0 else dist.send(done, 0)
        return cache.numpy().reshape(-1)

    found = measure(rank, piece, count, rounds, dist.barrier, move)
    dist.destroy_process_group()
    return found


def with_socket(rank: int, piece: int, count: int, rounds: int) -> list[float]:
    """What the link can do: the bytes as they lie, in one stream."""
    path = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(path) as server:
            link, _ = server.accept()
    else:
        deadline = time.monotonic() + 30
        while True:
            try:
                link = socket.create_connection(path)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    found, cache = [], memoryview(bytearray(piece * count))
    with link:
        for _ in range(rounds + 1):
            start = time.perf_counter()
            if rank == 0:
                link.sendall(cache)
                assert link.recv(1) == b"x"
                found.append(time.perf_counter() - start)
            else:
                at = 0
                while at < len(cache):
                    at += link.recv_into(cache[at:])
                link.sendall(b"x")
    return found[1:]


RUNS = {"socket": with_socket, "gloo": with_gloo, "hetcoll tcp": with_hetcoll, "hetcoll shm": with_hetcoll}


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """They took too long."""
    for rank in ranks:
        rank.kill()


def launch(way: str, python: str, piece: int, count: int, rounds: int) -> list[float]:
    """The seconds of one library's rounds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "HETCOLL_TRANSPORT": "shm" if way.endswith("shm") else "tcp"}
    words = [python, __file__, "--way", way, "--pieces", str(piece), "--count", str(count), "--rounds", str(rounds)]
    with tempfile.TemporaryFile("w+") as out:
        ranks = [
            subprocess.Popen(
                words,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        alarm = threading.Timer(_SECONDS, end, [ranks])
        alarm.start()
        codes = [rank.wait() for rank in ranks]
        alarm.cancel()
        if any(codes):
            raise SystemExit(f"{way}: exit statuses {codes}")
        out.seek(0)
        found: list[float] = json.loads(out.read().splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[16384, 65536], help="bytes of a piece, a multiple of 8"
    )
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/hetcoll-bench")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        rank = int(os.environ["RANK"])
        print(json.dumps(RUNS[options.way](rank, options.pieces[0], options.count, options.rounds)))
        return
    from libraries import prepare

    gloo = str(prepare("gloo", options.cache) / "bin/python")
    print("| Piece | Way | Pieces/s | MB/s | Share of the socket's rate |\n| --- | --- | --- | --- | --- |")
    for piece in options.pieces:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.launches):
            for way in WAYS:
                python = gloo if way == "gloo" else sys.executable
                seconds[way] += launch(way, python, piece, options.count, options.rounds)
        link = statistics.median(seconds["socket"])
        for way in WAYS:
            took = statistics.median(seconds[way])
            rate = options.count / took
            print(f"| {piece} | {way} | {rate:.0f} | {rate * piece / 1e6:.0f} | {link / took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
