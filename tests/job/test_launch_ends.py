"""How `hetcoll run` ends: by a rank, a signal, a full disk or a kill, and nothing is left of its ranks."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from launchers import gone_within, launcher, read_lines, run_python, runs

from hetcoll.tools.launch import run
from hetcoll.tools.watchdog import find_job


def test_a_rank_that_dies_of_a_signal() -> None:
    status, _, err = run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 1)
    assert status == 128 + signal.SIGSEGV
    assert err == ["hetcoll run: rank 0 was killed by SIGSEGV; it printed nothing"]


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    sys.stdin.read(); time.sleep(0.5); sys.exit(3)
print("ready", flush=True)
time.sleep(60)
"""
    started = time.monotonic()
    assert run_python(code, 2, grace=0.5)[0] == 3
    assert time.monotonic() - started < 20


GRANDCHILDREN = """
import os, subprocess, sys, time
nap = [sys.executable, "-I", "-c", "import time; time.sleep(60)"]
pids = [subprocess.Popen(nap, start_new_session=own).pid for own in (False, True)]
print(os.getpid(), *pids, flush=True)
"""


def test_what_the_ranks_left_running_ends_with_them() -> None:
    started = time.monotonic()
    status, out, _ = run_python(GRANDCHILDREN, 2)
    assert status == 0
    assert time.monotonic() - started < 20
    assert gone_within([int(pid) for line in out for pid in line.split()[1:]], 5)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda v: str(int(v))
)
def test_signals_to_the_launcher_leave_nothing_behind(number: int, status: int) -> None:
    with launcher(GRANDCHILDREN + "time.sleep(60)", 2) as process:
        pids = [int(pid) for line in read_lines(process, 2) for pid in line.split()[1:]]
        assert len(pids) == 6
        assert all(map(runs, pids))
        process.send_signal(number)
        assert process.wait(20) == status
        assert gone_within(pids, 5)


def test_a_hangup_that_is_ignored_does_not_end_the_job() -> None:
    """As under nohup(1)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        status, _, err = run_python("import os, signal; os.kill(os.getppid(), signal.SIGHUP)", 1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (status, err) == (0, [])


def test_a_second_ctrl_c_does_not_wait_for_the_grace() -> None:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'no\\n')); "
    with launcher(code + "print('ready', flush=True); time.sleep(60)", 1, grace=60) as process:
        read_lines(process, 1)
        process.send_signal(signal.SIGINT)
        read_lines(process, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_killed_launcher_leaves_nothing_behind() -> None:
    with launcher(GRANDCHILDREN + "print(os.environ['HETCOLL_RUN'], flush=True); time.sleep(60)", 2) as process:
        lines = [line.split()[1:] for line in read_lines(process, 4)]
        pids = [int(pid) for words in lines if len(words) == 3 for pid in words]
        (job,) = {words[0] for words in lines if len(words) == 1}
        assert len(pids) == 6
        assert all(map(runs, pids))
        assert set(find_job(job)) & set(pids)
        process.kill()
        assert gone_within(pids, 5)
        assert find_job(job) == []


def test_a_killed_watchdog_does_not_fail_the_job() -> None:
    """Whoever kills it leaves the job as it was; the launcher says that nothing watches over it any more."""
    code = """
import os, pathlib, signal, time
watchdogs = []
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid() and b"watchdog.py" in (entry / "cmdline").read_bytes():
            watchdogs.append(int(entry.name))
    except OSError:
        continue
watchdogs.remove(os.getpid())  # whose program has that word in it
assert len(watchdogs) == 1
os.kill(watchdogs[0], signal.SIGKILL)
stat = pathlib.Path(f"/proc/{watchdogs[0]}/stat")
while stat.read_text().rpartition(")")[2].split()[0] != "Z":  # until then it may hold its pipe open
    time.sleep(0.01)
"""
    status, _, err = run_python(code, 1)
    assert status == 0, err
    assert "the watchdog was killed" in " ".join(err)


def test_output_that_nobody_reads_any_more_ends_the_job() -> None:
    with launcher("while True: print('y' * 1000)", 2) as process:
        read_lines(process, 1)
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None  # nothing for communicate to read
        assert process.wait(20) == 141


class Full(io.BytesIO):
    """A file on a disk that is full."""

    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


def test_output_that_there_is_no_room_for_ends_the_job_in_order() -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("as it should"))
print("a line", flush=True)
time.sleep(60)
"""
    err = io.BytesIO()
    assert run([sys.executable, "-I", "-c", code], 1, stdout=Full(), stderr=err) == 141
    assert err.getvalue() == b"hetcoll run: stdout: No space left on device\n[0] as it should\n"


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    err = io.BytesIO()
    assert run(["/no/such/program"], 2, stderr=err) == 127
    assert err.getvalue() == b"hetcoll run: /no/such/program: No such file or directory\n"
    (tmp_path / "data").write_text("")
    assert run([str(tmp_path / "data")], 1, stderr=err) == 126


def _children() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_nothing_is_left_in_the_launchers_own_process() -> None:
    run(["true"], 2)
    children = _children()  # other tests' servers may live on
    before = (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT))
    assert run(["true"], 4) == 0
    assert (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT)) == before
    assert _children() == children
