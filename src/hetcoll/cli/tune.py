"""`hetcoll tune`: measure what algorithms take on this machine, and keep numbers by which the fastest are chosen."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import ArgumentError, HetcollError
from ..config.env import environment
from ..links import tuned as files
from ..plan import tuned, tuner
from .on_device import VENDORS, Stream, choose_device, visible_gpus
from .sweeps import add_device, parse_size
from .tuning import measure, networks, on_gpus

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_MORE_ON_GPUS = (16 << 20, 64 << 20)  # one kernel, or a library, does many of the others
_MOST_RANKS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, over what, and where to write the numbers."""
    parser.add_argument(
        "-n", "--ranks", type=_size, nargs="+", metavar="N",
        help="ranks to measure with (default: 2, as many as there are cores, and twice as many, 16 at most; with GPUs "
        "those of -g or --device)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("auto", "shm", "tcp", "verbs"), nargs="+", help="default: shm tcp; auto with GPUs"
    )
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", metavar="SIZE", help="bytes (default 8 to 4M; with GPUs 64M)"
    )
    add_device(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the numbers there, to be set as HETCOLL_TUNED")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    parser.epilog = (
        "Ranks of this host measure every algorithm at many sizes. Under a launcher the ranks of that job do, over "
        "HETCOLL_TRANSPORT: so the network between hosts is measured. Ranks that were told to use GPUs, by -g, "
        "--device or HETCOLL_DEVICE, measure what is chosen among their islands, beside what the file has of host "
        "memory. Later jobs choose by these numbers; where ranks have others, by rank 0's. HETCOLL_TUNED=none goes "
        "without."
    )


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and write what was found; 0."""
    config = environment()
    if args.output is None and config.config.cache is None:
        raise ArgumentError("-o: wanted a file to write to, since nothing is kept: HETCOLL_CACHE is none")
    path = Path(args.output or files.place(str(config.config.cache)))
    gpus = args.device not in (None, "cpu") or args.ngpus is not None
    if args.sizes and min(args.sizes) < 1:
        raise ArgumentError(f"--sizes: wanted 1 byte or more, got {min(args.sizes)}")
    if config.launch.rank == 0 and not args.measure:
        _kept(path)  # before minutes of measuring
    if config.launch.launcher != "single":
        return _in_job(args, path)
    ranks = [(args.device or "").count(",") + 1 if args.ngpus is None else args.ngpus] if gpus else _ranks()
    if min(args.ranks or ranks) < 2:
        raise ArgumentError("-n: wanted 2 ranks or more, got 1: a device for each, or -n, says how many")
    transports = args.transport or (["auto"] if gpus else ["shm", "tcp"])
    found = [_launch(args, transport, size) for transport in transports for size in args.ranks or ranks]
    _finish(tuned.Tuned(tuple(times for one in found for times in one.times)), path)
    return 0


def _size(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"wanted 2 to {_MOST_RANKS} ranks, got {text}")
    return int(text)


def _ranks() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return sorted({min(n, _MOST_RANKS) for n in (2, cores, 2 * cores) if n > 1})


def _launch(args: argparse.Namespace, transport: str, size: int) -> tuned.Tuned:
    """What so many ranks of this host measure."""
    from ..tools import launch

    with tempfile.TemporaryDirectory(prefix="hetcoll-tune-") as directory:
        file = Path(directory) / "measured.toml"
        command = [sys.executable, "-m", "hetcoll", "tune", "--measure", str(file)]
        command += ["--sizes", *map(str, args.sizes)] if args.sizes else []
        command += ["--device", args.device] if args.device else []
        command += ["-g", str(args.ngpus)] if args.ngpus else []
        env = {"HETCOLL_TRANSPORT": transport, "HETCOLL_ALGO": "", "HETCOLL_TUNED": "none"}
        if not args.device and not args.ngpus:
            env["HETCOLL_DEVICE"] = "cpu"
        if launch.run(command, size, env=env, prefix=False) != 0:
            raise HetcollError(f"{size} ranks over {transport} did not measure to the end: see above")
        return tuned.read(file.read_text(), str(file))


def _in_job(args: argparse.Namespace, path: Path) -> int:
    """The ranks of a launcher's job measure, and rank 0 writes."""
    from .. import init

    device = _device(args)
    with init(device=device) as comm:
        stream, gpus = None if device is None else Stream.of(device), on_gpus(comm)
        sizes = sorted(set(args.sizes or (SIZES + _MORE_ON_GPUS if gpus else SIZES)))
        found = tuned.Tuned(tuple(measure(comm, sizes, stream)), () if gpus else networks(comm))
        if comm.rank == 0 and args.measure:
            Path(args.measure).write_text(tuned.write(found, ()))
        elif comm.rank == 0:
            _finish(found, path)
        comm.barrier()
    return 0


