"""`hetcoll simulate`: print the plans of an algorithm and prove them, or say what they would take in a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import ArgumentError
from ..plan.algorithms import ALGORITHMS, find
from ..plan.ir import Plan
from ..plan.simulator import PlanError, Report, check
from ..types import Collective
from . import predict
from .own import add_import, import_own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which plans, and in which form to print them."""
    labels = [collective.label for collective in Collective]
    what = f"{', '.join(labels)}; or a cluster file, NAME.toml"
    parser.add_argument("collective", type=_collective, metavar="COLLECTIVE", help=what)
    named = "its name; without one, the names there are. After a cluster file, the collective"
    parser.add_argument("algorithm", nargs="?", metavar="ALGORITHM", help=named)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("-r", "--root", type=int, default=0, help="the root, where there is one (default 0)")
    parser.add_argument("--avg", action="store_true", help="the plan of an average instead of a sum")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    predict.add_arguments(parser)
    add_import(parser)


def _collective(word: str) -> str:
    labels = [collective.label for collective in Collective]
    if word not in labels and not word.endswith(".toml"):
        raise argparse.ArgumentTypeError(f"invalid choice: {word!r} (choose from {', '.join(labels)}, or a .toml file)")
    return word


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Print; 0 when the plans are proved, 1 when the checker refuses them."""
    import_own(args.modules)
    if args.collective.endswith(".toml"):
        return predict.main(args)
    if given := predict.only_for_clusters(args):
        raise ArgumentError(f"{given[0]} is for cluster files: hetcoll simulate CLUSTER.toml {args.collective}")
    collective = Collective[args.collective.upper()]
    if args.ranks < 1:
        raise ArgumentError(f"-n wants a number of ranks from 1, got {args.ranks}")
    if args.algorithm is None:
        names = sorted(ALGORITHMS.get(collective.plain, {}))
        print(json.dumps(names) if args.json else "\n".join(names))
        return 0
    build = find(collective, args.algorithm).build
    plans = [build(args.ranks, rank, root=args.root, scale=args.avg) for rank in range(args.ranks)]
    report, problem = _prove(plans, args.avg)
    print(json.dumps(_document(plans, report, problem), indent=1) if args.json else _text(plans, report, problem))
    return 1 if problem else 0


def _prove(plans: list[Plan], average: bool) -> tuple[Report | None, str]:
    """What the checker says of the plans out of place and in place: its report, or the first problem."""
    try:
        report = check(plans, scale=average)
        check(plans, scale=average, inplace=True)
    except PlanError as error:
        return None, str(error)
    return report, ""


def _text(plans: list[Plan], report: Report | None, problem: str) -> str:
    parts = [plan.dump() for plan in plans]
    if report is None:
        return "\n\n".join([*parts, f"REFUSED: {problem}"])
    slots = max(plan.credits for plan in plans)
    verdict = (
        f"proved for every timing with {slots} slots a channel, out of place and in place: {report.steps} steps, "
        f"{report.messages} messages, the longest chain of messages {report.hops}"
    )
    return "\n\n".join([*parts, verdict])


def _document(plans: list[Plan], report: Report | None, problem: str) -> dict[str, Any]:
    return {
        "schema": 1, "collective": plans[0].collective.label, "algorithm": plans[0].algorithm, "ranks": len(plans),
        "proved": not problem, "problem": problem, "report": None if report is None else asdict(report),
        "plans": [{"rank": plan.rank, "steps": [str(step) for step in plan.steps]} for plan in plans],
    }  # fmt: skip
