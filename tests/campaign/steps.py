"""What the steps of a program are on a rank. Every result is checked: integers, or floats whose sums are exact."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cases import run_sequence
from gpu_kinds import Own, device_of, kinds_of, stream_of
from on_gpu import OnGpu
from reference import Case

import hetcoll

from .graphs import graphs, passing
from .program import Step, draw_steps, values
from .wider import WIDER, of_part

SECONDS = 20.0  # for what waits for ranks that hear of a failure later


def calls(comm: Any, flight: list[tuple[Case, bool]], late: int, seconds: float) -> None:
    if comm.rank == late:
        time.sleep(seconds)
    if set(kinds_of(comm)) != {"c"}:
        flight = [(_on_gpus(case), False) for case, _ in flight]  # as on GPUs, where arrays are fetched after each
    with on_own(comm) as own:
        run_sequence(own, flight)


@contextlib.contextmanager
def on_own(comm: Any) -> Iterator[Any]:
    """`comm` for arrays of the host, which go to this rank's GPU and come back where it uses one."""
    with stream_of(comm) as stream:
        yield comm if stream is None else OnGpu(comm, device_of(comm), stream)


def _on_gpus(case: Case) -> Case:
    """As where a vendor's library averages, which multiplies floats by 1/n before it adds them."""
    return replace(case, exact=case.op != "avg" or "int" in case.dtype)


def fence(comm: hetcoll.Communicator) -> None:
    """Who got through a call that failed elsewhere hears of it here."""
    comm.barrier()
    comm.barrier()


_SET_UP: weakref.WeakSet[hetcoll.Communicator] = weakref.WeakSet()


def set_up(comm: hetcoll.Communicator) -> None:
    """The first call with a GPU's array is all ranks'."""
    if set(kinds_of(comm)) != {"c"} and comm not in _SET_UP:
        with on_own(comm) as own:
            own.allreduce(np.ones(1))
        _SET_UP.add(comm)


def messages(comm: hetcoll.Communicator, edges: list[tuple[int, int, int]], how: str) -> None:
    set_up(comm)
    mine = [(n, *edge) for n, edge in enumerate(edges) if comm.rank in edge[:2]]
    right = {n: values(n, src, dst, count=count) for n, src, dst, count in mine}
    sent = {n: Own(comm, right[n]) for n, src, *_ in mine if src == comm.rank}
    got = {n: Own(comm, np.zeros(count, np.int64)) for n, _, dst, count in mine if dst == comm.rank}
    gpus = kinds_of(comm).replace("c", "")
    if how == "threads" and len(gpus) > len(set(gpus)):
        how = "in turn"  # a vendor's library takes a rank's messages one after another: those of threads may stand

    def move(only: str = "", **how: Any) -> list[hetcoll.Work]:
        works = []
        for n, src, dst, _ in mine:
            if src == comm.rank and only != "recv":
                works.append(comm.send(sent[n].array, dst, **how))
            elif dst == comm.rank and only != "send":
                works.append(comm.recv(got[n].array, src, **how))
        return works

    if how == "group":
        with comm.group():
            move()
    elif how == "async":
        for work in reversed(move(async_op=True)):
            work.wait()
    elif how == "threads":
        failed: list[BaseException] = []

        def send() -> None:
            try:
                with stream_of(comm) as stream:
                    move("send", stream=stream)
            except BaseException as error:
                failed.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            move("recv")
        finally:
            sender.join()
        if failed:
            raise failed[0]
    else:
        move()
    found = {n: each.get() for n, each in got.items()}
    if comm.error is not None:  # then streams go on without the data, and the next call says why
        comm.barrier()
    for n, array in found.items():
        assert (array == right[n]).all(), f"message {n} of {edges} is wrong"


def tagged(comm: hetcoll.Communicator, root: int, tag: int, count: int) -> None:
    """All send to the root, which receives from whoever comes."""
    if comm.rank != root:
        comm.send(values(comm.rank, tag, count=count), root, tag=tag)
        return
    sources = set()
    for _ in range(comm.size - 1):
        source = comm.recv(got := np.zeros(count, np.int64), hetcoll.ANY_SOURCE, tag=tag).source
        assert (got == values(source, tag, count=count)).all(), f"the message of rank {source} is wrong"
        sources.add(source)
    assert len(sources) == comm.size - 1


def split(comm: hetcoll.Communicator, colors: list[int | None], backwards: bool, seed: int) -> None:
    color = colors[comm.rank]
    part = comm.split(color, -comm.rank if backwards else 0)
    if part is None:
        assert color is None
        return
    members = [rank for rank, each in enumerate(colors) if each == color]
    members = members[::-1] if backwards else members
    assert (part.size, members[part.rank]) == (len(members), comm.rank)
    with of_part(members), part:
        for step in draw_steps(random.Random(f"{seed} {color}"), part.size, kinds_of(part), 3, part=True):
            run(part, step)


