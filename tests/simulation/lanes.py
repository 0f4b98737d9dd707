"""Plays seeds on several processors. Each lane is a process of its own, which sees the simulated system for good."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

_AT_A_TIME = 8  # schedules, after which a lane's garbage is collected
_REAL_SECONDS = 120.0  # until a schedule that does not end, though its clock may, is shown with all its threads
_LAST = 15.0  # seconds that lanes have to end what they play when the time is over

Work = tuple[int, str]
"""A seed, and what is done to it in place of what was drawn, or nothing."""


class Result(NamedTuple):
    """Of a seed: what was wrong, how often a thread was picked, and a number over all of that."""

    seed: int
    only: str
    problems: list[str]
    decisions: int
    digest: int


@dataclass
class _Lane:
    """A process, and what it has yet to play: one lot after another, of which it has two, lest it waits."""

    process: Any
    link: Connection
    lots: deque[list[Work]] = field(default_factory=deque)


def campaign(
    work: Iterable[Work], lanes: int = len(os.sched_getaffinity(0)), seconds: float = float("inf")
) -> Iterator[Result]:
    """As much of `work` as can be played in so many `seconds`, as it ends. A lane that dies, or plays one for too long,
    is a problem of the seed that it played, and another one goes on."""
    context, left, until = multiprocessing.get_context("spawn"), iter(work), time.monotonic() + seconds
    at = context.RawArray("q", lanes)  # how many of its lot each has played
    cores, before = sorted(os.sched_getaffinity(0)), os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"  # of the lanes
    running: dict[Connection, int] = {}
    all_lanes: list[_Lane] = []

    def begin(number: int) -> _Lane:
        ours, theirs = context.Pipe()
        mine = {cores[number % len(cores)]} if lanes >= len(cores) else set(cores)
        process = context.Process(target=_run, args=(theirs, mine, at, number), daemon=True)
        process.start()
        theirs.close()
        running[ours] = number
        return _Lane(process, ours)

    def supply(lane: _Lane) -> None:
        while len(lane.lots) < 2 and time.monotonic() < until and (lot := list(islice(left, _AT_A_TIME))):
            lane.lots.append(lot)
            lane.link.send(lot)

    try:
        all_lanes += map(begin, range(lanes))
        for lane in all_lanes:
            supply(lane)
        while any(lane.lots for lane in all_lanes) and time.monotonic() < until + _LAST:
            for link in wait([each for each, number in running.items() if all_lanes[number].lots], 1.0):
                number = running[link]  # type: ignore[index]
                lane = all_lanes[number]
                try:
                    yield from lane.link.recv()
                    lane.lots.popleft()
                except (EOFError, OSError):
                    del running[lane.link]
                    lot, *others = lane.lots
                    seed, only = lot[at[number]]
                    yield Result(seed, only, [_died(lane.process)], 0, 0)
                    lane = all_lanes[number] = begin(number)
                    rest = [each for each in lot if each != (seed, only)]
                    for each in (rest, *others):
                        lane.lots.append(each)
                        lane.link.send(each)
                supply(lane)
    finally:
        for lane in all_lanes:
            lane.process.kill()
            lane.process.join()
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _died(process: Any) -> str:
    process.join()
    return f"its process ended with {process.exitcode}; one that plays for {_REAL_SECONDS:g} s is ended"


def _run(link: Connection, cores: set[int], at: Any, number: int) -> None:
    """One thread of a lane runs at a time. On one core, where who is woken waits for who wakes it (SCHED_BATCH), the
    baton costs one switch of the system's in place of three or four, and nobody waits for another core. Fewer lanes
    than cores take what others leave on any.

    Threads that sleep after some microseconds owe the scheduler nothing: a program that computes beside a lane had one
    part in 250 of its core (Linux 6.18), and has two fifths since lanes are nice.
    """
    from . import product

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that began it
    os.sched_setaffinity(0, cores)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(19)
    product.load()
    logging.getLogger("hetcoll").setLevel(logging.CRITICAL)
    from .play import play

    gc.disable()
    gc.collect()
    gc.freeze()
    while True:
        try:
            lot = link.recv()
        except EOFError:
            return
        results = []
        for index, (seed, only) in enumerate(lot):
            at[number] = index
            faulthandler.dump_traceback_later(_REAL_SECONDS, exit=True)
            played = play(seed, only)
            faulthandler.cancel_dump_traceback_later()
            results.append(Result(seed, only, played.problems, played.decisions, played.digest))
        gc.collect()
        link.send(results)
