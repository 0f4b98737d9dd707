"""From init to close: what is there meanwhile, and that nothing of it stays. Forks, exits, interrupts at any moment."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Job, Ranks, Resources, elapsed, wait_until

import hetcoll
from hetcoll.rendezvous import store
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.wire import Frame, Op

Launch = Callable[..., Ranks]
LINKS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def add(comm: hetcoll.Communicator, count: int = 4) -> float:
    x = np.full(count, comm.rank + 1.0)
    comm.allreduce(x)
    return float(x.sum()) / max(1, count)


def use_everything(comm: hetcoll.Communicator) -> None:
    """Every link, the engine's own thread, scratch memory, and a message longer than the rings."""
    for count in (1, 10, 100_000):
        add(comm, count)
    comm.allreduce(np.ones(1000), async_op=True).wait()
    comm.alltoall(np.ones(comm.size * 300_000), np.ones(comm.size * 300_000))
    comm.barrier()


def close_and_keep(job: Job, communicators: int) -> str:
    """What is left after close() although the objects still have names."""
    before = Resources.now()
    kept = [job.join()]
    for _ in range(communicators - 1):
        split = kept[0].split(0)
        assert split is not None
        kept.append(split)
    for comm in kept:
        use_everything(comm)
    for comm in kept:
        comm.close()
    job.comm = None
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    return Resources.now().left_over(before)


@LINKS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_close_gives_everything_back_at_once(launch: Launch, size: int, transport: str) -> None:
    ranks = launch(size, join=False, HETCOLL_TRANSPORT=transport)
    assert ranks.run(close_and_keep, 3) == [""] * size


def works_after_close(comm: hetcoll.Communicator) -> list[str]:
    """What every method says after close()."""
    x = np.ones(comm.size)
    add(comm)
    pending = comm.allreduce(np.ones(10), async_op=True)
    pending.wait()
    comm.close()
    comm.close()  # once more is fine
    comm.abort()  # and so is this
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: comm.allreduce(x),
        lambda: comm.allreduce(x, async_op=True),
        lambda: comm.allgather(x[:1].copy(), x),
        lambda: comm.reduce_scatter(x, x[:1].copy()),
        lambda: comm.broadcast(x),
        lambda: comm.reduce(x),
        lambda: comm.gather(x[:1].copy(), x),
        lambda: comm.scatter(x, x[:1].copy()),
        lambda: comm.alltoall(x, x.copy()),
        lambda: comm.allgatherv(x[:1], x.copy(), [1] * comm.size),
        lambda: comm.reduce_scatterv(x, x[:1].copy(), counts=[1] * comm.size),
        lambda: comm.barrier(),
        lambda: comm.send(x, 0),
        lambda: comm.recv(x, 0),
        lambda: comm.split(0),
        lambda: comm.explain("allreduce", 8),
        lambda: comm.group().__enter__(),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except hetcoll.ClosedError as error:
            said.append(str(error))
    assert comm.closed
    assert "closed" in repr(comm)
    assert (comm.rank, comm.size) == (comm.rank, comm.size)
    pending.wait()
    assert pending.done
    assert pending.error is None
    return said


def test_use_after_close(launch: Launch) -> None:
    for said in launch(2).run(works_after_close):
        assert set(said) == {"this communicator was closed"}


IMPORT = """
import sys, numpy
before = set(sys.modules)
import hetcoll
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("_")))
"""

STANDARD = {
    "array", "atexit", "base64", "binascii", "copy", "dataclasses", "errno", "fcntl", "hashlib", "hmac", "ipaddress",
    "json", "logging", "select", "selectors", "socket", "string", "threading", "traceback", "zlib",
}  # fmt: skip
"""What the library needs of Python's own, beside what NumPy loads."""

LATER = (
    "algorithms", "checks", "cli", "crosscheck", "devices", "float8", "gpu", "gpu_edges", "gpu_host", "gpu_plans",
    "gpu_proof", "gpu_share", "islands", "jax", "launch", "relays", "simulator", "slots", "torch", "verbs.library",
    "verbs.memory", "verbs.offer",
)  # fmt: skip
"""What is loaded when a call or a setting first needs it: all of GPUs, most of RDMA, plans, commands."""


