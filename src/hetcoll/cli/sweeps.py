"""The words of `hetcoll perf`, and the sweeps that they ask for."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass

from .. import DType, ReduceOp
from ..types import supports
from .cases import OPS, PAIRED, REDUCING, ROOTED, places, shape
from .in_job import at_least
from .on_device import check_devices
from .own import add_import
from .patterns import numpy_dtype

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_NCCL_NAMES = {
    "half": DType.FLOAT16, "float": DType.FLOAT32, "double": DType.FLOAT64, "f8e4m3": DType.FLOAT8_E4M3FN,
    "f8e5m2": DType.FLOAT8_E5M2,
}  # fmt: skip
_FROM_ML_DTYPES = frozenset(
    {
        DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One sweep: an operation with a type, a reduction (for those that reduce) and a root (for those with one)."""

    op: str
    dtype: DType
    redop: ReduceOp | None
    root: int


def parse_size(text: str) -> int:
    """Bytes from "8", "4K", "64M", "1G" (powers of 1024; "KB" and "KiB" too). argparse's error for anything else."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(unit)
    if unit not in _UNITS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted a size such as 8, 64K, 4M or 1G, got {text!r}")
    return int(number) << _UNITS[unit]


def _dtypes(text: str) -> tuple[DType, ...]:
    if text == "all":
        return tuple(dtype for dtype in DType if dtype not in _FROM_ML_DTYPES or have_ml_dtypes())
    known = {dtype.label: dtype for dtype in DType} | _NCCL_NAMES
    if text not in known:
        raise argparse.ArgumentTypeError(f"wanted all or one of {', '.join(known)}; got {text!r}")
    if known[text] in _FROM_ML_DTYPES and not have_ml_dtypes():
        raise argparse.ArgumentTypeError(f"{text} needs the package ml_dtypes: pip install ml_dtypes")
    return (known[text],)


def _redops(text: str) -> tuple[ReduceOp, ...]:
    if text == "all":
        return tuple(ReduceOp)
    known = {op.label: op for op in ReduceOp}
    if text not in known:
        raise argparse.ArgumentTypeError(f"wanted all or one of {', '.join(known)}; got {text!r}")
    return (known[text],)


def _device(text: str) -> str:
    try:
        return check_devices(text)
    except ValueError:
        wanted = "cpu, cuda, hip, auto, or one for each rank, such as cuda,hip,cpu"
        raise argparse.ArgumentTypeError(f"wanted {wanted}; got {text!r}") from None


def have_ml_dtypes() -> bool:
    """Whether bfloat16 and fp8 can be measured."""
    return importlib.util.find_spec("ml_dtypes") is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, which mean what they mean in nccl-tests where they are the same letter; -n is the ranks here."""
    listed = f"{', '.join(OPS)} or all; {' and '.join(sorted(PAIRED))} are between ranks 0 and 1, 2 and 3, ..."
    parser.add_argument("ops", nargs="+", choices=(*OPS, "all"), metavar="OP", help=listed)
    add = parser.add_argument
    add("-n", "--ranks", type=at_least(1), help="ranks to start on this host (default: those of -g, or 2)")
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="smallest size (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest size (default 64M)")
    add("-f", "--stepfactor", type=at_least(2), default=2, metavar="N", help="factor between sizes (default 2)")
    add("-i", "--stepbytes", type=parse_size, metavar="SIZE", help="difference between sizes, instead of -f")
    add("--iters", type=at_least(1), metavar="N", help="timed calls (default: as many as take 0.2 s, 5 to 5000)")
    add("-w", "--warmup", type=at_least(0), default=3, metavar="N", help="calls before the timed ones (default 3)")
    add("-d", "--datatype", type=_dtypes, default=(DType.FLOAT32,), metavar="TYPE", help="float32 (default), ..., all")
    add("-o", "--op", type=_redops, default=(ReduceOp.SUM,), metavar="OP", help="sum (default), ..., all")
    add("-r", "--root", type=at_least(-1), default=0, help="the root (default 0); -1 means each in turn")
    add(
        "-c", "--check", type=at_least(0), default=1, metavar="N",
        help="verified calls before and after (default 1); 0: nothing is verified",
    )  # fmt: skip
    add("--inplace", action="store_true", help="measure in place only")
    add(
        "--transport", choices=("auto", "shm", "tcp", "verbs"), help="how ranks reach each other (default: the fastest)"
    )
    add_device(parser)
    add("-G", "--graph", type=at_least(1), nargs="?", const=10, metavar="N", help="run a captured graph N times (10)")
    add("-z", "--blocking", action="store_true", help="wait for each call on a GPU before the next")
    add(
        "-C",
        "--cputime",
        action="store_true",
        help="on GPUs the host's time of a call, which does not wait for its end",
    )
    add("--json", metavar="FILE", help="write the results as JSON, too; - is the output, and the table goes to stderr")
    add("--csv", metavar="FILE", help="write the results as CSV, too")
    add_import(parser)
    add("--plot", metavar="FILE", help="draw bandwidth and latency, as .png or .svg; in dark beside it (*-dark)")
    add("--compare", metavar="FILE", help="of perf (JSON), nccl-tests, osu-micro-benchmarks or PARAM: print ratios")
    add("--progress", choices=("auto", "lines"), default="auto", help=argparse.SUPPRESS)  # lines: terminal.py


def add_device(parser: argparse.ArgumentParser) -> None:
    """Which ranks have a GPU."""
    parser.add_argument(
        "--device", type=_device, metavar="DEVICE",
        help="where buffers are: cpu (default), cuda, hip, auto, or one for each rank, such as cuda,hip,cpu",
    )  # fmt: skip
    parser.add_argument(
        "-g", "--ngpus", type=at_least(1), metavar="N", help="so many ranks of the host have a GPU, one each"
    )


def expand(args: argparse.Namespace, size: int) -> list[Job]:
    """The sweeps that the arguments ask for, in the order of the operations."""
    ops = OPS if "all" in args.ops else tuple(dict.fromkeys(args.ops))
    if args.root >= size:
        raise SystemExit(f"hetcoll perf: -r wants a rank from 0 to {size - 1}, or -1 for each, got {args.root}")
    roots = range(size) if args.root < 0 else (args.root,)
    jobs = []
    for op in ops:
        if not places(op, args.inplace) or (op in PAIRED and size == 1):
            continue
        if op == "barrier":
            jobs.append(Job(op, DType.UINT8, None, 0))
            continue
        for dtype in args.datatype:
            redops = [r for r in args.op if supports(dtype, r)] if op in REDUCING else [None]
            jobs += [Job(op, dtype, r, root) for r in redops for root in (roots if op in ROOTED else (0,))]
    if not jobs:
        raise SystemExit("hetcoll perf: nothing to measure: the operations have no such type, reduction or place")
    return jobs


def sizes(args: argparse.Namespace, op: str, ranks: int, dtype: DType) -> list[int]:
    """Elements of each size of the sweep. Sizes that come to the same number of elements are measured once."""
    if op == "barrier":
        return [0]
    item = numpy_dtype(dtype).itemsize
    nbytes = args.minbytes
    found: dict[int, int] = {}
    while nbytes <= args.maxbytes:
        elements = nbytes // item
        found.setdefault(shape(op, ranks, 0, elements, 0).total, elements)
        nbytes = nbytes + args.stepbytes if args.stepbytes else max(nbytes, 1) * args.stepfactor
    return list(found.values())
