"""`hetcoll perf`: formulas, patterns, verification, table and files; then the command itself."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import DEADLINE
from thorough import parametrize

from hetcoll.cli import bench, cases, main, patterns, perf, report, sweeps, terminal, timing
from hetcoll.types import DType, ReduceOp, supports

SUM = ReduceOp.SUM


class World:
    """Ranks as threads: the collectives in NumPy, written down from their definitions. `fault` may spoil a result."""

    def __init__(self, size: int, fault: Callable[[int, np.ndarray], None] | None = None) -> None:
        self.size, self.fault = size, fault
        self.meeting = threading.Barrier(size, timeout=30)
        self.shared: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], queue.Queue[Any]] = {
            edge: queue.Queue()
            for edge in itertools.product(range(size), repeat=2)  # here, since two ranks may meet at one
        }

    def run(self, work: Callable[[FakeComm], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(FakeComm(self, rank))
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results


class FakeComm:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def _everyone(self, mine: Any) -> list[Any]:
        world = self.world
        world.shared[self.rank] = mine.copy() if isinstance(mine, np.ndarray) else mine
        world.meeting.wait()
        everyone = list(world.shared)
        world.meeting.wait()
        return everyone

    def _deliver(self, target: np.ndarray, values: np.ndarray) -> None:
        target[:] = values
        if self.world.fault is not None:
            self.world.fault(self.rank, target)

    def _reduce(self, buffers: list[np.ndarray], op: str) -> np.ndarray:
        ufunc = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
                 "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor, "band": np.bitwise_and,
                 "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op]  # fmt: skip
        total = buffers[0]
        for buffer in buffers[1:]:
            with np.errstate(over="ignore"):  # calls in place, again and again, grow without end
                total = ufunc(total, buffer).astype(total.dtype)
        if op == "avg":
            wide = total.astype(np.complex128 if total.dtype.kind == "c" else np.float64)
            total = wide / self.size if total.dtype.kind not in "iu" else np.trunc(wide / self.size)
        return total.astype(buffers[0].dtype)

    def allreduce(self, send, recv=None, op="sum"):
        self._deliver(send if recv is None else recv, self._reduce(self._everyone(send), op))

    def reduce(self, send, recv=None, op="sum", root=0):
        total = self._reduce(self._everyone(send), op)
        if self.rank == root:
            self._deliver(send if recv is None else recv, total)

    def allgather(self, send, recv):
        self._deliver(recv, np.concatenate(self._everyone(send)))

    def allgatherv(self, send, recv, *, counts):
        everyone = self._everyone(send)
        assert [len(part) for part in everyone] == list(counts)
        self._deliver(recv, np.concatenate(everyone))

    def reduce_scatter(self, send, recv, op="sum"):
        self.reduce_scatterv(send, recv, op, counts=(len(recv),) * self.size)

    def reduce_scatterv(self, send, recv, op="sum", *, counts):
        start = sum(counts[: self.rank])
        self._deliver(recv, self._reduce(self._everyone(send), op)[start : start + counts[self.rank]])

    def broadcast(self, buf, root=0):
        self._deliver(buf, self._everyone(buf)[root])

    def gather(self, send, recv=None, root=0):
        everyone = self._everyone(send)
        if self.rank == root:
            self._deliver(recv, np.concatenate(everyone))

    def scatter(self, send=None, recv=None, root=0):
        whole = self._everyone(send)[root]
        self._deliver(recv, whole[self.rank * len(recv) : (self.rank + 1) * len(recv)])

    def alltoall(self, send, recv, *, sendcounts=None, recvcounts=None):
        sendcounts = sendcounts or (len(send) // self.size,) * self.size
        parts = []
        for source, (buffer, counts) in enumerate(self._everyone((send.copy(), sendcounts))):
            start = sum(counts[: self.rank])
            parts.append(buffer[start : start + counts[self.rank]])
            assert recvcounts is None or len(parts[-1]) == recvcounts[source]
        self._deliver(recv, np.concatenate(parts))

    def sendrecv(self, sendbuf, dest, recvbuf, source):
        everyone = self._everyone((sendbuf.copy(), dest))
        data, to = everyone[source]
        assert to == self.rank
        self._deliver(recvbuf, data)

    def send(self, buf, dest):
        self.world.mail[self.rank, dest].put(buf.copy())

    def recv(self, buf, source):
        self._deliver(buf, self.world.mail[source, self.rank].get(timeout=60))

    def barrier(self):
        self.world.meeting.wait()

    def explain(self, op, nbytes):
        algorithm = "direct" if nbytes <= 4096 else "ring"
        return SimpleNamespace(algorithm=algorithm, transport="shm", channels=1 if nbytes <= 4096 else 2)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweeps.add_arguments(parser)
    return parser.parse_args(words)


# The formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "factor_of_4"),
    [
        ("allreduce", 1.5), ("allgather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0), ("reduce", 1.0),
        ("gather", 0.75), ("scatter", 0.75), ("alltoall", 0.75), ("sendrecv", 1.0), ("alltoallv", 0.75),
        ("allgatherv", 0.75), ("reduce_scatterv", 0.75), ("oneway", 1.0), ("pingpong", 1.0),
    ],
)  # fmt: skip
def test_busbw_is_that_of_nccl_tests(op: str, factor_of_4: float) -> None:
    algbw, busbw = cases.bandwidths(op, 4, 4_000_000, 1000.0)
    assert algbw == pytest.approx(4.0)
    assert busbw == pytest.approx(4.0 * factor_of_4)


def test_one_rank_has_no_bus() -> None:
    assert cases.busbw_factor("allreduce", 1) == 0.0
    assert cases.busbw_factor("allgather", 1) == 0.0


@pytest.mark.parametrize(
    ("op", "send", "recv", "count", "total"),
    [
        ("allreduce", 100, 100, 100, 100), ("allgather", 25, 100, 25, 100), ("reduce_scatter", 100, 25, 25, 100),
        ("broadcast", None, 100, 100, 100), ("alltoall", 100, 100, 25, 100), ("gather", 25, 100, 25, 100),
        ("scatter", 100, 25, 25, 100), ("sendrecv", 100, 100, 100, 100), ("reduce", 100, 100, 100, 100),
        ("oneway", 100, None, 100, 100), ("pingpong", 100, 100, 100, 100),
    ],
)  # fmt: skip
def test_sizes_and_counts_are_those_of_nccl_tests(op: str, send: int, recv: int, count: int, total: int) -> None:
    shape = cases.shape(op, 4, 0, 103 if op in ("allgather", "gather", "scatter", "reduce_scatter") else 100, 0)
    assert (shape.send, shape.recv, shape.count, shape.total) == (send, recv, count, total)


def test_uneven_counts_are_uneven_and_complete() -> None:
    for total in (0, 1, 5, 600, 1009):
        for size in (1, 2, 3, 4, 7):
            parts = cases.uneven(total, size)
            assert sum(parts) == total
            assert len(parts) == size
    assert cases.uneven(600, 3) == (100, 200, 300)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("4k", 4096), ("64M", 64 << 20), ("1G", 1 << 30), ("2MiB", 2 << 20)]
)
def test_sizes_have_suffixes(text: str, nbytes: int) -> None:
    assert sweeps.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "8X", "M8"])
def test_a_bad_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a size"):
        sweeps.parse_size(text)


def test_sweep_steps_by_factor_or_bytes_and_measures_nothing_twice() -> None:
    assert sweeps.sizes(arguments("allreduce", "-b", "8", "-e", "64", "-f", "2"), "allreduce", 2, DType.FLOAT32) == [
        2, 4, 8, 16,
    ]  # fmt: skip
    assert sweeps.sizes(arguments("allreduce", "-b", "8", "-e", "32", "-i", "8"), "allreduce", 2, DType.FLOAT32) == [
        2, 4, 6, 8,
    ]  # fmt: skip
    counts = sweeps.sizes(arguments("allgather", "-b", "1", "-e", "64", "-f", "2"), "allgather", 4, DType.FLOAT32)
    totals = [cases.shape("allgather", 4, 0, count, 0).total for count in counts]
    assert totals == [4, 8, 16]


def test_jobs_leave_out_what_a_type_has_not() -> None:
    jobs = sweeps.expand(arguments("allreduce", "-d", "complex64", "-o", "all"), 2)
    assert {job.redop for job in jobs} == {ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG}
    assert [job.root for job in sweeps.expand(arguments("broadcast", "-r", "-1"), 3)] == [0, 1, 2]
    assert {job.op for job in sweeps.expand(arguments("all"), 2)} == set(cases.OPS)
    with pytest.raises(SystemExit, match="from 0 to 1"):
        sweeps.expand(arguments("broadcast", "-r", "2"), 2)
    with pytest.raises(SystemExit, match="nothing to measure"):
        sweeps.expand(arguments("sendrecv", "--inplace"), 2)
    with pytest.raises(SystemExit, match="nothing to measure"):
        sweeps.expand(arguments("pingpong"), 1)


# The patterns -------------------------------------------------------------------------------------------------------


@parametrize("dtype", list(DType), first=4)
@parametrize("size", [7, 2, 20], first=1)
def test_every_partial_result_is_exact_in_the_element_type(dtype: DType, size: int) -> None:
    """A reduction in the element type, in any order, gives what integers give; else equality proves nothing."""
    kind = patterns.numpy_dtype(dtype)
    for redop in ReduceOp:
        if not supports(dtype, redop) or redop is ReduceOp.AVG:
            continue
        pattern = patterns.Pattern(dtype, size, 7, redop)
        want = pattern.reduced()
        for order in (range(size), reversed(range(size))):
            got = FakeComm(World(size), 0)._reduce([pattern.table(rank) for rank in order], redop.label)
            assert got.dtype == kind
            assert np.array_equal(got, want), (redop, got[:8], want[:8])
        assert len(np.unique(want.astype(np.complex128))) > 1, f"{redop.label} of {dtype.label} is constant"


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E5M2, DType.INT8, DType.FLOAT32, DType.COMPLEX64, DType.BOOL])
def test_a_missing_rank_a_shift_and_a_stale_result_show(dtype: DType) -> None:
    size = 4
    for redop in (ReduceOp.SUM, ReduceOp.PROD):
        pattern = patterns.Pattern(dtype, size, 1, redop)
        right = pattern.reduced()
        buffers = [pattern.table(rank) for rank in range(size)]
        whole = [patterns.Piece(0, right.size, right)]
        assert patterns.count_wrong(right.copy(), whole) == 0
        missing = FakeComm(World(size), 0)._reduce(buffers[1:], redop.label)
        stale = patterns.Pattern(dtype, size, 2, redop).reduced()
        for spoiled in (missing, stale, np.roll(right, 1), np.roll(right, 64)):
            assert patterns.count_wrong(spoiled, whole) > right.size // 100, (dtype, redop)


def test_an_average_may_be_off_by_one_unit_and_no_more() -> None:
    right = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    piece = [patterns.Piece(0, 4, np.resize(right, patterns.PERIOD))]
    near = np.nextafter(right, np.float32(9))
    assert patterns.count_wrong(near, piece) == 4
    assert patterns.count_wrong(near, piece, rounded=True) == 0
    assert patterns.count_wrong(np.nextafter(near, np.float32(9)), piece, rounded=True) == 4
    assert patterns.count_wrong(-right, piece, rounded=True) == 4


def test_a_bool_that_is_neither_0_nor_1_is_wrong() -> None:
    buffer = np.array([0, 1, 2, 90], np.uint8).view(np.bool_)
    table = np.resize(np.array([False, True, True, True]), patterns.PERIOD)
    assert patterns.count_wrong(buffer, [patterns.Piece(0, 4, table)]) == 2


def test_pieces_wrap_around_the_period() -> None:
    table = np.arange(patterns.PERIOD)
    buffer = np.zeros(3 * patterns.PERIOD + 5, np.int64)
    piece = patterns.Piece(3, 3 * patterns.PERIOD, table, phase=patterns.PERIOD - 2)
    patterns.write(buffer, [piece])
    assert buffer[:7].tolist() == [0, 0, 0, patterns.PERIOD - 2, patterns.PERIOD - 1, 0, 1]
    assert patterns.count_wrong(buffer, [piece]) == 0
    buffer[-3] += 1
    assert patterns.count_wrong(buffer, [piece]) == 1


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

ROW_KEYS = [
    "op", "device", "transport", "algorithm", "ranks", "nbytes", "count", "dtype", "redop", "root", "place", "time_us",
    "p50_us", "p99_us", "algbw_gbs", "busbw_gbs", "wrong",
]  # fmt: skip


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


# On a terminal -------------------------------------------------------------------------------------------------------


def test_progress_goes_where_it_was_asked_for() -> None:
    said = {}
    for mode in ("off", "lines", "terminal"):
        out = io.StringIO()
        progress = terminal.Progress(2, mode, out)
        progress.show("allreduce 8 B")
        progress.clear()
        said[mode] = out.getvalue()
    assert said["off"] == ""
    assert said["lines"] == "\x00[1/2] allreduce 8 B\n"
    assert said["terminal"] == "\r\x1b[K[1/2] allreduce 8 B\r\x1b[K"


def test_the_screen_keeps_progress_below_the_output() -> None:
    out, terminal_bytes = io.BytesIO(), io.BytesIO()
    screen = terminal.Screen(out, terminal_bytes)
    screen.stderr.write(b"\x00[1/2] first\n")
    screen.stdout.write(b"row\n")
    screen.stderr.write(b"a warning\n\x00[2/2] second\n")
    screen.clear()
    assert out.getvalue() == b"row\n"
    clear = b"\r\x1b[K"
    assert terminal_bytes.getvalue() == b"".join(
        [clear, b"[1/2] first", clear, b"a warning\n", clear, b"[2/2] second", clear]
    )


# The command ----------------------------------------------------------------------------------------------------------


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")} | environ
    return subprocess.run(
        [sys.executable, "-m", "hetcoll", *words], env=env, capture_output=True, text=True, timeout=DEADLINE
    )


@parametrize("transport", ["shm", "tcp"], first=1)
def test_every_operation_is_right_between_two_ranks(transport: str, tmp_path: Any) -> None:
    json_file = tmp_path / "perf.json"
    words = ["perf", "all", "-n", "2", "-b", "64", "-e", "256K", "-f", "64", "--iters", "3", "--transport", transport]
    done = command(*words, "--json", str(json_file))
    assert done.returncode == 0, done.stderr
    assert "\x00" not in done.stdout + done.stderr
    document = json.loads(json_file.read_text())
    assert {row["op"] for row in document["rows"]} == set(cases.OPS)
    assert {row["transport"] for row in document["rows"]} == {transport}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in document["rows"])
    assert all(list(row) == ROW_KEYS for row in document["rows"])


@pytest.mark.thorough
def test_every_type_and_reduction_is_right_among_three_ranks(tmp_path: Any) -> None:
    json_file = tmp_path / "perf.json"
    words = ["perf", "allreduce", "-n", "3", "-b", "1000", "-e", "1000", "--iters", "2", "-w", "0"]
    done = command(*words, "-d", "all", "-o", "all", "--json", str(json_file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(json_file.read_text())["rows"]
    pairs = {(row["dtype"], row["redop"]) for row in rows}
    assert pairs == {(d.label, r.label) for d in DType for r in ReduceOp if supports(d, r)}
    assert all(row["wrong"] == 0 for row in rows)


def test_one_rank_alone_is_measured_without_a_launcher() -> None:
    done = command("perf", "allreduce", "allgather", "-n", "1", "-e", "64", "--iters", "2")
    assert done.returncode == 0, done.stderr
    assert "# 1 rank on 1 host" in done.stdout


def test_it_joins_the_ranks_of_a_launcher() -> None:
    perf_words = ["perf", "allreduce", "-e", "8", "--iters", "2", "-n", "9"]
    done = command("run", "--no-prefix", "-n", "3", "-m", "hetcoll", *perf_words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# 3 ranks on 1 host") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["allreduce", "-b", "9", "-e", "8"], "larger than"), (["allredice"], "invalid choice"),
        (["allreduce", "-n", "0"], "from 1"), (["allreduce", "-d", "float33"], "wanted all or one of"),
        (["allreduce", "-o", "plus"], "wanted all or one of"), (["allreduce", "-b", "8Q"], "wanted a size"),
        (["broadcast", "-n", "1", "-r", "1"], "a rank from 0 to 0"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_message(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["perf", *words])
    # It ends with argparse's 2 and a message, or with a message alone, which is a status of 1 and goes to stderr, too.
    assert complaint in (capsys.readouterr().err if end.value.code == 2 else str(end.value.code))
