"""What the campaign tells of ranks that do not end, and what it lets stay."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from patience import DEADLINE
from ranks import Resources, context, start_server, wait_until


def _idle(output: str) -> str:
    """What is told of a rank that waits for its orders, and lives on."""
    from campaign.lane import Lane

    lane = Lane(output)
    seat = lane._seat("c")
    wait_until(lambda: _caught(seat.pid) >> (signal.SIGUSR2 - 1) & 1, DEADLINE)
    said = lane._stacks(seat)
    assert os.waitpid(seat.pid, os.WNOHANG) == (0, 0)
    seat.end()
    return said


def _caught(pid: int) -> int:
    """Signals that a process handles, as proc(5) has them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)


def _deaf(output: str) -> str:
    """The same, as of one whose main thread runs no Python."""
    from campaign import lane

    lane._tell_stacks = lambda *_: None
    return _idle(output)


def _call(pipe: Connection, told: Callable[[str], str], output: str) -> None:
    pipe.send(told(output))


@pytest.mark.parametrize("told", [_idle, _deaf])
def test_it_is_told_where_a_rank_stands(told: Callable[[str], str], tmp_path: Path) -> None:
    start_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, told, str(tmp_path / "output")))
    process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE)
        said = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
    assert "lane.py" in said
    assert "in _sit" in said


def test_one_id_of_nccl_may_stay_and_no_more() -> None:
    from campaign.lane import _allow_an_id

    def left() -> str:
        _allow_an_id(before)
        return Resources.now().left_over(before)

    before, ids = Resources.now(), []
    try:
        ids.append(os.memfd_create("fake-nccl-CUDA-1"))
        assert left() == ""
        before = Resources.now()
        ids += [os.memfd_create(f"fake-nccl-CUDA-{each}") for each in (2, 3)]
        assert left() == "1 descriptors of /memfd:fake-nccl-CUDA-3 (deleted)"
    finally:
        for each in ids:
            os.close(each)


def test_what_another_program_has_of_the_rank_that_became_it_is_told() -> None:
    from campaign.lane import _open

    with (
        open(os.devnull) as kept,
        open(os.devnull) as closed,
        subprocess.Popen(["sleep", "600"], pass_fds=[kept.fileno()], stdin=closed) as process,
    ):
        try:
            assert _open(process.pid, first=3) == {os.devnull}
        finally:
            process.kill()