def of_ours(names: Iterable[str], later: Sequence[str]) -> list[str]:
    """Those that are one of these modules of hetcoll, or in it."""
    return [name for name in names if f"{name}.".startswith(tuple(f"hetcoll.{each}." for each in later))]


def test_import_loads_nothing_that_is_not_needed() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= STANDARD | {"hetcoll"}
    assert "hetcoll.communicator" in loaded
    assert of_ours(loaded, LATER) == []


CPU_JOB = """
import sys, numpy, hetcoll
with hetcoll.init() as comm:
    comm.allreduce(numpy.ones(9))
    comm.barrier()
    print("loaded:", *sorted(sys.modules))
"""


def test_calls_on_cpus_load_nothing_of_gpus(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(CPU_JOB)
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "2", str(script)]
    env = os.environ | {"HETCOLL_DEVICE": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=env)
    loaded = [line.split() for line in done.stdout.splitlines() if "loaded:" in line]
    assert len(loaded) == 2
    for names in loaded:
        assert "hetcoll.algorithms" in names
        assert of_ours(names, [name for name in LATER if name != "algorithms"]) == []


def sleep(job: Job, seconds: float) -> None:
    time.sleep(seconds)


KILLED = """
import time
from ranks import Ranks
from test_lifecycle import sleep
ranks = Ranks(2, join=False)
ranks.start(sleep, 60)
print(ranks.pid(0), ranks.pid(1), flush=True)
time.sleep(60)
"""


def test_ranks_of_a_killed_test_run_are_gone_too() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2
            os.kill(pids[1], signal.SIGSTOP)
        finally:
            process.kill()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


# Forks.


def fork(child: Callable[[], int]) -> int:
    """The exit status of a forked child that runs `child` and leaves by os._exit."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child()
        finally:
            os._exit(status)
    return wait_for_child(pid)


def wait_for_child(pid: int) -> int:
    ended = wait_until(lambda: os.waitpid(pid, os.WNOHANG)[1:] if os.waitid(os.P_PID, pid, _PEEK) else None, 10.0)
    return os.waitstatus_to_exitcode(ended[0])


_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except hetcoll.ClosedError as error:
        return "forked process" in str(error)
    return False


def fork_idle(comm: hetcoll.Communicator) -> tuple[int, float]:
    """The child may not use the communicator, by the short way or the long; the parent goes on."""
    x = np.ones(4)
    comm.allreduce(x)
    calls = [lambda: comm.allreduce(x), comm.barrier, lambda: comm.split(0)]
    return fork(lambda: 0 if all(map(refused, calls)) else 1), add(comm)


@LINKS
def test_a_forked_child_is_refused_and_the_parent_goes_on(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(fork_idle) == [(0, 3.0)] * 2


FORK_AND_END = """
import os, threading
import numpy as np
import hetcoll

unique_id = hetcoll.get_unique_id()
ranks = {}

def join(rank):  # both ranks live in this process
    ranks[rank] = hetcoll.Communicator.init(2, rank, unique_id)

threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
works = [ranks[rank].allreduce(np.ones(1 << 20), async_op=True) for rank in range(2) for _ in range(3)]
pid = os.fork()
if pid == 0:
    works.clear()
    ranks.clear()
else:
    [work.wait() for work in works]
    assert os.waitpid(pid, 0)[1] == 0
print("parent" if pid else "child", flush=True)
"""


@LINKS
def test_a_child_forked_amid_asynchronous_calls_ends_in_order(transport: str) -> None:
    """The child's interpreter runs to its end, with the threads gone that its objects think they have."""
    env = {**os.environ, "HETCOLL_TRANSPORT": transport}
    done = subprocess.run([sys.executable, "-c", FORK_AND_END], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["child", "parent"])


def fork_while_another_thread_waits(comm: hetcoll.Communicator) -> tuple[int, float]:
    """The other thread sleeps inside a call, or holds the engine's lock, at the instant of the fork."""
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(add(comm, 10)))
    if comm.rank == 0:
        thread.start()
        wait_until(lambda: comm._engine.collectives == 1)
        status = fork(lambda: 0 if refused(comm.barrier) else 1)
        comm._session.control.put(b"forked", b"")
    else:
        comm._session.control.get(b"forked", 10)
        status = 0
        thread.start()
    thread.join(10)
    return status, got[0]


