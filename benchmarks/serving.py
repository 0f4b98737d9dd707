"""Scattered pieces from one rank to another: puts beside NIXL over UCX and torch's `batch_isend_irecv` over Gloo.

    python benchmarks/serving.py [--pieces 16384 65536] [--count 512] [--rounds 5] [--device auto]

Two processes of this machine. One sends `count` pieces of its cache to other places of the other's, as a hand-off of KV
blocks does, over loopback TCP and over shared memory (Gloo has TCP alone, NIXL is told by UCX_TLS). The receiver
compares every byte. The link's
rate is that of one TCP socket that sends as many bytes at once. Libraries take turns; the medians are printed.

With `--device cuda`, `hip` or `auto` each process has a GPU, the same where there is one only, and the caches lie
there: on both, on the sender's, on the receiver's. The limit is then what the sender's GPU copies to pinned memory in
one piece, which every way through the host needs; and where the receiver's GPU reads the sender's cache ("direct"),
what one GPU copies to the other. Gloo, where this Python has torch, is given pinned memory, to which the sender copies
its cache, and out of which the receiver does; NCCL takes the pieces where they lie.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from launched import Meeting, launched

WAYS = ("socket", "gloo", "nixl tcp", "nixl shm", "hetcoll tcp", "hetcoll shm")
GPU_WAYS = ("pinned copy", "gpu copy", "gloo gpu>gpu", "nccl gpu>gpu", "hetcoll shm direct gpu>gpu", *(
    f"hetcoll {link} {places}" for link in ("tcp", "shm") for places in ("gpu>gpu", "gpu>cpu", "cpu>gpu")
))  # fmt: skip
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
    rows = (cache.get() if isinstance(cache, Cache) else cache).reshape(count, piece)
    assert (rows[target] == content(piece, count, turn).reshape(count, piece)[source]).all(), "wrong bytes"


def measure(
    rank: int,
    piece: int,
    count: int,
    rounds: int,
    begin: Callable[[], object],
    move: Callable[[], object],
    meet: Callable[[], object],
    came: Callable[[], Any],
) -> list[float]:
    """Seconds of each round on the sender, until all is there. Both `begin` together, and `meet` before the receiver
    looks at what `came`."""
    found = []
    for turn in range(rounds + 1):
        begin()
        start = time.perf_counter()
        move()
        found.append(time.perf_counter() - start)
        meet()
        if rank == 1:
            check(came(), piece, count, turn)
    return found[1:]


def gpu(rank: int) -> Any:
    """This process's, as `--device` says."""
    from hetcoll.vendors.devices import cuda, hip

    wanted = os.environ["BENCH_DEVICE"]
    driver = hip if wanted == "hip" or (wanted == "auto" and cuda.why_not()) else cuda
    if reason := driver.why_not():
        raise SystemExit(f"--device {wanted}: {reason}")
    found = driver.devices()
    return found[rank % len(found)]


class Cache:
    """Bytes on the host, or on this process's GPU."""

    def __init__(self, rank: int, nbytes: int, on_gpu: bool) -> None:
        from hetcoll.gpu.array import DeviceArray

        zeros = np.zeros(nbytes, np.uint8)
        self.array: Any = DeviceArray.of(gpu(rank), zeros) if on_gpu else zeros
        self._on_gpu = on_gpu

    def set(self, values: Any) -> None:
        if self._on_gpu:
            self.array.set(values)
        else:
            self.array[:] = values

    def get(self) -> Any:
        return self.array.get() if self._on_gpu else self.array


