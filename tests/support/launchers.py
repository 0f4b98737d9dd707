"""Jobs of `hetcoll run` for tests: in this process, or below a launcher of their own that may be killed."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetcoll.tools import launch
from hetcoll.tools.launch import run

SOURCE = str(Path(launch.__file__).parents[2])


def run_python(code: str, nproc: int, **options: object) -> tuple[int, list[str], list[str]]:
    """The code, stdout's lines and stderr's lines of a job of `python -c code`."""
    out, err = io.BytesIO(), io.BytesIO()
    options = {"stdout": out, "stderr": err, **options}
    code_of_job = run([sys.executable, "-I", "-c", code], nproc, **options)  # type: ignore[arg-type]
    return code_of_job, out.getvalue().decode().splitlines(), err.getvalue().decode().splitlines()


@contextmanager
def launcher(code: str, nproc: int, *, grace: float = 5.0) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, whose ranks run `code`. Killed at the end, if it is still there."""
    program = f"""
import sys
from hetcoll.tools.launch import run
sys.exit(run([sys.executable, "-I", "-c", {code!r}], {nproc}, grace={grace}))
"""
    env = os.environ | {"PYTHONPATH": SOURCE}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_lines(process: subprocess.Popen[bytes], count: int, seconds: float = 20.0) -> list[str]:
    """The first `count` lines of a process's stdout."""
    assert process.stdout is not None
    data, deadline = b"", time.monotonic() + seconds
    while data.count(b"\n") < count:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"only {data!r} within {seconds} s"
        part = os.read(process.stdout.fileno(), 65536)
        assert part, f"only {data!r} until its end"
        data += part
    return data.decode().splitlines()


def gone_within(pids: list[int], seconds: float) -> bool:
    """Whether none of the processes runs any more after at most `seconds`; one that nobody reaped counts as gone."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