def test_fork_while_a_thread_is_in_a_call(launch: Launch) -> None:
    assert launch(2).run(fork_while_another_thread_waits) == [(0, 3.0)] * 2


def fork_with_new_job(comm: hetcoll.Communicator) -> tuple[int, float]:
    """A child may have communicators of its own."""

    def child() -> int:
        with hetcoll.Communicator.init(1, 0, hetcoll.get_unique_id()) as own:
            return 0 if add(own) == 1.0 and add(own) == 1.0 else 1

    return fork(child), add(comm)


def test_a_forked_child_may_start_a_job_of_its_own(launch: Launch) -> None:
    assert launch(2).run(fork_with_new_job) == [(0, 3.0)] * 2


# Beginnings.


def join_late(job: Job, absent: tuple[int, ...], timeout: float) -> str:
    """`absent` ranks never come; the error's text, and what is left of the attempt."""
    if job.rank in absent:
        return ""
    before = Resources.now()
    try:
        job.join(timeout)
    except hetcoll.InitError as error:
        wait_until(lambda: not Resources.now().left_over(before))
        return str(error)
    return "joined"


def test_ranks_that_never_come_are_named(launch: Launch) -> None:
    ranks = launch(4, join=False)
    with elapsed() as took:
        zero, one, two, three = ranks.run(join_late, (1, 2), 1.0)
    assert took[0] < 4.0
    assert (one, two) == ("", "")
    assert "ranks 1-2 of 4 never joined the job" in zero
    assert "ranks 1-2 of 4 never joined the job" in three


def join_and_count(job: Job) -> tuple[int, int, float]:
    """What a rank asked the store while it joined, the bytes of its answers, and a sum."""
    answers: list[int] = []
    call = ControlClient._call

    def count(self: ControlClient, op: Op, *args: Any) -> Frame:
        frame = call(self, op, *args)
        answers.extend([len(frame.body)] * (op != Op.QUERY))  # of ranks that are late, which is a matter of time
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlClient, "_call", count)
        comm = job.join(60)
    return len(answers), sum(answers), add(comm)


@pytest.mark.slow
def test_256_ranks(launch: Launch) -> None:
    """As many requests a rank as with few ranks, and bytes for each other rank."""
    size = 256
    few, found = (launch(n, join=False).run(join_and_count, timeout=100) for n in (3, size))
    assert max(row[0] for row in found) == max(row[0] for row in few) > 0
    assert max(row[1] for row in found) / size <= max(row[1] for row in few) / 3
    assert {total for _, _, total in found} == {size * (size + 1) / 2}


def join_and_tell(job: Job, absent: tuple[int, ...], folder: Path) -> None:
    """`absent` ranks never come; the others leave their name in the folder when they have joined and wait."""
    exchange = ControlClient.exchange

    def tell(self: ControlClient, *args: Any) -> list[bytes]:
        (folder / str(job.rank)).mkdir()
        return exchange(self, *args)

    if job.rank not in absent:
        ControlClient.exchange = tell  # type: ignore[method-assign, assignment]
        job.join(30)


