"""`hetcoll explain`: which algorithm, channels and transports a call of some size would use, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import Communicator
from ..types import Collective
from . import in_job
from .sweeps import parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which call, of how many ranks."""
    labels = [collective.label for collective in Collective]
    parser.add_argument("collective", choices=labels, metavar="COLLECTIVE", help=", ".join(labels))
    parser.add_argument("sizes", nargs="+", type=parse_size, metavar="SIZE", help="bytes: 8, 64K, 4M, ...")
    in_job.add_arguments(parser)
    parser.add_argument("--compress", metavar="FORMAT", help="as in Communicator.allreduce: bf16, fp8, int8 or none")
    parser.epilog = (
        "The text is that of Communicator.explain. Under a launcher the job is its own, of several hosts too."
    )


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Rank 0 prints what it says of each size."""

    def told(comm: Communicator) -> str:
        return "\n".join(str(comm.explain(args.collective, size, compress=args.compress)) for size in args.sizes)

    return in_job.tell(args, argv, told)
