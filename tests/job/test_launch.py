"""`hetcoll run`: the environment it makes, the output it shows, and what it starts again."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from pathlib import Path

import pytest
from launchers import SOURCE, run_python

from hetcoll.errors import ArgumentError
from hetcoll.tools.launch import run


def test_ranks_are_told_who_they_are() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR EXTRA"
    code, out, err = run_python(f"import os; print(*map(os.environ.get, {names.split()}))", 3, env={"EXTRA": "x"})
    assert (code, err) == (0, [])
    assert sorted(out) == [f"[{rank}] {rank} 3 {rank} 3 127.0.0.1 x" for rank in range(3)]


def test_ranks_share_a_job_a_port_and_a_secret_that_are_new_each_time() -> None:
    show = "import os; print(*map(os.environ.get, ['HETCOLL_JOB', 'MASTER_PORT', 'HETCOLL_SECRET']))"
    first, second = (run_python(show, 2, prefix=False)[1] for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    job, port, secret = first[0].split()
    assert 0 < int(port) < 65536
    assert len(secret) == 64
    assert job != second[0].split()[0]
    assert secret != second[0].split()[2]
    assert run_python(show, 1, env={"HETCOLL_SECRET": "mine"})[1][0].split()[3] == "mine"


def test_more_ranks_than_cores_have_a_core_each() -> None:
    show = "import os; print(*os.sched_getaffinity(0))"
    ours = os.sched_getaffinity(0)
    cores = sorted(ours)[:2]
    os.sched_setaffinity(0, cores)
    try:
        assert sorted(run_python(show, 3)[1]) == [f"[{rank}] {cores[rank % len(cores)]}" for rank in range(3)]
        left = run_python(show, 3, bind=False)[1]
        fits = run_python(show, len(cores))[1]
        assert os.sched_getaffinity(0) == set(cores)
    finally:
        os.sched_setaffinity(0, ours)
    assert {line.partition(" ")[2] for line in left + fits} == {" ".join(map(str, cores))}


def test_ranks_have_groups_of_their_own_in_the_launchers_session() -> None:
    _, out, _ = run_python("import os; print(os.getpgid(0) == os.getpid(), os.getsid(0))", 3)
    assert sorted(out) == [f"[{rank}] True {os.getsid(0)}" for rank in range(3)]


def test_a_script_is_run_by_this_python(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:])")
    out = io.BytesIO()
    assert run([str(script), "-a", "b"], 1, stdout=out) == 0
    assert out.getvalue().decode() == f"[0] {sys.executable} -a b\n"


def test_lines_are_whole_and_the_streams_apart() -> None:
    code = """
import os, sys
for i in range(300):
    for part in (b"out ", b"%d " % i, b"x" * 500, b"\\n"):
        os.write(1, part)
    os.write(2, b"err %d\\n" % i)
os.write(1, b"\\xff no newline")
"""
    status, out, err = 0, io.BytesIO(), io.BytesIO()
    status = run([sys.executable, "-I", "-c", code], 3, stdout=out, stderr=err)
    assert status == 0
    for rank in range(3):
        head = b"[%d] " % rank
        mine = [line for line in out.getvalue().splitlines() if line.startswith(head)]
        assert mine == [head + b"out %d " % i + b"x" * 500 for i in range(300)] + [head + b"\xff no newline"]
        assert [line for line in err.getvalue().splitlines() if line.startswith(head)] == [
            head + b"err %d" % i for i in range(300)
        ]
    assert len(out.getvalue().splitlines()) == 3 * 301


def test_the_prefix_can_be_turned_off() -> None:
    assert run_python("print('hello')", 2, prefix=False)[1] == ["hello", "hello"]


def test_the_first_failure_ends_the_job_and_is_shown_last() -> None:
    code = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("before"); print("the reason", file=sys.stderr); sys.exit(7)
time.sleep(60)
"""
    started = time.monotonic()
    status, out, err = run_python(code, 3)
    assert status == 7
    assert time.monotonic() - started < 20
    assert out == ["[1] before"]
    last = err.index("hetcoll run: rank 1 failed with exit code 7; its last lines:")
    assert sorted(err[last + 1 :]) == ["[1] before", "[1] the reason"]


def test_the_others_go_on_where_they_may() -> None:
    """Rank 1 dies; the others see that, shrink and come to their end. The status is rank 0's."""
    code = """
import os, signal, numpy as np, hetcoll
comm = hetcoll.init(timeout=30)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
x = np.ones(1)
try:
    while True:
        comm.allreduce(x)
except hetcoll.PeerLostError:
    pass
with comm.shrink() as rest:
    y = np.ones(1)
    rest.allreduce(y)
    print(rest.size, "left", y[0], flush=True)
    rest.barrier()
comm.close()
os._exit(7 if comm.rank == 2 else 0)
"""
    words = [sys.executable, "-c", code]
    out, err = io.BytesIO(), io.BytesIO()
    env = {"PYTHONPATH": SOURCE}
    assert run(words, 3, env=env, keep_going=True, stdout=out, stderr=err) == 0, err.getvalue().decode()
    assert sorted(out.getvalue().decode().splitlines()) == ["[0] 2 left 2.0", "[2] 2 left 2.0"]
    told = [line for line in err.getvalue().decode().splitlines() if line.startswith("hetcoll run:")]
    assert told == [
        "hetcoll run: rank 1 was killed by SIGKILL; the others go on",
        "hetcoll run: rank 2 failed with exit code 7; the others go on",
    ]


