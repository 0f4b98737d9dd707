"""Plays seeds on several processors. Each lane is a process of its own, which sees the simulated system for good."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

_AT_A_TIME = 8
_REAL_SECONDS = 120.0  # until a schedule that does not end, though its clock may, is shown with all its threads


Work = tuple[int, str]
"""A seed, and what is done to it in place of what was drawn, or nothing."""


class Result(NamedTuple):
    """Of a seed: what was wrong, how often a thread was picked, and a number over all of that."""

    seed: int
    only: str
    problems: list[str]
    decisions: int
    digest: int


def campaign(work: Iterable[Work], lanes: int = os.cpu_count() or 1) -> Iterator[Result]:
    """All of `work`, in its order."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"  # of the lanes
    try:
        with ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn"), _begin) as pool:
            yield from pool.map(_play, work, chunksize=_AT_A_TIME)
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _begin() -> None:
    from . import product

    product.load()
    logging.getLogger("hetcoll").setLevel(logging.CRITICAL)


def _play(work: Work) -> Result:
    from .play import play

    seed, only = work
    faulthandler.dump_traceback_later(_REAL_SECONDS, exit=True)
    played = play(seed, only)
    faulthandler.cancel_dump_traceback_later()
    return Result(seed, only, played.problems, played.decisions, played.digest)
