"""`hetcoll run` on several hosts: through a stand-in for ssh that starts what it is told on this one."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import DEADLINE
from thorough import parametrize

from hetcoll.errors import ArgumentError
from hetcoll.tools.hosts import read_hostfile, read_hosts
from hetcoll.tools.watchdog import find_job

SHOW = "import os; print(*map(os.environ.get, {}), flush=True)"
SEARCH = """
import pathlib
secret = os.environ["HETCOLL_SECRET"].encode()
for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert secret not in entry.read_bytes()
    except OSError:
        pass
"""
SUM = """
import numpy as np, hetcoll
with hetcoll.init() as comm:
    x = np.full(3, comm.rank + 1.0)
    comm.allreduce(x)
    print(comm.rank, "of", comm.size, x.tolist())
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """What stands in for ssh: it does as sshd, whose commands a shell runs, and writes down whom it was to reach."""
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/reached\nshift\nexec sh -c "$*"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def command(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")} | variables
    words = (sys.executable, "-m", "hetcoll", "run", *words)
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_ranks_of_several_hosts_are_one_job(tmp_path: Path, ssh: str) -> None:
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    done = command("--ssh", ssh, "--hosts", "left:1,right", "--master", "127.0.0.1", "-n", "2", str(script))
    assert done.returncode == 0, done.stderr
    want = [f"[{rank}] {rank} of 3 [6.0, 6.0, 6.0]" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == want
    assert sorted((tmp_path / "reached").read_text().split()) == ["left", "right"]


def test_what_each_rank_is_told(tmp_path: Path, ssh: str) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MINE", "OTHER", "HETCOLL_TIMEOUT", "PWD_"]
    file = tmp_path / "hosts"
    file.write_text("# two hosts\nlocalhost slots=1\n\nright:2  # two\n")
    words = ("--hostfile", str(file), "--ssh", ssh, "--master", "127.0.0.1:23456", "-x", "MINE", "-x", "OTHER=a b")
    code = SHOW.format(names) + "; print(os.getcwd(), os.environ['MASTER_PORT'], len(os.environ['HETCOLL_SECRET']))"
    done = command(*words, "--no-prefix", *python(code), cwd=tmp_path, MINE="1", HETCOLL_TIMEOUT="77")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    places = [f"{rank} 3 {local} {here} 1 a b 77 None" for rank, local, here in ((0, 0, 1), (1, 0, 2), (2, 1, 2))]
    assert lines == sorted([*places, *[f"{tmp_path} 23456 64"] * 3])


def test_the_user_of_ssh_is_no_part_of_the_masters_name_and_the_secret_is_on_no_command_line(
    tmp_path: Path, ssh: str
) -> None:
    code = SHOW.format(["MASTER_ADDR"]) + SEARCH
    done = command("--ssh", ssh, "--hosts", "me@gpu07:1,me@gpu08:1", "--no-prefix", *python(code))
    assert (done.returncode, done.stdout) == (0, "gpu07\n" * 2), done.stderr
    assert sorted((tmp_path / "reached").read_text().split()) == ["me@gpu07", "me@gpu08"]


def test_the_first_that_fails_ends_all_hosts(ssh: str) -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(100)"
    done = command("--ssh", ssh, "--hosts", "a:2,b:2", "--master", "127.0.0.1", *python(code))
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        "hetcoll run: rank 2 failed with exit code 7; it printed nothing",
        "hetcoll run: host b failed with exit code 7",
    ]


@parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], first=1)
def test_no_rank_outlives_the_launcher(ssh: str, number: int, status: int) -> None:
    """Told to end or killed: the launchers on the hosts see the end of their stdin."""
    code = SHOW.format(["HETCOLL_RUN"]) + "; import time; time.sleep(100)"
    words = [sys.executable, "-m", "hetcoll", "run", "--no-prefix", "--ssh", ssh, "--hosts", "a:1,b:1"]
    words += ["--master", "127.0.0.1", *python(code)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        data, deadline = b"", time.monotonic() + 60
        while data.count(b"\n") < 2:
            assert select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], data
            data += os.read(process.stdout.fileno(), 4096)
        runs = data.decode().split()
        assert len(set(runs)) == 2, "each launcher has a name of its own"
        assert all(map(find_job, runs))
        process.send_signal(number)
        assert process.wait(60) == status
    deadline = time.monotonic() + 30
    while any(map(find_job, runs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(find_job, runs))


def test_a_launcher_above_does_not_find_the_watchdog() -> None:
    """Were that killed with the launcher here, nobody would end the ranks."""
    words = [sys.executable, "-m", "hetcoll", "run", *python("import time; print('up', flush=True); time.sleep(100)")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"HETCOLL_RUN": "above"}) as process:
        assert process.stdout is not None
        assert b"up" in process.stdout.readline()
        found = find_job("above")
        assert process.pid in found
        assert not any(b"watchdog.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    done = command("--ssh", "sh -c 'echo no route to it >&2; exit 255'", "--hosts", "a:1", *python("pass"))
    assert done.returncode == 255
    assert done.stderr.splitlines() == ["no route to it", "hetcoll run: host a failed with exit code 255"]


def test_hosts_must_have_the_directory_and_the_version(ssh: str) -> None:
    agent = [sys.executable, "-m", "hetcoll", "run", "--agent"]
    from hetcoll import __version__

    for task, complaint in (
        ('{"version": "0.0.0"}', "wanted the same on all hosts"),
        (f'{{"version": "{__version__}", "directory": "/no/such"}}', "wanted the directory '/no/such'"),
    ):
        done = subprocess.run(agent, input=task + "\n", capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 1
        assert complaint in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_the_same_command_on_each_host(tmp_path: Path) -> None:
    """--node-rank: no secret and no name of the job's is made, since no other node would have them."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HETCOLL_SECRET"]
    code = SHOW.format(names)
    words = ("-n", "3,1", "--node-rank", "1", "--master", "gpu07", "--no-prefix", *python(code))
    assert command(*words).stdout == "3 4 0 1 gpu07 29500 None\n"
    words = ("-n", "2", "--nnodes", "4", "--node-rank", "3", "--master", "[fd00::1]:77", "--no-prefix", *python(code))
    assert sorted(command(*words, HETCOLL_SECRET="x").stdout.splitlines()) == [
        f"{rank} 8 {local} 2 fd00::1 77 x" for rank, local in ((6, 0), (7, 1))
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--hosts", "a:1,b:0"], "--hosts a:1,b:0: wanted 1 rank or more on b, got 0"),
        (["--hosts", "a,,b"], "wanted a host and its number of ranks, such as gpu07:8, got ''"),
        (["--hosts", ""], "--hosts : wanted a host and its number of ranks"),  # of a variable that is not set
        (["--hosts", "", "--hostfile", "/x"], "wanted one of --hosts, --hostfile and --node-rank, got several"),
        (["--hosts", "a", "--hostfile", "/x"], "wanted one of --hosts, --hostfile and --node-rank, got several"),
        (["--hosts", "a,b", "-n", "1,2"], "-n: wanted one number of ranks for each host, got '1,2'"),
        (["--hosts", "localhost,b"], "wanted a name of this host that b can reach, got localhost; or --master"),
        (["-x", "NO_SUCH_NAME"], "-x: wanted NAME=VALUE, or the name of a variable that is set here"),
        (["--hosts", "a", "-x", "NO_SUCH_NAME"], "-x: wanted NAME=VALUE, or the name of a variable that is set here"),
        (["--hostfile", "/no/such"], "--hostfile: wanted a readable file, got '/no/such'"),
        (["--nnodes", "2"], "wanted --node-rank or --hosts as well"),
        (["--master", ""], "wanted --node-rank or --hosts as well"),
        (["--hosts", "a", "--master", ""], "--master: wanted the host of rank 0, such as gpu07 or gpu07:29500, got ''"),
        (["--node-rank", "0"], "--master: wanted the host of rank 0, such as gpu07 or gpu07:29500, got None"),
        (["--node-rank", "2", "--nnodes", "2", "--master", "a"], "--node-rank: wanted 0 to 1, got 2"),
        (["--node-rank", "0", "--nnodes", "3", "-n", "1,2", "--master", "a"], "-n: wanted 3 numbers"),
        (["--node-rank", "0", "--master", "a:99999"], "got 'a:99999'"),
        (["-n", "99999999999"], "-n: wanted at most 65536 ranks on a host, got 99999999999"),
        (["-n", "some"], "-n: wanted a number of ranks, 1 or more, got 'some'"),
        (["--hosts", "a", "--ssh", "ssh '"], '--ssh: wanted a command, got "ssh \'": No closing quotation'),
        (["--hosts", "a", "--ssh", " "], "--ssh: wanted a command, got nothing"),
        (["--hosts", "a", "--grace", "-1"], "grace: wanted seconds, 0 or more, got -1"),
    ],
)
def test_mistakes_are_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hetcoll.cli import main

    assert main(["run", *words, "x.py"]) == 1
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_no_nodes_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    from hetcoll.cli import main

    with pytest.raises(SystemExit, match="2"):
        main(["run", "--node-rank", "0", "--nnodes", "0", "--master", "a", "x.py"])
    assert "--nnodes: wanted a whole number from 1, got '0'" in capsys.readouterr().err


def test_hostfiles_and_lists(tmp_path: Path) -> None:
    assert read_hosts("a:2,b,[fd00::1]:4", 8) == [("a", 2), ("b", 8), ("fd00::1", 4)]
    file = tmp_path / "hosts"
    file.write_text("a\nb slots=3\n  c:1 # last\n")
    assert read_hostfile(file, 2) == [("a", 2), ("b", 3), ("c", 1)]
    file.write_text("a\nb slots=three\n")
    with pytest.raises(ArgumentError, match="line 2: wanted a host"):
        read_hostfile(file, 2)
    file.write_text("# nobody\n")
    with pytest.raises(ArgumentError, match="wanted a host a line"):
        read_hostfile(file, 2)