def test_ctrl_c_while_joining(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(2, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until((tmp_path / "0").exists, 20)
    ranks.signal(0, signal.SIGINT)
    zero, one = ranks.finish(10)
    assert isinstance(zero.error, KeyboardInterrupt), zero.trace
    assert one.error is None


def test_a_rank_that_dies_while_others_join_is_named(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    killed = time.monotonic()
    ranks.kill(2)
    zero = ranks.finish(10, only=[0])[0]
    assert isinstance(zero.error, hetcoll.PeerLostError), zero.trace
    assert zero.error.rank == 2
    assert zero.ended - killed < 5


def test_the_death_of_the_stores_host_ends_joining(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    killed = time.monotonic()
    ranks.kill(0)
    two = ranks.finish(10, only=[2])[0]
    assert isinstance(two.error, hetcoll.PeerLostError), two.trace
    assert "hosts the job's store" in str(two.error)
    assert two.ended - killed < 5


def join_twice(comm: hetcoll.Communicator) -> list[str]:
    """Another process cannot be a rank that is there already; sizes must agree."""
    said = []
    unique_id = comm._session.control.unique_id
    for size, rank in ((2, 0), (3, 2), (2, 5), (0, 0)):
        try:
            hetcoll.Communicator.init(size, rank, unique_id, timeout=5)
            said.append("joined")
        except hetcoll.HetcollError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_wrong_ranks_and_sizes(launch: Launch) -> None:
    for taken, larger, outside, empty in launch(2).run(join_twice):
        assert re.match(r"InitError: two processes say that they are rank 0: .*", taken)
        assert re.match(r"InitError: rank 2 .* says that the job has 3 ranks", larger)
        assert outside == "ArgumentError: rank and size: wanted 0 <= rank < size, got rank 5 of size 2"
        assert empty == "ArgumentError: rank and size: wanted 0 <= rank < size, got rank 0 of size 0"


SETTINGS = {
    "HETCOLL_ALGO": ("ring", "tree"),
    "HETCOLL_TRANSPORT": ("auto", "tcp"),
    "HETCOLL_SHM_BYTES": ("4096", "8192"),
    "HETCOLL_SOCKET_STRIPES": ("1", "2"),
    "HETCOLL_CHECK": ("0", "1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_must_be_equal(launch: Launch, name: str) -> None:
    """Found at init, and not by data at the wrong place."""
    ranks = launch(2, join=False, **{name: SETTINGS[name]})
    for said in ranks.run(join_late, (), 20.0):
        assert re.match(rf"{name} is '?\w+'? on rank 0 and '?\w+'? on rank 1", said), said


def join_badly(job: Job, message: str) -> str:
    before = Resources.now()
    with pytest.raises(hetcoll.HetcollError, match=message) as caught:
        job.join(20)
    del caught
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    return Resources.now().left_over(before)


WRONG_SETTINGS = {
    "HETCOLL_ALGO": ("quantum", "names no algorithm: 'quantum'; there are "),
    "HETCOLL_FAULT": ("delay=often", "HETCOLL_FAULT: "),
    "HETCOLL_ISA": ("abacus", "HETCOLL_ISA: wanted an instruction set that this processor has, got 'abacus'"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_settings_that_cannot_be_obeyed(launch: Launch, name: str) -> None:
    """Said at init by name; nothing is left of the attempt."""
    value, message = WRONG_SETTINGS[name]
    ranks = launch(2, join=False, HETCOLL_TRANSPORT="tcp", **{name: value})
    assert ranks.run(join_badly, message) == ["", ""]


PROGRAM = """
import sys, threading, atexit
import numpy as np
import hetcoll
comm = hetcoll.init()
x = np.full(4, comm.rank + 1.0)
comm.allreduce(x)
assert x.tolist() == [3.0] * 4
{}
"""

ENDINGS = {
    "at its end": "",
    "by sys.exit": "sys.exit(0)",
    "with work in flight": "work = comm.allreduce(np.ones(1 << 20), async_op=True)",
    "with work in flight and dropped": "comm.allreduce(np.ones(1 << 20), async_op=True)",
    "with splits open": "other = comm.split(0); other.allreduce(x); third = other.split(comm.rank); comm.barrier()",
    "in a with block": "with comm: comm.barrier()",
    "closing at exit itself": "atexit.register(comm.close)",
    "with a cycle": "comm.me = comm; comm = None",
    "after init again": "comm.close(); comm = hetcoll.init(); comm.barrier()",
    "after an argument error": "try: comm.allreduce(x[::2])\nexcept TypeError: pass",
}


def run_program(text: str, size: int = 2, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Ranks as a launcher starts them, each an interpreter of its own."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    common |= {"LOCAL_WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", text],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=30)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return done


@LINKS
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_may_end(ending: str, transport: str) -> None:
    """Without close(), with whatever is in flight: both ranks end with status 0 and say nothing."""
    for done in run_program(PROGRAM.format(ENDINGS[ending]), HETCOLL_TRANSPORT=transport):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_uncaught_exception_is_what_the_user_sees() -> None:
    zero, one = run_program(PROGRAM.format("if comm.rank == 1: raise KeyError('mine')\ncomm.barrier()"))
    assert one.returncode == 1
    assert one.stderr.strip().endswith("KeyError: 'mine'")
    assert "hetcoll" not in one.stderr.split("Traceback")[0]
    assert zero.returncode == 1
    assert "PeerLostError: " in zero.stderr
    assert "rank 1 left while it was needed" in zero.stderr


def test_init_refuses_a_second_one_while_the_first_is_open() -> None:
    text = "try: hetcoll.init()\nexcept hetcoll.InitError as error: print(error)"
    for done in run_program(PROGRAM.format(text)):
        assert done.returncode == 0
        assert done.stdout.startswith("hetcoll.init() was called already and its communicator is open")


STAY = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
import hetcoll
comm = hetcoll.init()
others = comm.split(min(comm.rank, 1))
comm.barrier()
if comm.rank > 0:
    time.sleep(1.5)
    others.split(0).barrier()
{}
"""


def test_the_store_waits_at_exit_for_ranks_that_are_still_at_work() -> None:
    for done in run_program(STAY, 3, HETCOLL_LINGER="30"):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_store_does_not_wait_longer_than_it_may() -> None:
    zero, *rest = run_program(STAY, 3, HETCOLL_LINGER="0")
    assert (zero.returncode, zero.stderr) == (0, "")
    for done in rest:
        assert "PeerLostError: the process that hosts the job's store has ended" in done.stderr


def press_until_it_ends(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, again where the first one came before the store waits: as it ends, the interpreter may ignore one."""
    for _ in range(15):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
            return


@pytest.mark.parametrize("end", ["exception", "interrupt"])
def test_the_store_does_not_wait_after(end: str) -> None:
    """Others must hear of the exception at once, and who presses Ctrl-C has had enough."""
    text = "raise KeyError('mine')" if end == "exception" else "print('at its end', flush=True)"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HETCOLL_LINGER": "60"}
    programs = [STAY.replace("{}", text), STAY.replace("{}", "").replace("1.5", "60")]
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env={**common, "RANK": str(rank)}, stdout=-1, stderr=-1)
        for rank, program in enumerate(programs)
    ]
    try:
        if end == "interrupt":
            assert processes[0].stdout is not None
            assert processes[0].stdout.readline() == b"at its end\n"
            press_until_it_ends(processes[0])
        _, errors = processes[0].communicate(timeout=20)
        assert processes[1].poll() is None
        assert (b"KeyError: 'mine'" in errors) == (end == "exception"), errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# Endings of a communicator while it is in use.


def close_under_a_call(comm: hetcoll.Communicator, how: str) -> str:
    """One thread is in a call that cannot end; another closes the communicator."""
    x = np.ones(10)
    comm.allreduce(x)
    if comm.rank == 0:
        return ""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            if how == "hot":
                comm.allreduce(x)
            elif how == "long":
                comm.allreduce(np.ones(1 << 20))
            elif how == "wait":
                comm.allreduce(np.ones(1 << 20), async_op=True).wait()
            else:
                comm.alltoall(np.ones(2), np.ones(2))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    comm.close()
    thread.join(5)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, hetcoll.AbortedError | hetcoll.ClosedError), error
    return str(error)


@LINKS
@pytest.mark.parametrize("how", ["hot", "long", "wait", "first use"])
def test_close_while_another_thread_is_in_a_call(launch: Launch, how: str, transport: str) -> None:
    said = launch(2, HETCOLL_TRANSPORT=transport).run(close_under_a_call, how)
    assert re.fullmatch("(the|this) communicator was closed", said[1])


def open_and_close_many(comm: hetcoll.Communicator, times: int) -> str:
    """Communicators that come and go leave nothing, on any rank and in the store."""
    for i in range(times):
        if i == 5:
            comm.barrier()  # so that nobody is still about to close the one before
            before = Resources.now()
        other = comm.split(comm.rank % 2 if i % 3 else 0)
        assert other is not None
        other.allreduce(np.ones(100))
        other.allreduce(np.ones(100), async_op=True).wait()
        other.close()
    comm.barrier()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    if comm.rank == 0:
        (server,) = store._hosted.values()
        assert len(server._groups._groups) <= 3
    assert len(comm._session._handlers) == 1
    assert not comm._session._early
    return Resources.now().left_over(before)


@LINKS
def test_communicators_that_come_and_go(launch: Launch, transport: str) -> None:
    assert launch(3, HETCOLL_TRANSPORT=transport).run(open_and_close_many, 40) == [""] * 3
