"""What `hetcoll tune` measured on GPUs chooses among the islands there, on fakes of both vendors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fakes
import numpy as np
import pytest
import tune_quickly
from gpu_calls import check, device_of_rank
from gpu_kinds import start, start_gpus
from patience import DEADLINE
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.cli import tuning
from hetcoll.cli.on_device import Stream
from hetcoll.errors import ArgumentError
from hetcoll.gpu.array import DeviceArray
from hetcoll.plan import tuned
from hetcoll.types import Collective

NBYTES = 8 << 20  # that no kernel does


def told(comm: hetcoll.Communicator) -> list[str]:
    array = DeviceArray.of(device_of_rank(comm.rank), np.full(9, comm.rank + 1, np.float32))
    comm.allreduce(array.buffer()).wait(60)
    assert (array.get() == sum(range(1, comm.size + 1))).all()
    return [comm.explain(kind, NBYTES).gpus for kind in ("allreduce", "broadcast")]


def by_hand(path: Path, islands: str, *kinds: tuple[Collective, dict[str, float]]) -> str:
    """A file with these seconds, of ranks of one host."""
    found = tuple(map(tuned.Island.parse, islands.split("|")))
    size = sum(n for one in found for _, n in one.ranks)
    placed = tuned.Placed((size,), min(size, len(os.sched_getaffinity(0))), "mapped", found)
    times = [
        tuned.Measured(kind, placed, (NBYTES,), {name: (took,) for name, took in seconds.items()})
        for kind, seconds in kinds
    ]
    path.write_text(tuned.write(tuned.Tuned(tuple(times)), ["by hand"]))
    return str(path)


def measure_what_kernels_do(comm: hetcoll.Communicator) -> None:
    with pytest.raises(ArgumentError, match="and sizes beyond those of one kernel"):
        tuning.measure(comm, [8], Stream(device_of_rank(comm.rank)))


@pytest.mark.fakes
@pytest.mark.parametrize(
    ("gpus", "islands", "layout", "among"),
    [
        ("na", "0|1", "cuda 1 on host 0|hip 1 on host 0", ""),
        ("nna", "0,1|2", "cuda 2 on host 0|hip 1 on host 0", " among islands 0,1|2, their libraries inside"),
    ],
)
def test_the_fastest_of_a_file_is_chosen(gpus: str, islands: str, layout: str, among: str, tmp_path: Path) -> None:
    sums, copies = {"ring": 1e-6, "tree": 2e-6}, {"tree": 3e-6, "direct": 9e-6}
    file = by_hand(tmp_path / "file", layout, (Collective.ALLREDUCE, sums), (Collective.BROADCAST, copies))
    with start_gpus(gpus, HETCOLL_ISLANDS=islands, HETCOLL_TUNED=(file, *["none"] * (len(gpus) - 1))) as ranks:
        for reduced, broadcast in ranks.run(told, timeout=100):
            assert reduced.startswith(f"ring{among}")
            assert re.search(r"measured with 8388608 bytes: ring 1\.0 us \([\d.]+ predicted\), tree 2\.0 us", reduced)
            assert broadcast.startswith(f"tree{among}")
        check(ranks, [Case("allreduce", count=1_300_001), Case("broadcast", count=900_001, root=1)])


@pytest.mark.fakes
def test_of_other_islands_the_model_chooses(tmp_path: Path) -> None:
    """And HETCOLL_ALGO counts before both. There is nothing to measure of what a kernel does."""
    file = by_hand(tmp_path / "file", "cuda 2 on host 0|hip 1 on host 0", (Collective.ALLREDUCE, {"tree": 1e-6}))
    with start("na", HETCOLL_TUNED=file) as ranks:
        for reduced, _ in ranks.run(told, timeout=100):
            assert "measured" not in reduced
        ranks.run(measure_what_kernels_do, timeout=100)
    file = by_hand(tmp_path / "file", "cuda 1 on host 0|hip 1 on host 0", (Collective.ALLREDUCE, {"tree": 1e-6}))
    with start_gpus("na", HETCOLL_TUNED=file, HETCOLL_ALGO="allreduce:ring") as ranks:
        for reduced, _ in ranks.run(told, timeout=100):
            assert reduced.startswith("ring")
            assert "asked for" in reduced


def tune(
    *words: str, before: Sequence[str] = (), quickly: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    start = (str(Path(tune_quickly.__file__)),) if quickly else ("-m", "hetcoll", *before)
    command = [sys.executable, *start, "tune", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=os.environ | env, check=False)


RUN = ("run", "-n", "2", "-m", "hetcoll")
APART = {"HETCOLL_DEVICE": "hip", "HETCOLL_ISLANDS": "0|1"}
BEYOND_KERNELS = (5 << 20,)  # where 8 bytes are one kernel of GPUs


@pytest.mark.fakes
@pytest.mark.timeout(300)
@parametrize(
    ("vendors", "before", "quickly", "words", "sizes", "env", "islands"),
    [
        ("cuda", (), True, ("--device", "cuda,cpu"), (8, 64 << 10), {}, ["cuda 1 on host 0", "cpu 1 on host 0"]),
        ("cuda", (), False, ("--device", "cuda,cpu"), (8, 64 << 10), {}, ["cuda 1 on host 0", "cpu 1 on host 0"]),
        ("both", (), False, ("--device", "cuda,hip"), BEYOND_KERNELS, {}, ["cuda 1 on host 0", "hip 1 on host 0"]),
        ("hip", RUN, False, (), BEYOND_KERNELS, APART, ["hip 1 on host 0", "hip 1 on host 0"]),
    ],
    first=1,
)
def test_the_command(
    vendors: str, before: tuple[str, ...], quickly: bool, words: tuple[str, ...], sizes: tuple[int, ...],
    env: dict[str, str], islands: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    """On a machine that is busy all the same it says so, and keeps nothing. What was there of host memory stays.
    `quickly`: with few algorithms of few collectives, each of which takes communicators of its own."""
    file = tmp_path / "numbers.toml"
    host = tuned.Measured(Collective.ALLREDUCE, tuned.Placed((2,), 2, "shm"), (8,), {"ring": (1e-6,)})
    file.write_text(tuned.write(tuned.Tuned((host,)), ()))
    gpus = fakes.environment(vendors, devices=2, timeout=60) | {"HETCOLL_CACHE": str(tmp_path / "cache")}
    asked = (*words, "--sizes", "8", str(sizes[-1]), "-o", str(file))
    done = tune(*asked, before=before, quickly=quickly, **gpus, **env)
    found = tuned.read(file.read_text(), "file").times
    if done.returncode != 0 and not quickly:
        assert "wanted a machine that does nothing else. Nothing was kept" in done.stderr
        assert found == (host,)
        return
    assert done.returncode == 0, done.stderr
    *measured, kept = found
    assert kept == host
    assert {Collective.ALLREDUCE, Collective.BROADCAST, Collective.REDUCE} <= {one.collective for one in measured}
    for one in measured:
        assert [*map(str, one.placed.islands)] == islands
        assert one.placed.transport == "mapped"
        assert one.nbytes == sizes
        assert len(one.seconds) > 1


@pytest.mark.fakes
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("vendors", "words", "told"),
    [
        ("cuda", ("-g", "1"), "-n: wanted 2 ranks or more, got 1"),
        ("cuda", ("--device", "cuda,cuda", "--sizes", "4M"), "wanted GPUs of several islands"),
    ],
)
def test_where_nothing_is_chosen_it_says_so(vendors: str, words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    env = fakes.environment(vendors, devices=2, timeout=60) | {"HETCOLL_CACHE": str(tmp_path / "cache")}
    done = tune(*words, "-o", str(tmp_path / "file"), **env)
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "file").exists()