def hurry(comm: hetcoll.Communicator, seconds: float) -> None:
    """Needs all ranks, and has little time."""
    x = np.ones(3000)
    with on_own(comm) as own:
        own.allreduce(x, timeout=seconds)
    assert (x == comm.size).all()


def near(comm: hetcoll.Communicator, count: int, closes: int) -> None:
    """In memory that is shared by a host; one rank leaves the communicator as soon as its call is over."""
    part = comm.split(0)
    assert part is not None
    with part:
        with of_part(range(comm.size)):
            x = part.empty(count, np.float64)
            x[:] = comm.rank + 1
            part.allreduce(x)
        assert (x == comm.size * (comm.size + 1) / 2).all()
        if comm.rank != closes:
            comm.barrier()
    if comm.rank == closes:
        comm.barrier()


def repeat(comm: hetcoll.Communicator, kind: str, count: int, root: int, times: int) -> None:
    x = np.zeros(count * (comm.size if kind == "allgather" else 1))
    mine = x[comm.rank * count :][:count] if kind == "allgather" else x
    again = {
        "allreduce": lambda: comm.allreduce_init(x),
        "allgather": lambda: comm.allgather_init(mine, x),
        "broadcast": lambda: comm.broadcast_init(x, root),
    }[kind]()
    for turn in range(times):
        mine[:] = comm.rank + turn
        again.start()
        again.wait()
        each = np.arange(comm.size) + turn
        want = {"allreduce": each.sum(), "allgather": np.repeat(each, count), "broadcast": root + turn}[kind]
        assert (x == want).all(), f"{kind} started for the {turn + 1}. time"


def objects(comm: hetcoll.Communicator, kind: str, root: int, length: int) -> None:
    def of(rank: int) -> dict[str, Any]:
        return {"rank": rank, "more": b"x" * length}

    all_of, here = [of(rank) for rank in range(comm.size)], comm.rank == root
    if kind == "broadcast":
        assert comm.broadcast_object(of(root) if here else None, root) == of(root)
    elif kind == "allgather":
        assert comm.allgather_object(of(comm.rank)) == all_of
    elif kind == "gather":
        assert comm.gather_object(of(comm.rank), root) == (all_of if here else None)
    else:
        assert comm.scatter_object(all_of if here else None, root) == of(comm.rank)


def mistake(comm: hetcoll.Communicator, who: int) -> None:
    """Is refused on the line of the call, and nothing is sent."""
    if comm.rank != who:
        return
    for wrong in (lambda: comm.broadcast(np.ones(3), comm.size), lambda: comm.allreduce(np.ones((4, 4))[:, 1])):
        try:
            wrong()
        except (hetcoll.ArgumentError, hetcoll.BufferTypeError):
            continue
        raise AssertionError("a mistake was not refused")


def fork(comm: hetcoll.Communicator, who: int) -> None:
    """A child is refused, and the parent goes on, with a call in flight."""
    work = comm.allreduce(x := np.full(3000, comm.rank + 1.0), async_op=True)
    if comm.rank == who:
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
            except hetcoll.ClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        status = None
        try:
            status = os.waitpid(child, 0)[1]
        finally:
            if status is None:  # this rank was interrupted, before or after the system had answered
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        assert status == 0, "a forked child was not refused"
    work.wait()
    assert (x == comm.size * (comm.size + 1) / 2).all()


def weigh(comm: hetcoll.Communicator, who: int) -> None:
    mean = np.full(40, float(comm.rank))
    comm.allreduce(mean, op="avg", weight=float(comm.rank == who))
    assert (mean == who).all()
    shards = comm.shards(100, weight=1.0 + comm.rank)
    assert shards[0].start == 0
    assert sum(each.stop - each.start for each in shards) == 100


def agree(comm: hetcoll.Communicator, flags: Sequence[int]) -> None:
    """All bits that all have; those of the dead may be missing."""
    got, all_of = comm.agree(flags[comm.rank], timeout=SECONDS), int(np.bitwise_and.reduce(flags))
    assert got & all_of == all_of
    assert got & flags[comm.rank] == got


def look(comm: hetcoll.Communicator, who: int) -> None:
    assert comm.counters()["collectives"] >= 0
    assert comm.memory()["descriptors"] >= 0
    assert comm.explain("allreduce", 1 << who)
    assert comm.dump() is not None


def put(comm: hetcoll.Communicator, count: int) -> None:
    """Into the window of the next rank, which is told."""
    mine, right = np.zeros(count, np.int64), (comm.rank + 1) % comm.size
    window = comm.window(mine)
    try:
        window.put(values(comm.rank, count=count), right, 0, signal=0)
        window.wait_signal(0, 1)
        assert (mine == values((comm.rank - 1) % comm.size, count=count)).all(), "what was put is wrong"
        comm.barrier()
    finally:
        window.close()


STEPS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        calls, fence, hurry, messages, tagged, split, near, repeat, objects, mistake, fork, weigh, agree, look, put,
        graphs,
        passing,
    )
} | WIDER  # fmt: skip


def run(comm: hetcoll.Communicator, step: Step) -> None:
    STEPS[step.what](comm, *step.args)
