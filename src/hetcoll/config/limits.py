"""What the system lets this process have: raised as far as it is needed, and counted before it runs out."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

SPARE = 64
"""File descriptors that are left to the program, and to connections that come and go."""


class Held(NamedTuple):
    """What a part of a communicator holds: file descriptors, threads, and bytes of pinned memory."""

    descriptors: int = 0
    threads: int = 0
    pinned: int = 0


def reserve_descriptors(wanted: int) -> str:
    """See to it that this process may open `wanted` more file descriptors, and SPARE ones beside them.

    Raises the soft limit (RLIMIT_NOFILE) where it must, and never above the hard one. Gives "" where that suffices, or
    else what is needed and what is allowed, for people.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return ""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one is left to look with
        used = soft
    needed = used + wanted + SPARE
    if needed > hard:
        return (
            f"{needed} file descriptors are needed ({used} are open, {wanted} are to come, {SPARE} to spare), and "
            f"{hard} are allowed: raise the hard limit (ulimit -Hn; LimitNOFILE= in systemd)"
        )
    if needed > soft:
        # Twice as many where they are to be had: a link that both ends hurry to make has two for a moment.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, needed + wanted), hard))
    return ""


def address_space_left() -> int | None:
    """Bytes that this process may still map; None where they are not limited (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as file:
        return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())
