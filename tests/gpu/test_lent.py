"""Memory that other processes have open is not freed, and is once they have closed it or have ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import wait_until

from hetcoll.errors import DeviceError, InitError
from hetcoll.gpu import lent
from hetcoll.gpu.lent import Lender

BORROWS = """
import sys
from test_lent import Memory
from hetcoll.gpu.lent import Lender
lender = Lender(int(sys.argv[1]), 1)
lender.borrow(Memory(), b"0", 0)
print("open", flush=True)
sys.stdin.read()
"""


class Memory:
    """In the place of a device: what is allocated, and what is open."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.opened: set[int] = set()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate_shared(self, nbytes: int) -> int:
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


def freeing() -> bool:
    return any(thread.name == "hetcoll-lent" for thread in threading.enumerate())


def made(fd: int, here: int) -> tuple[Any, Lender]:
    return Memory(), Lender(fd, here)


def test_the_last_to_close_frees_all(fd: int) -> None:
    (first, lends), (second, too) = made(fd, 0), made(fd, 1)
    lends.borrow(first, str(too.lend(second, 22)).encode(), 1)
    too.borrow(second, str(lends.lend(first, 11)).encode(), 0)
    lends.close()
    assert (first.allocated, first.opened) == ({11}, set()), "the second one has it open"
    too.close()
    assert not second.allocated
    assert not second.opened
    wait_until(lambda: not first.allocated, 20)
    wait_until(lambda: not freeing(), 20)


def test_those_who_close_together_need_no_thread(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "_TOGETHER", 60.0)
    (first, lends), (second, borrows) = made(fd, 0), made(fd, 1)
    borrows.borrow(second, str(lends.lend(first, 11)).encode(), 0)
    later = threading.Timer(0.05, borrows.close)
    later.start()
    lends.close()
    assert not first.allocated
    assert not freeing()
    later.join()


def test_who_could_not_open_it_holds_nothing_once_closed(fd: int) -> None:
    (first, lends), (second, borrows) = made(fd, 0), made(fd, 1)
    lends.lend(first, 11)
    with pytest.raises(DeviceError, match="no such memory"):
        borrows.borrow(second, b"none", 0)
    borrows.close()
    lends.close()
    assert not first.allocated


def test_who_was_killed_holds_nothing(fd: int) -> None:
    first, lends = made(fd, 0)
    lends.lend(first, 11)
    arguments = [sys.executable, "-c", BORROWS, str(fd)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(arguments, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": path}) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        lends.close()
        assert first.allocated == {11}
        other.kill()
    wait_until(lambda: not first.allocated, 20)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InitError, match="opening shared memory for locks: "):
        Lender(1 << 20, 0)
