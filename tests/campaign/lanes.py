"""Plays seeds in several lanes at a time: each is a process that has the ranks' processes as its children."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

from ranks import context, die_with_parent, start_server

from .program import draw

Work = tuple[int, str]
"""A seed, and the attack that is made in place of the one drawn, or nothing."""


def campaign(work: Sequence[Work], lanes: int) -> Iterator[tuple[int, list[str] | str]]:
    """Each seed with what was wrong, as they end; or with what it wants and cannot be had here."""
    pending = list(reversed(work))
    with tempfile.TemporaryDirectory(prefix="hetcoll-campaign-") as folder:
        pipes, processes = [], []
        start_server()
        for number in range(min(lanes, len(work))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_lane, args=(theirs, os.path.join(folder, str(number))))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            busy = set(pipes)
            for pipe in pipes:
                pipe.send(pending.pop())
            while busy:
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    found = pipe.recv()
                    if pending:
                        pipe.send(pending.pop())
                    else:
                        busy.discard(pipe)
                    yield found
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(5)  # it may be in a program
                process.kill()
                process.join()
                process.close()


def _lane(pipe: Connection, output: str) -> None:
    """Ends when the pipe is closed."""
    die_with_parent()
    from .lane import Lane

    lane = Lane(output)
    try:
        while True:
            seed, only = pipe.recv()
            pipe.send((seed, lane.play(draw(seed, only))))
    except (EOFError, ConnectionError):
        lane.close()
