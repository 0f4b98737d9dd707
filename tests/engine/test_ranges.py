"""Calls are ranges in a profiler's timeline, where the vendors' libraries are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import DEADLINE
from thorough import parametrize

LIBRARY = """
#include <stdio.h>
int PREFIXRangePushA(const char* name) { return fprintf(stderr, "push %s\\n", name); }
int PREFIXRangePop(void) { return fprintf(stderr, "pop\\n"); }
"""
PROGRAM = """
import numpy as np, hetcoll
with hetcoll.init() as comm:
    x = np.ones(2)
    for _ in range(2):
        comm.allreduce(x)
    op = comm.allreduce_init(x)
    op.start()
    op.wait()
    try:
        comm.allreduce(x, np.ones(3))
    except ValueError:
        pass
"""


def run(**env: str) -> list[str]:
    words = [sys.executable, "-c", PROGRAM]
    clean = {name: value for name, value in os.environ.items() if name not in ("HETCOLL_NVTX", "NVTX_INJECTION64_PATH")}
    done = subprocess.run(words, env=clean | env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line]


@parametrize(
    ("name", "prefix", "asked"),
    [
        ("libnvToolsExt.so.1", "nvtx", {"HETCOLL_NVTX": "1"}),
        ("libnvToolsExt.so.1", "nvtx", {"NVTX_INJECTION64_PATH": "/profiler.so"}),
        ("libroctx64.so", "roctx", {"HETCOLL_NVTX": "1"}),
    ],
    first=1,
)
def test_calls_are_ranges(tmp_path: Path, name: str, prefix: str, asked: dict[str, str]) -> None:
    words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
    subprocess.run(words, input=LIBRARY.replace("PREFIX", prefix), text=True, check=True)
    lines = run(LD_LIBRARY_PATH=str(tmp_path), **asked)
    pushed = [line for line in lines if line.startswith("push")]
    assert lines.count("pop") == len(pushed)
    assert pushed[:2] == ["push hetcoll allreduce", "push hetcoll allreduce(float64, count=2, op=sum)"]
    assert pushed[2] == "push hetcoll allreduce"  # the fast path
    assert "push hetcoll allreduce(float64, count=2, op=sum)" in pushed[3:]  # the persistent operation
    assert run(LD_LIBRARY_PATH=str(tmp_path)) == []
    assert run(LD_LIBRARY_PATH=str(tmp_path), **asked | {"HETCOLL_NVTX": "0"}) == []


def test_without_the_libraries_it_says_so_once() -> None:
    lines = run(HETCOLL_NVTX="1")
    assert len(lines) == 1
    assert "no ranges, since none of these libraries can be opened: libnvToolsExt.so.1, " in lines[0]