def _device(args: argparse.Namespace) -> str | None:
    """What this rank's data is on, ``cuda:0``; None where nobody said, so that it is the host's."""
    config = environment()
    place = config.launch.rank if config.launch.local_rank is None else config.launch.local_rank
    if args.device is not None or args.ngpus is not None:
        return choose_device(args.device or "auto", args.ngpus, place, visible_gpus())
    told = config.config.device
    if told is None or told.kind not in VENDORS or told.index is not None:
        return None if told is None else str(told)
    return f"{told.kind}:{place % max(1, visible_gpus()[told.kind])}"  # there may be ranks on other vendors' between


def _finish(found: tuned.Tuned, path: Path) -> None:
    """Keep what was measured, and say what is chosen by it, and how far from the fastest choices were until now."""
    about = [
        f"What `hetcoll tune` measured on {datetime.date.today().isoformat()} with {files.hardware()}, in microseconds",
        "a call, for sizes of the larger of its two buffers. Where there is a root, until all ranks are done.",
    ]
    kept, gpus = _kept(path), any(one.placed.islands for one in found.times)
    whole = tuned.Tuned(
        found.times + tuple(one for one in kept.times if bool(one.placed.islands) != gpus),
        kept.networks if gpus else found.networks,
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:  # nobody reads half of it
        file = Path(directory) / path.name
        file.write_text(tuned.write(whole, about))
        file.replace(path)
    print(f"{'collective':>14} {'ranks':>5} {'transport':>13} {'model':>11} {'kept':>11}  chosen, up to so many bytes")
    every: list[tuple[list[float], list[float]]] = []
    for one in found.times:
        rows = [f"{name} {upper}" if upper < tuner.UNLIMITED else name for upper, name in one.rows()]
        every.append((_by_model(one, found), _by_kept(one, kept.times)))
        where = f"{one.collective.label:>14} {sum(one.placed.hosts):>5} {one.placed.transport:>13}"
        print(f"{where} {' '.join(map(_spell, every[-1]))}  {', '.join(rows)}")
    ratios = [[ratio for pair in every for ratio in pair[i]] for i in (0, 1)]
    print(f"{'all':>34} {' '.join(map(_spell, ratios))}  (times of what the cost model and the file kept until now")
    print(f"{'':>58}  choose over the fastest: geometric mean, largest)")
    for between in found.networks:
        latency, overhead, bandwidth = between.network
        print(
            f"between hosts: {latency * 1e6:.3g} us a message and {overhead * 1e6:.3g} us of work at either end, "
            f"{8e-9 * bandwidth:.3g} Gbit/s"
        )
    print(f"kept in {path}; HETCOLL_TUNED=none goes without it")


def _kept(path: Path) -> tuned.Tuned:
    """What the file has until now, in a folder that is there. ArgumentError where it is none, or cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=path.parent).cleanup()  # as it is written
        return tuned.read(path.read_text(), str(path)) if path.exists() else tuned.Tuned()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"-o: wanted a file to write to, got {str(path)!r}: {error}") from None


def _by_model(one: tuned.Measured, found: tuned.Tuned) -> list[float]:
    if any(way in one.placed.transport for way in ("verbs", "rdma", "direct")):  # whose devices the file does not name
        return []
    topology = one.placed.topology
    if one.placed.islands:
        able = one.seconds.__contains__
        rows = tuner.table_among(one.collective, topology, one.placed.members, lambda entry: able(entry.name))
        return [*one.over(rows)]
    return [*one.over(tuner.table(one.collective, topology, machine=found.machine(topology)))]


def _by_kept(one: tuned.Measured, kept: Iterable[tuned.Measured]) -> list[float]:
    """By times of another run: what was measured first is no judge of itself."""
    before = next((each for each in kept if each[:2] == one[:2]), None)
    known = before is not None and {name for _, name in before.rows()} <= set(one.seconds)
    return [*one.over(before.rows())] if known and before is not None else []


def _spell(ratios: Sequence[float]) -> str:
    if not ratios:
        return f"{'-':>11}"
    return f"{math.exp(math.fsum(map(math.log, ratios)) / len(ratios)):>5.3f} {max(ratios):>5.2f}"
