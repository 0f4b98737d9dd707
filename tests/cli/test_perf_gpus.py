"""`hetcoll perf` on GPUs: which rank has which, streams and graphs on fakes; figures to compare and to draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fakes
import pytest
import star
from patience import DEADLINE
from thorough import parametrize

from hetcoll.cli import compare, plot
from hetcoll.cli.on_device import check_devices, choose_device
from hetcoll.cli.report import Row
from hetcoll.errors import ArgumentError

BOTH = {"cuda": 2, "hip": 1}
NONE = {"cuda": 0, "hip": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where kernels are compiled to, once for all jobs here."""
    return {"HETCOLL_CACHE": str(tmp_path_factory.mktemp("cache") / "kernels"), "HETCOLL_TIMEOUT": "60"}


def perf(*words: str, **env: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "hetcoll", "perf", *words]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("wish", "gpus", "visible", "devices"),
    [
        ("cpu", None, BOTH, ["cpu", "cpu"]),
        ("auto", None, NONE, ["cpu", "cpu"]),
        ("auto", None, BOTH, ["cuda:0", "cuda:1", "cpu"]),
        ("auto", None, {"cuda": 0, "hip": 1}, ["hip:0", "cpu"]),
        ("cuda", 1, BOTH, ["cuda:0", "cpu", "cpu"]),
        ("cuda", None, BOTH, ["cuda:0", "cuda:1"]),
        ("cuda:1", None, BOTH, ["cuda:1"]),
        ("hip,cuda,cpu,cuda", None, BOTH, ["hip:0", "cuda:0", "cpu", "cuda:1"]),
    ],
)
def test_which_rank_has_which_gpu(wish: str, gpus: int | None, visible: dict[str, int], devices: list[str]) -> None:
    assert [choose_device(check_devices(wish), gpus, rank, visible) for rank in range(len(devices))] == devices


@pytest.mark.parametrize(
    ("wish", "gpus", "rank", "words"),
    [
        ("cuda", None, 2, "wanted 3 GPUs of cuda, this machine shows 2"),
        ("hip", 2, 1, "wanted 2 GPUs of hip, this machine shows 1"),
        ("cuda,cpu", None, 2, "a device for each rank"),
        ("cuda,cpu", 1, 0, "wanted one of them"),
    ],
)
def test_gpus_that_are_not_there_are_refused(wish: str, gpus: int | None, rank: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        choose_device(wish, gpus, rank, BOTH)


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "cpu:1", "cuda,auto"])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_devices(text)


