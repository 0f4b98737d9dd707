"""The way of a first all-reduce through the library's Python files: short enough to be followed by a reader.

What is counted is what `sys.setprofile` tells of a call of a new shape after `init`, in two fresh processes: no times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import DEADLINE
from thorough import parametrize

JOB = """
import json, os, sys
import numpy as np
import hetcoll

ours = os.path.dirname(hetcoll.__file__) + os.sep
entered, calls, changes, at = [], [], 0, ""


def file_of(frame):
    while frame is not None and not frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back  # of Python's own, or another package's
    return "" if frame is None else frame.f_code.co_filename[len(ours):]


def note(frame, event, argument):
    global changes, at
    if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ours):
        return
    now = file_of(frame if event == "call" else frame.f_back)
    if event == "call":
        calls.append(f"{now} {frame.f_code.co_qualname}")
        if now not in entered:
            entered.append(now)
    changes, at = changes + (now != at and now != ""), now or at


with hetcoll.init() as comm:
    x = np.arange(1000.0)
    sys.setprofile(note)
    comm.allreduce(x)
    sys.setprofile(None)
    assert (x == 2 * np.arange(1000.0)).all()
    chosen = comm.explain("allreduce", x.nbytes).algorithm
    if comm.rank == 0:
        print("traced:", json.dumps([chosen, entered, calls, changes]))
"""


@parametrize("algorithm", ["", "ring"], first=1)
def test_a_first_call_takes_a_short_way(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if algorithm:
        monkeypatch.setenv("HETCOLL_ALGO", algorithm)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    words = [sys.executable, "-m", "hetcoll", "run", "--no-prefix", "-n", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE)
    chosen, entered, calls, changes = json.loads(done.stdout.partition("traced: ")[2].partition("\n")[0])
    told = f"{len(entered)} files, {len(calls)} calls, {changes} changes of file"
    print(f"a first all-reduce by {chosen}: {told}")
    story = ["communicator.py", "runtime/planner.py", f"plan/algorithms/{algorithm or 'direct'}.py", "plan/ir.py"]
    assert [file for file in entered if file in story] == story
    others = [file for file in entered if file.startswith("plan/algorithms/") and file not in story]
    assert others == ["plan/algorithms/base.py"], "the tuner enters no other algorithm's file"
    assert not [call for call in calls if call.endswith("<module>")], "what it needs was loaded by init"
    assert len(entered) <= 14, (told, entered)
    assert len(calls) <= 120, (told, calls)
    assert changes <= 120, (told, calls)