def with_hetcoll(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    import hetcoll

    source, target = places(count)
    lies = way.split()[-1].split(">") if ">" in way else ["cpu", "cpu"]
    cache, calls = Cache(rank, piece * count, lies[rank] == "gpu"), [0]
    offers = rank == 1 or "direct" in way
    with hetcoll.init() as comm, comm.window(cache.array if offers else None) as window:

        def begin() -> None:
            if rank == 0:
                cache.set(content(piece, count, calls[0]))
            comm.barrier()

        def move() -> None:
            calls[0] += 1
            if rank == 0:
                window.put(cache.array, 1, target * piece, src_offset=source * piece, count=piece, signal=0)
            else:
                window.wait_signal(0, calls[0])

        found = measure(rank, piece, count, rounds, begin, move, comm.barrier, lambda: cache)
        comm.barrier()
        direct = comm.counters()["window_direct"]
        assert direct == ((rounds + 1) * piece * count if rank == 1 and "direct" in way else 0), "another way"
        return found


def with_nccl(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=device)
    source, target = places(count)
    cache, turn = torch.zeros(count, piece, dtype=torch.uint8, device=device), [0]
    done = torch.zeros(1, device=device)

    def begin() -> None:
        if rank == 0:
            cache.copy_(torch.from_numpy(content(piece, count, turn[0])).view(count, piece))
        turn[0] += 1
        dist.barrier()
        torch.cuda.synchronize(device)

    def move() -> None:
        order, call = (source, dist.isend) if rank == 0 else (target, dist.irecv)
        for work in dist.batch_isend_irecv([dist.P2POp(call, cache[i], 1 - rank) for i in order]):
            work.wait()
        dist.recv(done, 1) if rank == 0 else dist.send(done, 0)  # as a put is over when its data is there
        torch.cuda.synchronize(device)

    found = measure(rank, piece, count, rounds, begin, move, dist.barrier, lambda: cache.cpu().numpy().reshape(-1))
    dist.destroy_process_group()
    return found


def with_gloo(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    source, target = places(count)
    on_gpu = ">" in way
    cache = torch.zeros(count, piece, dtype=torch.uint8, pin_memory=on_gpu)
    device = f"cuda:{rank % torch.cuda.device_count()}" if on_gpu else "cpu"
    mine_there, turn = torch.zeros_like(cache, device=device), [0]

    def begin() -> None:
        if rank == 0:
            mine_there.copy_(torch.from_numpy(content(piece, count, turn[0])).view(count, piece))
        turn[0] += 1
        dist.barrier()

    def move() -> None:
        rows = cache
        if rank == 0:
            rows = cache.copy_(mine_there) if on_gpu else mine_there
        order, call = (source, dist.isend) if rank == 0 else (target, dist.irecv)
        for work in dist.batch_isend_irecv([dist.P2POp(call, rows[i], 1 - rank) for i in order]):
            work.wait()
        done = torch.zeros(1)  # as a put is over when its data is there
        if on_gpu and rank == 1:
            mine_there.copy_(cache)
            torch.cuda.synchronize(device)
        dist.recv(done, 1) if rank == 0 else dist.send(done, 0)

    def came() -> Any:
        return (mine_there if on_gpu else cache).cpu().numpy().reshape(-1)

    found = measure(rank, piece, count, rounds, begin, move, dist.barrier, came)
    dist.destroy_process_group()
    return found


def with_nixl(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    """A prepared WRITE of all pieces with a notification, which both ranks poll for, as vLLM's connector does."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    meeting = Meeting(rank, Path(os.environ["BENCH_FOLDER"]), _SECONDS)
    agent = nixl_agent(str(rank), nixl_agent_config(backends=["UCX"]))
    cache, turn = np.zeros(piece * count, np.uint8), [0]
    agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")
    agent.add_remote_agent(meeting.exchange(agent.get_agent_metadata()))
    there = int(meeting.exchange(str(cache.ctypes.data).encode()))
    source, target = places(count)

    def rows(address: int) -> Any:
        return np.stack([address + np.arange(count) * piece, np.full(count, piece), np.zeros(count)], 1).astype(
            np.uint64
        )

    if rank == 0:
        here, far = (agent.prep_xfer_dlist(name, rows(at), "DRAM")
                     for name, at in (("NIXL_INIT_AGENT", cache.ctypes.data), ("1", there)))  # fmt: skip
        put = agent.make_prepped_xfer("WRITE", here, source.astype(np.int32), far, target.astype(np.int32), b"come")

    def begin() -> None:
        if rank == 0:
            cache[:] = content(piece, count, turn[0])
        turn[0] += 1
        meeting.exchange()

    def move() -> None:
        if rank == 0:
            state = agent.transfer(put)
            while state == "PROC":
                state = agent.check_xfer_state(put)
            assert state == "DONE", state
        else:
            while not agent.get_new_notifs():
                pass

    found = measure(rank, piece, count, rounds, begin, move, meeting.exchange, lambda: cache)
    meeting.exchange()
    print(json.dumps(found), flush=True)
    os._exit(0)  # it may crash when it is taken down


def with_pinned_copies(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    """What the sender's GPU copies to pinned memory in one piece."""
    found: list[float] = []
    if rank == 1:
        return found
    cache, device = Cache(rank, piece * count, True), gpu(rank)
    stream, pinned = device.stream(), device.allocate_host(piece * count)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        device.copy(pinned, cache.array.ptr, piece * count, stream)
        device.synchronize(stream)
        found.append(time.perf_counter() - start)
    return found[1:]


def with_gpu_copy(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
    """What the receiver's GPU reads of the sender's cache in one piece, mapped as a put's is."""
    handle = Path(os.environ["BENCH_FOLDER"]) / "handle"
    cache, device = Cache(rank, piece * count, True), gpu(rank)
    found: list[float] = []
    if rank == 1:
        handle.with_suffix(".new").write_bytes(device.ipc_handle(device.pointer(cache.array.ptr).base))
        handle.with_suffix(".new").rename(handle)
        while handle.exists():
            time.sleep(0.01)
        return found
    while not handle.exists():
        time.sleep(0.01)
    theirs, stream = device.open_ipc(handle.read_bytes()), device.stream()
    for _ in range(rounds + 1):
        start = time.perf_counter()
        device.copy(cache.array.ptr, theirs, piece * count, stream)
        device.synchronize(stream)
        found.append(time.perf_counter() - start)
    device.close_ipc(theirs)
    handle.unlink()
    return found[1:]


def with_socket(rank: int, piece: int, count: int, rounds: int, way: str) -> list[float]:
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


RUNS = {
    "socket": with_socket, "gloo": with_gloo, "nccl": with_nccl, "nixl": with_nixl, "hetcoll": with_hetcoll,
    "pinned": with_pinned_copies, "gpu": with_gpu_copy,
}  # fmt: skip


def launch(way: str, python: str, piece: int, count: int, rounds: int) -> list[float]:
    """The seconds of one library's rounds."""
    words = [python, __file__, "--way", way, "--pieces", str(piece), "--count", str(count), "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        shm = "shm" in way
        own = {"HETCOLL_TRANSPORT": "shm" if shm else "tcp", "BENCH_FOLDER": folder, "NIXL_LOG_LEVEL": "ERROR"}
        if way.startswith("nixl"):
            own["UCX_TLS"] = "tcp,shm,cma,self" if shm else "tcp,self"  # shared memory goes first
        return launched(way, words, 2, os.environ | own, _SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[16384, 65536], help="bytes of a piece, a multiple of 8"
    )
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/hetcoll-bench")
    parser.add_argument("--device", choices=["cuda", "hip", "auto"], help="caches on GPUs")
    parser.add_argument("--way", choices=WAYS + GPU_WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        rank = int(os.environ["RANK"])
        run = RUNS[options.way.split()[0]]
        print(json.dumps(run(rank, options.pieces[0], options.count, options.rounds, options.way)))
        return
    ways: tuple[str, ...] = WAYS
    limit, pythons = "socket", {}
    if options.device:
        os.environ["BENCH_DEVICE"] = options.device
        torch = importlib.util.find_spec("torch") is not None and options.device != "hip"
        ways = tuple(way for way in GPU_WAYS if torch or way.split()[0] not in ("gloo", "nccl"))
        limit = "pinned copy"
        print(f"{gpu(0).name}; {'with' if torch else 'without'} torch", flush=True)
    else:
        from libraries import prepare

        pythons = {name: str(prepare(name, options.cache) / "bin/python") for name in ("gloo", "nixl")}
    print(f"| Piece | Way | Pieces/s | MB/s | Share of the {limit}'s rate |\n| --- | --- | --- | --- | --- |")
    for piece in options.pieces:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.launches):
            for way in ways:
                python = pythons.get(way.split()[0], sys.executable)
                seconds[way] += launch(way, python, piece, options.count, options.rounds)
        link = statistics.median(seconds[limit])
        for way in ways:
            took = statistics.median(seconds[way])
            rate = options.count / took
            print(f"| {piece} | {way} | {rate:.0f} | {rate * piece / 1e6:.0f} | {link / took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
