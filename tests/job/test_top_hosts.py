"""`hetcoll top` for a job of several hosts, which are network namespaces here, from one that has none of its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netns
import numpy as np
import pytest
from losing import found
from patience import PATIENCE
from ranks import Job, Ranks, wait_until

import hetcoll
from hetcoll.config import env

Launch = Callable[..., Ranks]
HOSTS, LOCAL = 3, 2
SIZE = HOSTS * LOCAL
PLACE = ("10.78.0.1", "29500")


def meet(job: Job, hosts: list[str]) -> int:
    netns.enter(hosts[job.rank // LOCAL])
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(SIZE), MASTER_ADDR=PLACE[0], MASTER_PORT=PLACE[1])
    env.environment.cache_clear()
    job.comm = hetcoll.init(timeout=30)
    return os.getpid()


def work(job: Job, at: str) -> int:
    """All-reduces, to which rank 3 is late, until there is a file; who is lost is done without."""
    assert job.comm is not None
    comm, more = job.comm, np.ones(300_000, np.int32)
    while more[0]:
        if job.rank == 3:
            time.sleep(0.05)
        more[:] = not Path(at).exists()
        try:
            comm.allreduce(more, op="min")
        except hetcoll.PeerLostError:
            comm, more[0] = comm.shrink(), 1
    if comm is not job.comm:
        comm.close()
    return comm.size


@pytest.fixture
def net() -> Iterator[netns.Network]:
    with netns.network(HOSTS + 1) as made:
        yield made


@contextlib.contextmanager
def looks(host: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """What `hetcoll top` on this host says next."""
    words = ["top", ":".join(PLACE), "--interval", "0.3", "--json", "-"]
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "hetcoll", *words],
        env={name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def look() -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=PATIENCE * 30)[1]
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    try:
        yield look
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE * 30)


@pytest.mark.thorough
def test_hosts_edges_and_the_slowest_are_seen_from_another_host(
    launch: Launch, net: netns.Network, tmp_path: Path
) -> None:
    ranks, at = launch(SIZE, join=False, HETCOLL_ALGO="allreduce:ring"), tmp_path / "enough"
    pids = ranks.run(meet, net.hosts)
    ranks.start(work, str(at))
    with looks(net.hosts[HOSTS]) as look:
        line = look()
        assert (line["hosts"], [rank["pid"] for rank in line["ranks"]]) == (HOSTS, pids)
        wait_until(lambda: (look()["slowest"] or {}).get("rank") == "3", 60)
        between = {(edge["source"], edge["destination"]) for edge in look()["edges"]}
        assert {("0", "2"), ("2", "4"), ("4", "0"), ("1", "3"), ("3", "5"), ("5", "1")} <= between
        net.cut(1, 0, 1)  # nobody says goodbye

        def cut_off() -> bool:
            line = look()
            return not line["problem"] and [rank["rank"] for rank in line["ranks"] if rank["silent"]] == ["2", "3"]

        wait_until(cut_off, 30)
    at.touch()
    ranks.kill_all()


@pytest.mark.thorough
def test_it_follows_the_store_to_another_host(launch: Launch, net: netns.Network, tmp_path: Path) -> None:
    ranks, at = launch(SIZE, join=False), tmp_path / "enough"
    pids = ranks.run(meet, net.hosts)
    ranks.start(work, str(at))
    with looks(net.hosts[HOSTS]) as look:
        assert len(look()["ranks"]) == SIZE
        for rank in (0, 1):  # all of its host
            ranks.kill(rank)

        def goes_on() -> bool:
            line = look()
            return [rank["pid"] for rank in line["ranks"] if not rank["silent"]] == pids[2:] and line["collectives"]

        wait_until(goes_on, 60)
    at.touch()
    assert found(ranks, 0, 1, seconds=60) == dict.fromkeys(range(LOCAL, SIZE), SIZE - LOCAL)
    for rank in range(LOCAL, SIZE):  # as programs that end without closing anything, the store's process last or not
        ranks.end(rank)
