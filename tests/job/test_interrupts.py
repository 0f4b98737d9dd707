"""Ctrl-C in a call: the others are told that this rank was interrupted, also while it makes a communicator.

After each of these tests `launch` sees to it that no thread, descriptor, mapping, child or process is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import interrupt_at
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import communicator, lifetime
from hetcoll.runtime import core, one_sided

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)


def say(call: Callable[[], Any]) -> str:
    try:
        call()
    except hetcoll.HetcollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def interrupt_while_asking(comm: hetcoll.Communicator) -> tuple[str, bool]:
    """The signal comes while the call asks what the others do, and not while the engine waits."""
    x = np.ones(4, np.float32)
    comm.allreduce(x)
    if comm.rank == 0:
        return "", True
    asked = comm._session.control.query

    def query(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return asked(*args)

    comm._session.control.query = query  # type: ignore[method-assign]
    try:
        comm.allreduce(x)
    except KeyboardInterrupt:
        return say(lambda: comm.allreduce(x)), comm._engine.failed
    return "nothing", comm._engine.failed


def interrupt_while_splitting(comm: hetcoll.Communicator) -> str:
    """Rank 2 is interrupted once all have met in the new group, which others may have in the end or not."""
    control = comm._session.control
    exchange = control.exchange_columns

    def interrupted(group: bytes, tag: bytes, *rest: Any) -> Any:
        told = exchange(group, tag, *rest)
        if group != comm._group:
            raise KeyboardInterrupt
        return told

    if comm.rank == 2:
        control.exchange_columns = interrupted  # type: ignore[method-assign]
    try:
        comm.split(0)
        comm.barrier()
    except KeyboardInterrupt:
        return f"interrupted, {comm._engine.failed}"
    except hetcoll.HetcollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@TRANSPORTS
def test_ctrl_c_while_a_split_is_made(launch: Launch, transport: str) -> None:
    *others, two = launch(3, HETCOLL_TRANSPORT=transport).run(interrupt_while_splitting)
    assert two == "interrupted, True"
    assert others == ["AbortedError: rank 2 was interrupted"] * 2


@TRANSPORTS
def test_ctrl_c_while_a_call_asks_the_others(launch: Launch, transport: str) -> None:
    zero, one = launch(2, HETCOLL_TRANSPORT=transport).run(interrupt_while_asking)
    assert zero == ("", True)
    assert one == ("AbortedError: rank 1 was interrupted", True)


def interrupt_when_others_have_it(comm: hetcoll.Communicator, what: str, ready: Path) -> str:
    """Rank 2 is interrupted at the end of a call that makes a communicator, when it is made, or when that is on its way
    to the program, which keeps it alive with the exception; the others are about to use theirs."""
    watch = lifetime.watch

    def interrupted(*args: Any) -> Any:
        wait_until(lambda: len(list(ready.iterdir())) == 2, 20)
        raise KeyboardInterrupt

    def watch_interrupted(resource: Any, *args: Any, **how: Any) -> None:
        if isinstance(resource, hetcoll.Communicator):
            interrupted()
        watch(resource, *args, **how)

    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        yield
        interrupted()

    begin = one_sided.OneSided.__init__

    def begin_ready(*args: Any) -> None:
        (ready / str(comm.rank)).touch()
        begin(*args)

    if comm.rank != 2:
        one_sided.OneSided.__init__ = begin_ready  # type: ignore[method-assign]
    elif what == "made":
        lifetime.watch = watch_interrupted
    elif what == "passed":
        communicator.coming_together = passing
    else:
        core.Activity = interrupted  # type: ignore[assignment,misc]

    def use() -> None:
        if what == "window":
            comm.window(np.ones(4)).put(np.ones(4), 2)
            return
        part = comm.split(0)
        assert part is not None
        (ready / str(comm.rank)).touch()
        part.barrier()

    try:
        return f"{say(use)}; {say(comm.barrier)}"
    except KeyboardInterrupt as error:
        kept = error  # and that keeps this frame: only the garbage collector finds them
        return f"interrupted, {kept is error and comm._engine.failed}"


@TRANSPORTS
@pytest.mark.parametrize("what", ["split", "made", "passed", "window"])
def test_ctrl_c_at_the_end_of_what_others_have_made(launch: Launch, what: str, transport: str, tmp_path: Path) -> None:
    *others, two = launch(3, HETCOLL_TRANSPORT=transport).run(interrupt_when_others_have_it, what, tmp_path)
    assert two == "interrupted, True"
    assert others == ["AbortedError: rank 2 was interrupted; AbortedError: rank 2 was interrupted"] * 2


def interrupt_when_it_has_joined(comm: hetcoll.Communicator) -> str:
    """Rank 1, when it is in the group of the part, and has no part yet."""
    join = comm._session.join

    def interrupted(*args: Any) -> None:
        join(*args)
        raise KeyboardInterrupt

    if comm.rank == 1:
        comm._session.join = interrupted  # type: ignore[method-assign]
    try:
        return say(lambda: comm.split(0))
    except KeyboardInterrupt:
        return "interrupted"


def test_ctrl_c_in_a_group_without_a_part_leaves_nothing(launch: Launch) -> None:
    """As `launch` sees: who is in a group keeps its connection to the store."""
    assert launch(2).run(interrupt_when_it_has_joined) == ["AbortedError: rank 1 was interrupted", "interrupted"]


def interrupt_while_closing(comm: hetcoll.Communicator, counts: list[int]) -> int:
    """At certain places, each in a communicator of its own; how often rank 0 was."""
    interrupted = 0
    for count in counts:
        part = comm.split(0)
        assert part is not None
        part.window(np.ones(4))
        part.barrier()
        try:
            if comm.rank == 0:
                interrupt_at(count)
            part.close()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(None)
        assert part.closed
    comm.barrier()
    return interrupted


def test_ctrl_c_in_close_leaves_nothing(launch: Launch) -> None:
    """As `launch` sees."""
    counts = [2, 3, 4, 8, 16, 32, 64, 128]  # at the first one it has not begun
    assert launch(2).run(interrupt_while_closing, counts) == [len(counts), 0]


class Interrupted(threading.Thread):
    """Whose `start` is, before the system has made it, or when it has made it and it does not run yet."""

    def __init__(self, target: Callable[[], Any], *, made: bool) -> None:
        super().__init__(target=target)
        self.made = made

    def start(self) -> None:
        if self.made:
            threading.Timer(0.05, super().start).start()
        raise KeyboardInterrupt


class Runs:
    """A resource with a thread. `told`: what was called."""

    def __init__(self, *, made: bool) -> None:
        self.told, self.over = "", threading.Event()
        self.thread = Interrupted(self.over.wait, made=made)

    def close(self) -> None:
        self.told += "close"
        self.over.set()
        self.thread.join(10)

    def abandon(self) -> None:
        self.told += "abandon"


@pytest.mark.parametrize("made", [True, False])
def test_ctrl_c_as_a_thread_begins(made: bool) -> None:
    """Who has one that runs is closed, and waits for it. Nobody waits for one that never will."""
    resource = Runs(made=made)
    with pytest.raises(KeyboardInterrupt):
        lifetime.start(resource.thread, resource)
    assert resource.told == ("close" if made else "abandon")
    assert not resource.thread.is_alive()
    assert resource not in [each for each, _ in lifetime.opened()]
