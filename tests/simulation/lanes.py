"""Plays seeds on several processors. Each lane is a process of its own, which sees the simulated system for good."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, cycle, islice
from typing import Any, NamedTuple

_AT_A_TIME = 8  # schedules, after which a lane's garbage is collected
_REAL_SECONDS = 120.0  # until a schedule that does not end, though its clock may, is shown with all its threads
_played = count()

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
        context = multiprocessing.get_context("spawn")
        cores, all_cores = context.SimpleQueue(), os.sched_getaffinity(0)
        for core in islice(cycle(all_cores), lanes):
            cores.put({core} if lanes >= len(all_cores) else all_cores)
        with ProcessPoolExecutor(lanes, context, _begin, (cores,)) as pool:
            yield from pool.map(_play, work, chunksize=_AT_A_TIME)
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _begin(cores: Any) -> None:
    """One thread of a lane runs at a time. On one core, where who is woken waits for who wakes it (SCHED_BATCH), the
    baton costs one switch of the system's in place of three or four, and nobody waits for another core. Fewer lanes
    than cores take what others leave on any."""
    from . import product

    os.sched_setaffinity(0, cores.get())
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    product.load()
    logging.getLogger("hetcoll").setLevel(logging.CRITICAL)
    gc.disable()
    gc.collect()
    gc.freeze()


def _play(work: Work) -> Result:
    from .play import play

    seed, only = work
    if next(_played) % _AT_A_TIME == 0:
        gc.collect()
    faulthandler.dump_traceback_later(_REAL_SECONDS, exit=True)
    played = play(seed, only)
    faulthandler.cancel_dump_traceback_later()
    return Result(seed, only, played.problems, played.decisions, played.digest)
