"""How programs end: without close(), by exceptions, Ctrl-C, kills. What others see, and how long the store waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port
from ranks import Job, wait_until
from thorough import parametrize

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
    "after a callback": "comm.allreduce(np.ones(1 << 20), async_op=True).add_done_callback(id)",
    "after an argument error": "try: comm.allreduce(x[::2])\nexcept TypeError: pass",
}


# Each ending over one link, and then over the other.
ALL_ENDINGS = [(end, ("auto", "tcp")[(at + turn) % 2]) for turn in range(2) for at, end in enumerate(ENDINGS)]


def run_program(text: str, size: int = 2, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Ranks as a launcher starts them, each an interpreter of its own."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, "WORLD_SIZE": str(size), **where, **env}
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
            out, err = process.communicate(timeout=PATIENCE * 30)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return done


@parametrize(("ending", "transport"), ALL_ENDINGS, first=2)
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


BECOME = """
import os, pathlib, sys, threading, time
import numpy as np
import hetcoll
victim, folder = int(os.environ["VICTIM"]), pathlib.Path(os.environ["FOLDER"])
before = set(os.listdir("/proc/self/fd"))
comm = hetcoll.init()
part = comm.split(0)
x = np.ones(1 << 19)
comm.allreduce(x)

def call():
    while True:
        comm.allreduce(x)

if comm.rank == victim:
    threading.Thread(target=call, daemon=True).start()
    part.allreduce(x, async_op=True)
    time.sleep(float(os.environ["AFTER"]))
    os.execv(sys.executable, [sys.executable, "-c", os.environ["THEN"], *before])
try:
    call()
except hetcoll.PeerLostError as error:
    assert error.rank == victim, error
rest = comm.shrink()
y = np.ones(4)
rest.allreduce(y)
print(y.tolist())
(folder / str(comm.rank)).touch()
rest.close()
"""

THEN = """
import os, pathlib, sys, time
left = [os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - set(sys.argv[1:])
        if os.path.exists(f"/proc/self/fd/{fd}")]
mapped = [line for line in open("/proc/self/maps") if "memfd:" in line]
until = time.monotonic() + 20
while len(list(pathlib.Path(os.environ["FOLDER"]).iterdir())) < 2 and time.monotonic() < until:
    time.sleep(0.01)
print(left, mapped, time.monotonic() < until)
"""


@pytest.mark.slow
@parametrize(("victim", "transport"), [(0, "auto"), (1, "tcp"), (1, "auto"), (0, "tcp")], first=1)
def test_a_rank_that_becomes_another_program_is_lost(victim: int, transport: str, tmp_path: Path) -> None:
    """By exec, while its calls are under way: its process lives, and keeps nothing. Rank 0's holds the store."""
    texts = {"VICTIM": str(victim), "FOLDER": str(tmp_path), "THEN": THEN, "AFTER": f"{0.01 * victim + 0.01}"}
    ranks = run_program(BECOME, 3, HETCOLL_TRANSPORT=transport, HETCOLL_SHM_READ="always", **texts)
    for rank, done in enumerate(ranks):
        assert (done.returncode, done.stderr) == (0, ""), rank
        assert done.stdout == ("[] [] True\n" if rank == victim else "[2.0, 2.0, 2.0, 2.0]\n"), rank


STAY = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
import hetcoll
comm = hetcoll.init()
others = comm.split(min(comm.rank, 1))
comm.barrier()
if comm.rank > 0:
    time.sleep(1.5)
    last = others.split(0)
    last.barrier()
{}
"""


def test_the_store_waits_at_exit_for_ranks_that_are_still_at_work() -> None:
    for done in run_program(STAY, 3, HETCOLL_LINGER="30"):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("dies", "linger"), [(False, "0"), (True, "1000")])
def test_who_still_works_when_the_store_is_gone_goes_on_with_another(dies: bool, linger: str) -> None:
    """Which does not wait at exit for communicators of its own process that nobody closed."""
    text = "import os\nif comm.rank == 0: os._exit(0)" if dies else ""
    for done in run_program(STAY.replace("{}", text), 3, HETCOLL_LINGER=linger):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, "WORLD_SIZE": "2", **where, "HETCOLL_LINGER": "60"}
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
        _, errors = processes[0].communicate(timeout=PATIENCE * 20)
        assert processes[1].poll() is None
        assert (b"KeyError: 'mine'" in errors) == (end == "exception"), errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def sleep(job: Job, seconds: float) -> None:
    time.sleep(seconds)


KILLED = """
import time
from ranks import Ranks
from test_program_ends import sleep
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
