"""What a running job shows: its last calls as text, on a signal and as a trace; for whom a call waits; its log."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from calls import f32
from patience import DEADLINE
from ranks import Ranks, wait_until

import hetcoll
from hetcoll.config.env import Config
from hetcoll.config.process import configure
from hetcoll.health.desync_report import Answer
from hetcoll.health.diagnosis import Diagnosis
from hetcoll.rendezvous.protocol.news import Query

Launch = Callable[..., Ranks]


def calls_and_dump(comm: hetcoll.Communicator) -> tuple[str, str]:
    for _ in range(3):
        comm.allreduce(f32(1000))
    comm.allreduce(f32(5), async_op=True).wait()
    other = 1 - comm.rank
    comm.sendrecv(f32(7), other, f32(7), other)
    whole, last = comm.dump(), comm.dump(1)
    for _ in range(1500):
        comm.barrier()
    assert len(comm.dump(5000).splitlines()) == 1 + 1023 + 1
    return whole, last


def test_the_last_calls_are_told(launch: Launch) -> None:
    for rank, (whole, last) in enumerate(launch(2).run(calls_and_dump)):
        head, *lines = whole.splitlines()
        assert head == f"rank {rank} of 2: 5 calls, the latest last"
        assert [line.split()[:2] for line in lines] == [["collective", f"#{i}"] for i in (1, 2, 3, 4)] + [
            ["message", "#1"]
        ]
        assert all("allreduce(float32, count=1000, op=sum) at " in line for line in lines[:3])
        assert all(", 4000 B: began " in line for line in lines[:3])
        assert all("took " in line for line in lines)
        assert last.splitlines()[1:] == lines[-1:] or "message #1" in last


def test_who_is_still_making_its_communicator_has_no_answer_to_a_question_by_name() -> None:
    """As `trace` asks them. What it is in, and how much it has called, it can tell."""
    diagnosis = Diagnosis(SimpleNamespace(), b"", 0, 2)  # type: ignore[arg-type]
    assert diagnosis.on_event(b"", Query(1, json.dumps("calls").encode())) == b"null"
    told = diagnosis.on_event(b"", Query(1, json.dumps((0, [])).encode()))
    assert told is not None
    assert Answer.decode(told) == Answer(0, {})


def call_without_last(comm: hetcoll.Communicator, at: str) -> str:
    """The last rank calls nothing before the others' warning was seen."""
    told = Told()
    logging.getLogger("hetcoll").addHandler(told)
    if comm.rank == comm.size - 1:
        wait_until(lambda: Path(at).exists(), 60)
    comm.allreduce(f32(3))
    return "\n".join(told.lines)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "has waited" in self.lines[-1]:
            Path(os.environ["SEEN_AT"]).touch()


def test_a_warning_says_for_whom_a_call_waits(launch: Launch, tmp_path: Path) -> None:
    at = str(tmp_path / "seen")
    first, second, last = launch(3, HETCOLL_WARN_AFTER="1", SEEN_AT=at).run(call_without_last, at)
    assert re.search(r"rank 0 has waited \d+ s in allreduce\(float32, count=3, op=sum\) at ", first)
    assert "rank 2 did not call it" in first
    assert first.count("has waited") == 1
    assert "has waited" not in second + last


def receive_late(comm: hetcoll.Communicator) -> list[str]:
    told = Told()
    logging.getLogger("hetcoll").addHandler(told)
    if comm.rank == 0:
        wait_until(lambda: comm._diagnosis.questions.asked > 0, 60)  # when the other has asked it is past its warning
        comm.send(f32(2), 1)
    else:
        comm.recv(f32(2), 0)
    return told.lines


def test_who_waits_in_a_receive_says_nothing(launch: Launch, tmp_path: Path) -> None:
    assert launch(2, HETCOLL_WARN_AFTER="1", SEEN_AT=str(tmp_path / "seen")).run(receive_late) == [[], []]


