"""Ends a job whose launcher died: run as a script of its own by `launch`, with the run's name as its argument.

The launcher writes the process group of each rank to our stdin, and "done" before it ends. Without that last word the
end of stdin means that it was killed, so all groups are killed, and whatever else has the run's name in its
environment: a rank started in the last instant, or a grandchild in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


def kill_job(name: str, groups: list[int]) -> None:
    """Kill the process groups, then every process with HETCOLL_RUN=`name`, until there is none."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    quiet = 0
    for _ in range(50):
        left = find_job(name)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        if quiet == 2:  # a process in the middle of execve shows no environment
            return
        time.sleep(0.02)


def find_job(name: str) -> list[int]:
    """The processes with HETCOLL_RUN=`name` in the environment that they were started with. Zombies have none."""
    wanted = f"HETCOLL_RUN={name}".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:  # it ended, or belongs to someone else
            continue
    return found


def main() -> None:
    lines = sys.stdin.read().split()
    if lines[-1:] != ["done"]:
        kill_job(sys.argv[1], [int(line) for line in lines])


if __name__ == "__main__":
    main()