def test_a_rank_that_failed_is_started_again_as_a_newcomer(tmp_path: Path) -> None:
    """Rank 1 fails three times, and comes back twice; rank 0 does not."""
    code = f"""
import os, pathlib, sys, time
rank, join, starts = os.environ["RANK"], os.environ["HETCOLL_JOIN"], pathlib.Path({str(tmp_path / "starts")!r})
print(join, flush=True)
if rank == "1":
    with starts.open("a") as file:
        file.write(".")
    sys.exit(4)
while not starts.exists() or len(starts.read_text()) < 3:
    time.sleep(0.01)
sys.exit(5)
"""
    status, out, err = run_python(code, 2, respawns=2)
    assert status == 5
    assert sorted(out) == ["[0] 0", "[1] 0", "[1] 1", "[1] 1"]
    said = "hetcoll run: rank 1 failed with exit code 4; "
    again = [f"{said}starting it again, {left} respawns left" for left in (1, 0)]
    assert [line for line in err if line.startswith(said)] == [*again, f"{said}the others go on"]
    with pytest.raises(ArgumentError, match="respawns: wanted 0 or more, got -1"):
        run_python(code, 2, respawns=-1)


def test_a_rank_that_cannot_be_started_again_does_not_end_the_others(tmp_path: Path) -> None:
    """Rank 1 takes their program away once both run it. Rank 0 ends when the launcher has said so."""
    program, begun, said = tmp_path / "program", tmp_path / "begun", tmp_path / "said"
    program.write_text(f"""#!/bin/sh
await() {{ while [ ! -e "$1" ]; do sleep 0.02; done; }}
if [ "$RANK" = 1 ]; then await {begun}; rm "$0"; exit 3; fi
touch {begun}
await {said}
""")
    program.chmod(0o700)

    class Heard(io.BytesIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if b"did not start" in data:
                said.touch()
            return super().write(data)

    err = Heard()
    assert run([str(program)], 2, respawns=1, stderr=err) == 0
    assert err.getvalue().decode().splitlines() == [
        "hetcoll run: rank 1 failed with exit code 3; starting it again, 0 respawns left",
        "hetcoll run: rank 1 did not start: No such file or directory",
    ]


def test_rank_0_is_started_again_too_and_its_last_status_counts() -> None:
    code = """
import os, sys
sys.exit(4 if (os.environ["RANK"], os.environ["HETCOLL_JOIN"]) == ("0", "0") else 0)
"""
    status, _, err = run_python(code, 1, respawns=1)
    assert (status, err) == (0, ["hetcoll run: rank 0 failed with exit code 4; starting it again, 0 respawns left"])


def test_the_status_of_a_job_that_keeps_going_is_that_of_rank_0() -> None:
    """Rank 1 ends after it, and is not ended."""
    code = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(0.3)
print("came to its end")
"""
    status, out, err = run_python(code, 2, keep_going=True)
    assert (status, out) == (3, ["[1] came to its end"])
    said = "hetcoll run: rank 0 failed with exit code 3"
    assert err == [f"{said}; the others go on", f"{said}; it printed nothing"]


def test_a_job_that_failed_is_started_anew(tmp_path: Path) -> None:
    code = f"""
import os, sys
attempt = {str(tmp_path)!r} + "/" + os.environ["RANK"]
with open(attempt, "a") as file:
    print(os.environ["HETCOLL_JOB"], os.environ["HETCOLL_SECRET"], file=file)
with open(attempt) as file:
    sys.exit(4 if len(file.readlines()) < 3 else 0)
"""
    status, _, err = run_python(code, 1, restarts=5)
    assert status == 0
    assert [line for line in err if "anew" in line] == [
        f"hetcoll run: starting all ranks anew, {left} restarts left" for left in (4, 3)
    ]
    lines = (tmp_path / "0").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 3, "each start has a name and a secret of its own"
    assert run_python("import sys; sys.exit(5)", 1, restarts=1)[0] == 5


def test_what_cannot_be_started_is_not_started_again(tmp_path: Path) -> None:
    err = io.BytesIO()
    assert run([str(tmp_path / "nothing")], 1, restarts=3, stderr=err) == 127
    assert b"anew" not in err.getvalue()


PORT = """
import os, socket
port = int(os.environ["MASTER_PORT"])
for address in ("", "127.0.0.1"):
    with socket.create_server((address, port)):
        pass
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", port))
    except OSError as error:
        print(error.strerror)
"""


def test_the_port_is_rank_0s_on_all_addresses_and_nobody_elses() -> None:
    """Rank 0's store, or PyTorch's, may bind it on any of them, seconds after it was chosen."""
    status, out, err = run_python(PORT, 1)
    assert (status, out, err) == (0, ["[0] Address already in use"], [])


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="nproc: wanted 1 or more, got 0"):
        run(["true"], 0)
    with pytest.raises(ArgumentError, match="got nothing"):
        run([], 1)
    for grace in (-1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match=f"grace: wanted seconds, 0 or more, got {grace:g}"):
            run(["true"], 1, grace=grace)
    others_wait = "import os, time; time.sleep(60 * int(os.environ['RANK'])); 1 / 0"
    assert run_python(others_wait, 2, grace=1e300)[0] == 1  # longer than the clocks of the system count
