"""`hetcoll explain`: which algorithm, channels and transports a call of some size would use, and why."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..types import Collective
from .perf import parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which call, of how many ranks."""
    labels = [collective.label for collective in Collective]
    parser.add_argument("collective", choices=labels, metavar="COLLECTIVE", help=", ".join(labels))
    parser.add_argument("sizes", nargs="+", type=parse_size, metavar="SIZE", help="bytes: 8, 64K, 4M, ...")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks to start on this host (default 2)")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "verbs"), help="how ranks reach each other")
    parser.add_argument("--compress", metavar="FORMAT", help="as in Communicator.allreduce: bf16, fp8, int8 or none")
    parser.epilog = (
        "The text is that of Communicator.explain. Under a launcher the job is its own, of several hosts too."
    )


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Under a launcher ask its job, else one that is started here; rank 0 prints."""
    from ..config.env import environment

    if args.transport is not None:
        os.environ["HETCOLL_TRANSPORT"] = args.transport  # before anyone reads it; the ranks inherit it
    if environment().launch.launcher == "single" and args.ranks > 1:
        from ..tools import launch

        return launch.run([sys.executable, "-m", "hetcoll", *argv], args.ranks, prefix=False)
    from ..job import init

    with init() as comm:
        if comm.rank == 0:
            for nbytes in args.sizes:
                print(comm.explain(args.collective, nbytes, compress=args.compress), flush=True)
        comm.barrier()
    return 0
