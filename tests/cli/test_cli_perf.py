"""`hetcoll perf`: what is verified, measured and reported, with ranks that are threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from perf_ranks import ROW_KEYS, SUM, FakeComm, World, arguments
from thorough import parametrize

from hetcoll.cli import bench, cases, perf, report, timing
from hetcoll.types import DType

# The cases ----------------------------------------------------------------------------------------------------------


def all_cases(size: int, elements: int, root: int = 0) -> list[tuple[str, bool]]:
    return [(op, place == "in") for op in cases.OPS for place in cases.places(op)]


@parametrize("size", [1, 2, 3, 5], first=2)
@pytest.mark.parametrize("elements", [1, 7, 1000, 70000])
def test_right_collectives_verify(size: int, elements: int) -> None:
    root = size - 1

    def work(comm: FakeComm) -> list[int]:
        wrong = []
        for op, inplace in all_cases(size, elements):
            redop = SUM if op in cases.REDUCING else None
            case = cases.Case(comm, op, elements, DType.FLOAT32, redop, root, inplace)
            for seed in (1, 2):
                case.fill(seed)
                comm.barrier()
                case.call()
                wrong.append(case.wrong())
        return wrong

    assert all(wrong == 0 for rank in World(size).run(work) for wrong in rank)


def _one_element(rank: int, target: np.ndarray) -> None:
    if rank == 1 and target.size:
        target[target.size // 2] += 1


def _overrun(rank: int, target: np.ndarray) -> None:
    if rank == 1:
        one_more = np.lib.stride_tricks.as_strided(target, (target.size + 1,), target.strides)
        one_more[-1] = 0


@pytest.mark.parametrize("fault", [_one_element, _overrun])
@pytest.mark.parametrize("op", [op for op in cases.OPS if op != "barrier"])
def test_one_wrong_element_or_guard_byte_is_found(op: str, fault: Callable[[int, np.ndarray], None]) -> None:
    def work(comm: FakeComm) -> int:
        redop = SUM if op in cases.REDUCING else None
        case = cases.Case(comm, op, 1000, DType.FLOAT32, redop, 1, cases.places(op)[0] == "in")
        case.fill(1)
        case.call()
        return case.wrong()

    wrong = World(3, fault).run(work)
    assert wrong[1] == (1 if fault is _one_element else 4)
    assert wrong[0] == wrong[2] == 0


def test_a_changed_input_is_found() -> None:
    def work(comm: FakeComm) -> int:
        case = cases.Case(comm, "allreduce", 100, DType.INT32, SUM, 0, False)
        case.fill(1)
        case.call()
        assert case.buffers[0] is not None
        case.buffers[0][comm.rank] += 1
        return case.wrong()

    assert World(2).run(work) == [1, 1]


def test_what_nobody_wrote_is_found() -> None:
    def work(comm: FakeComm) -> int:
        case = cases.Case(comm, "allgather", 1000, DType.FLOAT64, None, 0, False)
        case.fill(1)
        return case.wrong()

    assert World(2).run(work) == [1000, 1000]


def test_buffers_are_aligned_to_pages() -> None:
    for count in (1, 1000, 100000):
        guarded = cases.Guarded.empty(count, np.dtype(np.float32))
        assert guarded.data.ctypes.data % cases.ALIGN == 0
        assert guarded.damaged() == 0


# Times --------------------------------------------------------------------------------------------------------------


def test_calls_fill_the_budget_within_limits() -> None:
    assert timing.Schedule.choose(0.3, None) == timing.Schedule(500, 10)
    assert timing.Schedule.choose(1000.0, None) == timing.Schedule(200, 1)
    assert timing.Schedule.choose(1e6, None) == timing.Schedule(5, 1)
    assert timing.Schedule.choose(0.3, 20) == timing.Schedule(20, 1)
    assert timing.Schedule.choose(0.3, 1000) == timing.Schedule(100, 10)


def test_samples_are_microseconds_a_call() -> None:
    calls = []
    schedule = timing.Schedule(20, 10)
    samples = timing.take_samples(lambda: calls.append(sum(range(1000))), schedule)
    assert len(calls) == 200
    assert samples.shape == (20,)
    assert 0.5 < np.median(samples) < 5000


def test_the_slowest_rank_is_reported() -> None:
    def work(comm: FakeComm) -> tuple[timing.Timing, int]:
        own = timing.Timing(10.0 - comm.rank, 1.0 + comm.rank, 2.0 + comm.rank)
        return timing.slowest(comm, own, comm.rank)

    assert World(3).run(work) == [(timing.Timing(10.0, 1.0, 2.0), 3)] * 3


@pytest.mark.parametrize(("op", "time_us"), [("pingpong", 5.0), ("oneway", 10.0)])
def test_a_pingpong_is_timed_one_way(monkeypatch: pytest.MonkeyPatch, op: str, time_us: float) -> None:
    """As osu_latency does: half of a call, which is a message there and one back."""
    monkeypatch.setattr(bench, "take_samples", lambda call, schedule: np.full(schedule.samples, 10.0))

    def work(comm: FakeComm) -> float:
        measured = bench.Bench(comm, arguments(op, "-e", "8"))
        return measured.measure(measured.sweeps[0][0], 2, "out").time_us

    assert World(2).run(work) == [time_us, time_us]


def test_nothing_is_verified_where_nobody_wants_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["allreduce", "-e", "8", "--iters", "2"]
    assert run_measure(2, words, _one_element) == [1, 1]
    assert "Every element of every buffer is verified" in capsys.readouterr().out
    assert run_measure(2, [*words, "-c", "0"], _one_element) == [0, 0]
    out = capsys.readouterr().out
    assert "Nothing is verified" in out
    assert "Out of bounds" not in out
    (line,) = (line.split() for line in out.splitlines() if not line.startswith("#"))
    assert (line[8], line[12]) == ("N/A", "N/A")


# The report ---------------------------------------------------------------------------------------------------------


def run_measure(size: int, words: list[str], fault: Callable[[int, np.ndarray], None] | None = None) -> list[int]:
    args = arguments(*words)
    return World(size, fault).run(lambda comm: perf.measure(comm, args, ["perf", *words], "0.0.test"))


def test_a_whole_run_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    json_file, csv_file = tmp_path / "perf.json", tmp_path / "perf.csv"
    words = ["allreduce", "alltoall", "barrier", "-b", "8", "-e", "32K", "-f", "64", "--iters", "5", "-d", "float16"]
    assert run_measure(2, [*words, "--json", str(json_file), "--csv", str(csv_file)]) == [0, 0]
    out = capsys.readouterr().out
    assert "# plan allreduce 8 B to 512 B: direct over shm, 1 channel\n" in out
    assert "# plan allreduce 32 KiB: ring over shm, 2 channels\n" in out
    assert "# Out of bounds values : 0 OK" in out
    lines = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["8", "512", "32768", "8", "512", "32768", "0"]
    assert lines[0][1:5] == ["4", "float16", "sum", "-1"]
    assert lines[6][9:13] == ["N/A"] * 4  # a barrier has no in-place form
    assert len(lines[0]) == 13
    assert max(len(line) for line in out.splitlines() if "plan" not in line and "# 0.0.test" not in line) <= 120

    document = json.loads(json_file.read_text())
    assert document["schema"] == 1
    assert document["env"]["hetcoll"] == "0.0.test"
    assert [list(row) for row in document["rows"]] == [ROW_KEYS] * 13
    first = document["rows"][0]
    assert (first["op"], first["ranks"], first["nbytes"], first["count"]) == ("allreduce", 2, 8, 4)
    assert (first["dtype"], first["place"], first["wrong"], first["device"]) == ("float16", "out", 0, "host")
    assert first["busbw_gbs"] == pytest.approx(first["nbytes"] / first["time_us"] / 1e3)
    assert csv_file.read_text().splitlines()[0] == ",".join(ROW_KEYS)
    assert len(csv_file.read_text().splitlines()) == 14


def test_a_wrong_element_makes_the_status_non_zero_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def fault(rank: int, target: np.ndarray) -> None:
        if rank == 1 and target.dtype == np.int32:  # the run's own bookkeeping is float64
            target[0] += 1

    assert run_measure(2, ["allreduce", "-b", "64", "-e", "64", "--iters", "2", "-d", "int32"], fault) == [1, 1]
    out = capsys.readouterr().out
    assert "FAILED" in out
    row = next(line.split() for line in out.splitlines() if not line.startswith("#"))
    assert int(row[8]) == 3  # before, after the timed calls, after
    assert int(row[12]) == 2  # in place there is no telling after the timed calls


def test_the_plan_lines_join_sizes_that_run_alike() -> None:
    lines = report.plan_lines(
        [
            report.PlanLine("allreduce", nbytes, "ring" if nbytes > 9 else "direct", "tcp", 1)
            for nbytes in (8, 9, 4096, 3 << 20)
        ]
    )
    assert lines == [
        "allreduce 8 B to 9 B: direct over tcp, 1 channel", "allreduce 4 KiB to 3 MiB: ring over tcp, 1 channel",
    ]  # fmt: skip
