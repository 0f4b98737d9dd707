"""`hetcoll digest`: the first call in which two runs of a program differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..runtime import digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two directories that HETCOLL_DIGEST named."""
    parser.add_argument("first", type=Path, help="the directory that HETCOLL_DIGEST named in one run")
    parser.add_argument("second", type=Path, help="and in the other")


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Print it; 1 where there is one."""
    first, second = digest.read(args.first), digest.read(args.second)
    difference = digest.first_difference(first, second)
    calls = sum(map(len, first.values()))
    print(difference or f"{calls} calls of {len(first)} ranks are the same")
    return 1 if difference else 0