def trace(comm: hetcoll.Communicator, path: str) -> None:
    for count in (10, 20, 30):
        comm.allreduce(f32(count))
    sent, got = f32(2 + comm.rank), f32(2 + (comm.rank - 1) % comm.size)
    comm.sendrecv(sent, (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
    comm.barrier()  # a call that has not ended is none of the trace's
    if comm.rank == 1:
        comm.trace(path)
    comm.barrier()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_trace_has_all_ranks_on_one_clock(launch: Launch, tmp_path: Path, hosts: int) -> None:
    path = tmp_path / "trace.json"
    env = {} if hosts == 1 else {"HETCOLL_HOST_ID": tuple(f"h{rank}" for rank in range(3))}
    launch(3, **env).run(trace, str(path))
    document = json.loads(path.read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X" and event["name"] == "allreduce"]
    assert {event["pid"] for event in spans} == {0, 1, 2}
    for count in (10, 20, 30):
        alike = [event for event in spans if f"count={count}," in event["args"]["what"]]
        assert len(alike) == 3
        assert all(event["args"]["bytes"] == 4 * count for event in alike)
        # None ends before all have begun: that is so on one clock alone.
        assert min(event["ts"] + event["dur"] for event in alike) >= max(event["ts"] for event in alike)
    both = [event for event in document["traceEvents"] if event["ph"] == "X" and event["name"].startswith("send")]
    assert {event["pid"]: event["args"]["bytes"] for event in both} == {0: 16, 1: 12, 2: 16}  # the larger of the two
    assert document["otherData"]["silent_ranks"] == []


SIGNALLED = """
import os, signal, sys
import numpy as np
import hetcoll
with hetcoll.init() as comm:
    comm.allreduce(np.ones(9))
    os.kill(os.getpid(), signal.SIGUSR2)
    comm.barrier()
"""


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_signal_prints_the_last_calls_where_that_is_asked_for(asked: str) -> None:
    env = {**os.environ, "HETCOLL_SIGUSR2": asked}
    done = subprocess.run([sys.executable, "-c", SIGNALLED], env=env, capture_output=True, text=True, timeout=DEADLINE)
    if asked == "1":
        assert done.returncode == 0, done.stderr
        assert (
            "rank 0 of 1: 1 calls, the latest last\n  collective #1 allreduce(float64, count=9, op=sum)" in done.stderr
        )
    else:
        assert done.returncode == -signal.SIGUSR2


SIGNALLED_IN_CHILD = """
import os, signal
import numpy as np
import hetcoll
with hetcoll.init() as comm:
    comm.allreduce(np.ones(9))
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_prints_none_of_its_parents_calls() -> None:
    env = {**os.environ, "HETCOLL_SIGUSR2": "1"}
    words = [sys.executable, "-c", SIGNALLED_IN_CHILD]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1" not in done.stderr


COLLECTED = """
import gc, threading
from hetcoll.health.status_report import innermost_frames

class Dropped:
    def __init__(self):
        self.itself = self
    def __del__(self):
        threading.Thread(target=int).start()

begun, over = threading.Semaphore(0), threading.Event()
def wait():
    begun.release()
    over.wait()
for _ in range(100):
    threading.Thread(target=wait).start()
for _ in range(100):
    begun.acquire()
gc.collect()
gc.disable()
for _ in range(20):
    Dropped()
gc.set_threshold(gc.get_count()[0] + 30)
gc.enable()
frames = innermost_frames()
assert gc.isenabled()
over.set()
print(len(frames))
"""


def test_frames_are_found_where_garbage_that_starts_threads_is_due() -> None:
    """As many objects are made on the way as the collector waits for."""
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 101


def scraped(comm: hetcoll.Communicator) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    from hetcoll.tools import prometheus

    registry = CollectorRegistry()
    prometheus.register(comm, registry)
    for _ in range(3):
        comm.allreduce(f32(1))
    part = comm.split(0)
    prometheus.register(part, other := CollectorRegistry())
    part.abort("what it has counted is of use then")
    assert b"hetcoll_collectives_total{" in generate_latest(other)
    if (child := os.fork()) == 0:
        empty = False
        try:
            empty = generate_latest(other) == b""  # it is the parent's
        finally:
            os._exit(not empty)
    assert os.waitpid(child, 0)[1] == 0
    part.close()
    assert generate_latest(other) == b""
    return generate_latest(registry).decode()


def test_prometheus_reads_the_counters(launch: Launch) -> None:
    pytest.importorskip("prometheus_client")
    for rank, text in enumerate(launch(2).run(scraped)):
        value = next(line for line in text.splitlines() if line.startswith("hetcoll_collectives_total{"))
        assert f'rank="{rank}",size="2"' in value
        assert float(value.split()[-1]) >= 3


LOGS = """
import logging
import hetcoll
logging.basicConfig(format="own %(message)s", level=logging.INFO)
with hetcoll.init() as comm:
    pass
"""


def test_no_line_is_logged_twice() -> None:
    for program, expected in ((LOGS, "own "), (LOGS.replace("logging.basicConfig", "dict"), " hetcoll INFO ")):
        env = {**os.environ, "HETCOLL_DEBUG": "info"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=DEADLINE
        )
        lines = [line for line in done.stderr.splitlines() if "communicator world: 1 rank on 1 host" in line]
        assert len(lines) == 1, done.stderr
        assert expected in lines[0]


SPLITS = """
import hetcoll
with hetcoll.init() as comm, comm.split(0) as other:
    other.barrier()
"""


def test_what_is_told_of_a_job_without_trouble_is_a_line_a_communicator(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPLITS)
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "3", str(program)]
    env = {**os.environ, "HETCOLL_DEBUG": "info"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE, check=True)
    lines = [line for line in done.stderr.splitlines() if "the store waits" not in line]
    assert len(lines) == 2, done.stderr
    assert all(" communicator " in line and line.endswith(": 3 ranks on 1 host, shm inside") for line in lines), lines


def test_a_level_that_the_program_has_set_stays() -> None:
    logger = logging.getLogger("hetcoll")
    before, handlers = logger.level, list(logger.handlers)
    try:
        logger.setLevel(logging.ERROR)
        configure(Config(debug="debug"))
        assert (logger.level, logger.handlers) == (logging.ERROR, handlers)
    finally:
        logger.setLevel(before)
