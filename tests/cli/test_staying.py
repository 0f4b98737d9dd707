"""Ranks of a benchmark that stay for the next measurement: they answer, and end when they do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fakes
import pytest
from installed import import_torch
from thorough import HOUSE, parametrize

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_tables  # noqa: E402
import gpus  # noqa: E402
import staying  # noqa: E402
from places import Place  # noqa: E402

pytestmark = HOUSE

ANSWERS = """
import json, os, sys
for line in sys.stdin:
    told = json.loads(line)
    if told["do"] == "end" and os.environ["RANK"] == "1":
        sys.exit("rank 1 has had enough")
    if told["do"] != "sleep":
        print(json.dumps({"rank": os.environ["RANK"], "did": told["do"]}), flush=True)
"""


def stay(tmp_path: Path, seconds: float) -> staying.StayingRanks:
    commands = [([sys.executable, "-c", ANSWERS], {"RANK": str(rank)}) for rank in range(2)]
    return staying.StayingRanks("some library", commands, tmp_path / "log", seconds)


def test_ranks_stay_and_answer(tmp_path: Path) -> None:
    ranks = stay(tmp_path, 60)
    for do in ("this", "that"):
        assert ranks.ask({"do": do}) == [{"rank": "0", "did": do}, {"rank": "1", "did": do}]
    ranks.close()
    assert [process.returncode for process in ranks.ranks] == [0, 0]


def test_a_rank_that_ends_is_told_of_with_its_words(tmp_path: Path) -> None:
    ranks = stay(tmp_path, 60)
    with pytest.raises(RuntimeError, match=r"some library: a rank ended at {'do': 'end'}: rank 1 has had enough"):
        ranks.ask({"do": "end"})
    ranks.close()
    assert all(process.returncode is not None for process in ranks.ranks)


def test_ranks_that_do_not_answer_are_ended(tmp_path: Path) -> None:
    ranks = stay(tmp_path, 1)
    with pytest.raises(RuntimeError, match=r"some library: a rank ended at {'do': 'sleep'}"):
        ranks.ask({"do": "sleep"})
    ranks.close()
    assert all(process.returncode is not None for process in ranks.ranks)


@pytest.mark.fakes
@parametrize("library", ["hetcoll", "windows", "nccl", "copies"], first=2)
def test_ranks_of_the_benchmark_on_gpus(library: str, tmp_path: Path) -> None:
    """What they measure is right, or at least there; times of fakes mean nothing."""
    env = fakes.environment("cuda", devices=2) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"nccl": {}, "windows": gpus.BY_ENGINES}.get(library, {"HETCOLL_ISLANDS": "0|1"})
    setting = gpus.Setting("two islands", gpus.on(2, 2), {}, (), ())
    peer = gpus.Peer(gpu_tables.COPIES if library == "copies" else library, library, env)
    job = gpus.Job.of(peer, setting, tmp_path / "log")
    points = [("allreduce", 65536), ("allgather", 1 << 20), ("reduce_scatter", 1 << 20)]
    if library == "windows":
        points = [("allgather", 1 << 20), ("alltoall", 4096)]
    elif library != "copies":
        points += [("alltoall", 4096), ("sendrecv", 4096), ("oneway", 64), ("pingpong", 64)]
    try:
        for op, nbytes in points:
            found = job.perf(op, nbytes, "out", "-c", "0" if library == "copies" else "1", "--iters", "3")
            assert not found.wrong
            assert found.time_us > 0
        if library == "windows":
            assert not job.perf("allgather", 1 << 20, "in", "-c", "1", "--iters", "3").wrong
        if library == "hetcoll":
            assert job.measure("nothing", 0, "out", True)["sync"] > 0
    finally:
        job.close()


@pytest.mark.thorough
def test_ranks_of_the_benchmark_without_gpus(tmp_path: Path) -> None:
    """What PyTorch's Gloo makes is right, in place as everywhere; a wrong element is told of."""
    import_torch()
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}  # where PyTorch may be
    setting = gpus.Setting("no GPUs", (Place(), Place()), {}, (gpus.Peer("Gloo", "gloo"),), ())
    assert (setting.place("allreduce"), setting.place("allgather")) == ("in", "out")
    job = gpus.Job.of(gpus.Peer("Gloo", "gloo", env), setting, tmp_path / "log")
    try:
        found = job.measure("allreduce", 4096, "in", verified=True)
        assert found["wrong"] == 0
        assert min(found[name] for name in ("us", "sync", "cost")) > 0
        assert job.perf("allreduce", 4096, "out", "--iters", "3").wrong  # it reduces in place alone
    finally:
        job.close()