def test_a_gpu_where_there_is_none_is_an_error_in_one_line() -> None:
    status, _, said = perf("allreduce", "-g", "1", "-e", "8", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert status == 1
    assert "wanted 1 GPUs, this machine shows none" in said


# On fakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.fakes
@pytest.mark.timeout(200)
@parametrize("vendor", ["cuda", "hip"], first=0)
def test_two_gpus_and_a_cpu(vendor: str, cache: dict[str, str]) -> None:
    words = ["allreduce", "alltoall", "-n", "3", "-g", "2", "-b", "8", "-e", "4K", "-f", "512", "--iters", "3"]
    status, out, said = perf(*words, "--json", "-", **fakes.environment(vendor, devices=2, timeout=60), **cache)
    assert status == 0, said
    document = json.loads(out)
    assert document["env"]["device"] == f"{vendor}+host"
    assert len(document["rows"]) == 8
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert all(row["time_us"] > 0 for row in document["rows"])
    assert "GPU calls are timed in a row on one stream" in said


@pytest.mark.fakes
@pytest.mark.timeout(200)
@parametrize("vendor", ["cuda", "hip"], first=1)
def test_a_graph_is_captured_and_run(vendor: str, cache: dict[str, str]) -> None:
    own = fakes.environment(vendor, devices=2, timeout=60) | cache
    words = ["allreduce", "-g", "2", "-b", "4K", "-e", "4K", "--iters", "3"]
    status, out, said = perf(*words, "--graph", "2", **own)
    assert status == 0, said
    assert "in a captured graph, run 2 times" in out
    assert "values : 0 OK" in out


@pytest.mark.fakes
@pytest.mark.timeout(200)
@parametrize(("total", "wrong"), [("total", False), ("inp()", True)], first=1)
def test_an_algorithm_of_ones_own_runs_on_gpus(total: str, wrong: bool, tmp_path: Path, cache: dict[str, str]) -> None:
    """Among three islands. One that loses what came first makes wrong elements: so it is what ran."""
    (tmp_path / "own.py").write_text(star.source().replace("out(), total, peer", f"out(), {total}, peer"))
    words = ["allreduce", "-n", "3", "-g", "3", "-b", "2M", "-e", "2M", "--iters", "2", "--json", "-"]
    asked = {"HETCOLL_ALGO": "allreduce:star", "HETCOLL_ISLANDS": "0|1|2"}
    env = fakes.environment("cuda", devices=3, timeout=60) | cache | asked
    status, out, said = perf(*words, "--import", str(tmp_path / "own.py"), **env)
    assert status == wrong, said
    rows = json.loads(out)["rows"]
    assert {row["algorithm"] for row in rows} == {"star"}
    assert (rows[0]["wrong"] > 0) == wrong  # in place an input that is added twice may hold the sum


@pytest.mark.fakes
@pytest.mark.thorough
def test_a_graph_needs_a_gpu_on_every_rank(cache: dict[str, str]) -> None:
    status, _, said = perf(
        "allreduce", "-n", "2", "-g", "1", "-e", "8", "--graph", **fakes.environment("cuda", timeout=60), **cache
    )
    assert status == 1
    assert "--graph: wanted a GPU for every rank, rank 1 has none" in said


# Comparing ----------------------------------------------------------------------------------------------------------


def row(op: str, nbytes: int, place: str, time_us: float) -> Row:
    return Row(op, "host", "shm", "ring", 2, nbytes, 2, "float32", "sum", -1, place, time_us, 1, 1, 1.0, 1.0, 0)


# As they print: nccl-tests 2.17, osu-micro-benchmarks 7.4 and 5.6, and comms.py of PARAM.
NCCL_TESTS = """\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: alltoall_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 128(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1234 on     node1 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1234 on     node1 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             1     float    none      -1    20.01    0.00    0.00       0    19.50    0.00    0.00     N/A
        1024           128     float    none      -1    22.30    0.05    0.02       0    21.17    0.05    0.02     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.0123456
#
# Collective test concluded: alltoall_perf
"""
OLD_NCCL_TESTS = NCCL_TESTS.replace(
    "# Collective test starting: alltoall_perf", "# ./build/sendrecv_perf -b 8 -e 1024 -g 2"
)
OSU = """\

# OSU MPI Allreduce Latency Test v7.4
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       1.11              1.00              1.30        1000
1024                    2.75              2.50              3.00        1000

# OSU MPI-CUDA All-to-All Personalized Exchange Latency Test v5.6.3
# Size       Avg Latency(us)
1                      16.36
512                    20.00

# OSU MPI Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)        Validation
8                       0.22              Pass

# OSU NCCL Broadcast Latency Test v7.4
# Datatype: ncclChar.
# Size       Avg Latency(us)
4096                   12.50

# OSU MPI Bandwidth Test v7.4
# Datatype: MPI_CHAR.
# Size      Bandwidth (MB/s)
8                      35.10
"""
PARAM = """\
\tMaster node: localhost, rank: 0, world_size: 2

\tCOMMS-RES                                size (B)   nElementsPerRank   Latency(us):p50         p75         p95         Min         Max    AlgBW(GB/s) BusBW(GB/s)TotalLatency(us):p50
\tCOMMS-RES-all_reduce-float32              1024               256              31.5        32.0        33.0        30.0        34.0          0.033       0.033         0.0
\tCOMMS-RES-all_gather_base-float32-tag     2048               256              41.5        42.0        43.0        40.0        44.0          0.049       0.025         0.0
"""  # noqa: E501
PAIRS = """\
\tCOMMS-RES                          total-size (B)   nElementsPerRank   nElementsPairPerRank   Latency(us):p50         p75         p95         Min         Max
\tCOMMS-RES-all_to_all-float32              1024               128                    64              51.5        52.0        53.0        50.0        54.0      0.020   0.010    0.0
"""  # noqa: E501


def test_all_four_formats_are_read(tmp_path: Path) -> None:
    def read(text: str) -> list[compare.Known]:
        path = tmp_path / "other.txt"
        path.write_text(text)
        return compare.read(str(path))

    K = compare.Known  # noqa: N806
    times = [(8, "out", 20.01), (8, "in", 19.5), (1024, "out", 22.3), (1024, "in", 21.17)]
    assert read(NCCL_TESTS) == [K("alltoall", *each) for each in times]
    assert read(OLD_NCCL_TESTS) == [K("sendrecv", *each) for each in times]
    assert read(OSU) == [
        K("allreduce", 4, "", 1.11), K("allreduce", 1024, "", 2.75), K("alltoall", 1, "", 16.36, True),
        K("alltoall", 512, "", 20.0, True), K("pingpong", 8, "", 0.22), K("broadcast", 4096, "", 12.5),
    ]  # fmt: skip
    assert read(PARAM) == [K("allreduce", 1024, "", 31.5), K("allgather", 2048, "", 41.5)]
    assert read(PAIRS) == [K("alltoall", 1024, "", 51.5)]
    ours = {"schema": 1, "env": {}, "rows": [{"op": "allgather", "nbytes": 8, "place": "in", "time_us": 2.0}]}
    assert read(json.dumps(ours)) == [K("allgather", 8, "in", 2.0)]


NO_TIMES = "# OSU MPI Bandwidth Test v7.4\n# Size      Bandwidth (MB/s)\n8  9.0\n"


@pytest.mark.parametrize("text", ["nothing", "{}", '{"rows": [{"op": 1}]}', NO_TIMES])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"--compare: .*other\.txt"):
        compare.read(str(path))
    with pytest.raises(ArgumentError, match="readable file"):
        compare.read(str(tmp_path / "none"))


