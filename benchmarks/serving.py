"""Scattered pieces from one rank to another: puts beside NIXL over UCX and torch's `batch_isend_irecv`.

    python benchmarks/serving.py [--pieces 16384 65536] [--counts 512] [--under-way 1] [--rounds 5] [--device auto]

Two processes of this machine for each way. One sends pieces of its cache to other places of the other's, as a hand-off
of KV blocks does: `--counts` pieces a put, `--under-way` puts before the first is waited for, `--repeats` times in a
row. The receiver compares every byte of each round. All ways take turns, round for round, and the medians are printed.

On the host: over loopback TCP and over shared memory (Gloo has TCP alone, NIXL is told by UCX_TLS). The link's rate is
that of one TCP socket that sends as many bytes at once.

With `--device cuda`, `hip` or `auto` each process has a GPU, the same where there is one only, and the caches lie
there: on both, on the sender's, on the receiver's. The link's rate is what the receiver's GPU copies of the sender's
cache, in one piece for each put; where there is one GPU, or no way between two, `--link "pinned copy"` is what a GPU
copies to pinned memory. "hetcoll direct": the receiver's GPU reads the sender's cache. Gloo is given pinned memory, to
which the sender copies its cache, and out of which the receiver does; NCCL and NIXL take the pieces where they lie.
Those of these libraries that this Python has are measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from ports import free_port
from serving_caches import Shape, gpu
from serving_ways import NIXL, SECONDS, present
from staying import StayingRanks

HOST_WAYS = ("socket", "gloo", "nixl tcp", "nixl shm", "hetcoll tcp", "hetcoll shm")
GPU_WAYS = ("pinned copy gpu>gpu", "gpu copy gpu>gpu", "gloo gpu>gpu", "nccl gpu>gpu", "nixl gpu>gpu",
            "hetcoll direct gpu>gpu", *(f"hetcoll {link} {places}" for link in ("tcp", "shm")
                                        for places in ("gpu>gpu", "gpu>cpu", "cpu>gpu")))  # fmt: skip
MODULES = {"gloo": ("torch",), "nccl": ("torch",), "nixl": NIXL}


class Pair(StayingRanks):
    """The two ranks of one way."""

    def __init__(self, way: str, python: str, folder: Path) -> None:
        folder /= way.replace(">", "-")
        folder.mkdir()
        common = {**os.environ, **_variables(way), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "WORLD_SIZE": "2", "BENCH_FOLDER": str(folder)}  # fmt: skip
        words = [python, str(Path(__file__).with_name("serving_rank.py")), way]
        commands = [(words, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
        super().__init__(way, commands, folder / "log", SECONDS)

    def round(self, shape: Shape, repeats: int) -> float:
        """Seconds of one move of all."""
        return max(float(found["seconds"]) for found in self.ask({"shape": shape, "repeats": repeats}))


def _variables(way: str) -> Mapping[str, str]:
    tcp = "tcp" in way
    found = {"HETCOLL_TRANSPORT": "tcp" if tcp else "shm", "NIXL_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    if way.startswith("nixl") and ">" not in way:
        found["UCX_TLS"] = "tcp,self" if tcp else "tcp,shm,cma,self"  # shared memory goes first
        if Path("/dev/nvidiactl").exists():  # NIXL refuses what could not reach the GPUs of its machine
            found["UCX_TLS"] += ",cuda_copy"
    if way.startswith("nixl") and (nvidia := importlib.util.find_spec("nvidia")):  # UCX knows no path to CUDA's wheel
        folders = nvidia.submodule_search_locations or ()
        libraries = [str(each.parent) for at in folders for each in Path(at).glob("*/lib/libcudart.so.*")]
        found["LD_LIBRARY_PATH"] = ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    return found


def chosen(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The ways, and the Pythons that have another library than this one."""
    if options.device:
        os.environ["BENCH_DEVICE"] = options.device
        missing = {name for name, modules in MODULES.items() if present(modules) is None}
        missing |= {"gloo", "nccl", "nixl"} if options.device == "hip" else set()
        print(f"{gpu(0).name}; without {', '.join(sorted(missing)) or 'nothing'}", flush=True)
        return _filtered([way for way in GPU_WAYS if way.split()[0] not in missing], options.ways), {}
    from libraries import prepare

    ways = _filtered(HOST_WAYS, options.ways)
    others = {way.split()[0] for way in ways} & {"gloo", "nixl"}
    return ways, {name: str(prepare(name, options.cache) / "bin/python") for name in sorted(others)}


def _filtered(ways: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    return [way for way in ways if wanted is None or any(way.startswith(each) for each in wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[16384, 65536], help="bytes of a piece, a multiple of 8"
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[512], help="pieces of a put")
    parser.add_argument("--under-way", type=int, nargs="+", default=[1], help="puts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="of a round: how often all is moved, one after another")
    parser.add_argument("--ways", nargs="+", help="those that begin so")
    parser.add_argument("--link", help="the way whose rate is the link's")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/hetcoll-bench")
    parser.add_argument("--device", choices=["cuda", "hip", "auto"], help="caches on GPUs")
    options = parser.parse_args()
    ways, pythons = chosen(options)
    wanted = options.link or ("gpu copy" if options.device else "socket")
    link = next((way for way in ways if way.startswith(wanted)), "")
    if not link:
        raise SystemExit(f"--link: wanted one of {', '.join(ways)}, got {wanted}")
    with tempfile.TemporaryDirectory() as folder:
        pairs = {way: Pair(way, pythons.get(way.split()[0], sys.executable), Path(folder)) for way in ways}
        try:
            measure(pairs, options, link)
        except BaseException:
            for pair in pairs.values():
                pair.kill()
            raise
        finally:
            for pair in pairs.values():
                pair.close()


def measure(pairs: Mapping[str, Pair], options: argparse.Namespace, link: str) -> None:
    print(f"| Piece | Pieces | Puts under way | Way | us a put | Pieces/s | MB/s | Share of {link} |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    for shape in itertools.starmap(Shape, itertools.product(options.pieces, options.counts, options.under_way)):
        seconds: dict[str, list[float]] = {way: [] for way in pairs}
        for _ in range(options.rounds + 1):  # the first is not counted
            for way, pair in pairs.items():
                seconds[way].append(pair.round(shape, options.repeats))
        medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
        for way, took in medians.items():
            print(
                f"| {shape.piece} | {shape.pieces} | {shape.depth} | {way} | {took / shape.depth * 1e6:.1f} |"
                f" {shape.total / took:.0f} | {shape.nbytes / took / 1e6:.0f} | {medians[link] / took:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
