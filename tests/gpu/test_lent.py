"""Memory that other processes have open is not freed, and is once they have closed it or have ended."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hetcoll.errors import DeviceError
from hetcoll.gpu import lent
from hetcoll.gpu.lent import Lender

BORROWS = """
import sys
from test_lent import Memory
from hetcoll.gpu.lent import Lender
lender = Lender(Memory(), int(sys.argv[1]), 1)
lender.borrow(b"0", 0)
print("open", flush=True)
sys.stdin.read()
"""


class Memory:
    """In the place of a device: what is allocated, and what is open."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.opened: set[int] = set()

    def allocate(self, nbytes: int, *, uncached: bool = False) -> int:
        self.allocated.add(nbytes)
        return nbytes

    def free(self, address: int) -> None:
        self.allocated.remove(address)

    def open_ipc(self, handle: bytes) -> int:
        if handle == b"none":
            raise DeviceError("there is no such memory")
        self.opened.add(int(handle))
        return int(handle)

    def close_ipc(self, address: int) -> None:
        self.opened.remove(address)


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("lent")
    yield made
    os.close(made)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "_TOGETHER", 0.01)


def made(fd: int, here: int) -> tuple[Any, Lender]:
    device: Any = Memory()
    return device, Lender(device, fd, here)


def test_memory_outlives_who_has_it_open(fd: int) -> None:
    (first, lends), (second, too) = made(fd, 0), made(fd, 1)
    lends.borrow(str(too.lend(22, uncached=False)).encode(), 1)
    too.borrow(str(lends.lend(11, uncached=True)).encode(), 0)
    too.borrow(str(lends.lend(12, uncached=False)).encode(), 0)
    lends.close()
    assert (first.allocated, first.opened) == ({11, 12}, set()), "the second one has it open"
    too.close()
    assert not second.allocated
    assert not second.opened
    assert not first.allocated, "the last to close frees what was left"


def test_those_who_close_together_leave_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "_TOGETHER", 60.0)
    (first, lends), (_, borrows) = made(fd, 0), made(fd, 1)
    borrows.borrow(str(lends.lend(11, uncached=False)).encode(), 0)
    later = threading.Timer(0.05, borrows.close)
    later.start()
    lends.close()
    assert not first.allocated
    later.join()


def test_what_was_left_is_freed_when_memory_is_next_lent(fd: int) -> None:
    (first, lends), (_, borrows), (_, later) = made(fd, 0), made(fd, 1), made(fd, 2)
    borrows.borrow(str(lends.lend(11, uncached=False)).encode(), 0)
    lends.close()
    borrows._file.close()  # as where its process ends
    assert first.allocated == {11}
    later.lend(33, uncached=False)
    assert not first.allocated
    later.close()


def test_who_could_not_open_it_holds_nothing_once_closed(fd: int) -> None:
    (first, lends), (_, borrows) = made(fd, 0), made(fd, 1)
    lends.lend(11, uncached=False)
    with pytest.raises(DeviceError, match="no such memory"):
        borrows.borrow(b"none", 0)
    borrows.close()
    lends.close()
    assert not first.allocated


def test_a_driver_that_fails_keeps_no_lock(fd: int) -> None:
    (first, lends), (second, borrows) = made(fd, 0), made(fd, 1)
    borrows.borrow(str(lends.lend(11, uncached=False)).encode(), 0)
    borrows.lend(22, uncached=False)
    second.opened.clear()  # so that closing it raises
    with pytest.raises(KeyError):
        borrows.close()
    assert not second.allocated
    lends.close()
    assert not first.allocated


def test_who_was_killed_holds_nothing(fd: int) -> None:
    first, lends = made(fd, 0)
    lends.lend(11, uncached=False)
    arguments = [sys.executable, "-c", BORROWS, str(fd)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(arguments, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": path}) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        lends.close()
        assert first.allocated == {11}
        other.kill()
    lent.free_left()
    assert not first.allocated


def test_a_system_without_such_locks_lends_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then messages go through the host's memory, and other ranks wait for nothing."""

    def refuse(*words: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    found = [made(1 << 20, 0)[1]]
    monkeypatch.setattr(lent, "_lock", refuse)
    found.append(made(fd, 0)[1])
    for lender, why in zip(found, ("No such file or directory", "Invalid argument"), strict=True):
        with pytest.raises(DeviceError, match=f"locks on shared memory: {why}"):
            lender.lend(11, uncached=False)
        with pytest.raises(DeviceError, match=f"locks on shared memory: {why}"):
            lender.borrow(b"11", 1)
        lender.close()