def test_what_both_measured_is_compared(tmp_path: Path) -> None:
    known = [compare.Known("allreduce", 8, "", 3.0), compare.Known("allgather", 8, "", 9.0)]
    rows = [row("allreduce", 8, "out", 1.5), row("allreduce", 16, "out", 1.0), row("allreduce", 8, "in", 6.0)]
    assert compare.lines(rows, known) == [
        "# compared: 2 of 3 measurements",
        "# allreduce 8 B out: 1.50 us, was 3.00 us: 2.00 times as fast",
        "# allreduce 8 B in: 6.00 us, was 3.00 us: 0.50 times as fast",
    ]
    assert compare.lines(rows, []) == []
    assert compare.lines([row("alltoall", 16, "out", 1.0)], [compare.Known("alltoall", 8, "", 3.0, True)])[1:] == [
        "# alltoall 16 B out: 1.00 us, was 3.00 us: 3.00 times as fast"  # to OSU it is 8 bytes for each of two ranks
    ]


# Drawing ------------------------------------------------------------------------------------------------------------


def test_a_figure_that_cannot_be_drawn_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"ends in \.png or \.svg"):
        plot.check(str(tmp_path / "a.pdf"))
    with pytest.raises(ArgumentError, match="folder that is there"):
        plot.check(str(tmp_path / "none" / "a.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"pip install 'hetcoll\[plot\]'"):
        plot.check(str(tmp_path / "a.svg"))


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.thorough
def test_a_figure_for_light_and_for_dark_pages(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    env = {"ranks": 2, "device": "host", "transport": "shm"}
    rows = [row("allreduce", 8 << i, place, 1.0 + i) for i in range(12) for place in ("out", "in")]
    made = plot.draw(str(tmp_path / f"a.{suffix}"), env, [*rows, row("barrier", 0, "out", 1.0)])
    assert [path.name for path in made] == [f"a.{suffix}", f"a-dark.{suffix}"]
    begin = {"svg": b"<?xml", "png": b"\x89PNG"}[suffix]
    contents = [path.read_bytes() for path in made]
    assert all(content.startswith(begin) for content in contents)
    assert contents[0] != contents[1]
