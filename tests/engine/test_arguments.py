"""A wrong argument is an error on the caller's line before anything is sent: the ranks stay fit for the next call."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import dlpack_arrays
import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll
from hetcoll import ArgumentError, BufferTypeError
from hetcoll.types import Collective, ReduceOp

Pool = Callable[..., Ranks]
Mistake = tuple[type[hetcoll.HetcollError], str, Callable[[hetcoll.Communicator], object]]
COUNT = 4


def new(ranks: int = 1, dtype: Any = np.float64) -> Any:
    return np.ones(COUNT * ranks, dtype)


def read_only() -> Any:
    values = new()
    values.flags.writeable = False
    return values


def overlapping(first: int = 1, second: int = 1) -> tuple[Any, Any]:
    """Two arrays that share all but one element of the smaller one, in neither's part for a rank."""
    whole = np.ones(COUNT * max(first, second) + 1)
    return whole[: COUNT * first], whole[1 : 1 + COUNT * second]


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


class Meta:
    """As PyTorch's tensors on its device "meta"."""

    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("there is nothing to export")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("Unknown device type meta for Dlpack")


DTYPES = (BufferTypeError, "sendbuf and recvbuf: wanted one dtype, got float64 and int64")
OVERLAP = (ArgumentError, "sendbuf and recvbuf overlap")
INT = np.int64

MISTAKES: dict[str, Mistake] = {
    # What is no rank, and no size.
    "sendrecv to None": (
        BufferTypeError, "dest: wanted a rank, got None", lambda c: c.sendrecv(new(), None, new(), 0)
    ),
    "sendrecv from None": (
        BufferTypeError, "source: wanted a rank, got None", lambda c: c.sendrecv(new(), 0, new(), None)
    ),
    "send to None": (BufferTypeError, "peer: wanted a rank, got None", lambda c: c.send(new(), None)),
    "empty, too many": (ArgumentError, "shape: wanted less than 2**63 bytes, got 46", lambda c: c.empty(1 << 62)),
    "empty, too many bytes": (ArgumentError, "shape: wanted less than 2**63 bytes", lambda c: c.empty(1 << 60, "f8")),
    "empty, too much in all": (
        ArgumentError, "shape: wanted less than 2**63 bytes", lambda c: c.empty((1 << 31, 1 << 31, 2))
    ),
    "empty, none of too many": (ArgumentError, "shape: wanted less than 2**63 bytes", lambda c: c.empty((0, 1 << 62))),
    # Each of the collectives: two types, counts that do not fit, memory shared in a way that cannot work.
    "allreduce dtypes": (*DTYPES, lambda c: c.allreduce(new(), new(dtype=INT))),
    "allreduce counts": (ArgumentError, "recvbuf: wanted 4 elements (as many", lambda c: c.allreduce(new(), new()[1:])),
    "allreduce overlap": (*OVERLAP, lambda c: c.allreduce(*overlapping())),
    "allgather dtypes": (*DTYPES, lambda c: c.allgather(new(), new(c.size, INT))),
    "allgather counts": (ArgumentError, "recvbuf: wanted", lambda c: c.allgather(new(), new(c.size + 1))),
    "allgather overlap": (*OVERLAP, lambda c: c.allgather(*overlapping(1, c.size))),
    "reduce_scatter dtypes": (*DTYPES, lambda c: c.reduce_scatter(new(c.size), new(dtype=INT))),
    "reduce_scatter counts": (ArgumentError, "sendbuf: wanted", lambda c: c.reduce_scatter(new(c.size + 1), new())),
    "reduce_scatter overlap": (*OVERLAP, lambda c: c.reduce_scatter(*overlapping(c.size, 1))),
    "reduce dtypes": (*DTYPES, lambda c: c.reduce(new(), new(dtype=INT), root=c.rank)),
    "reduce counts": (ArgumentError, "recvbuf: wanted 4", lambda c: c.reduce(new(), new()[1:], root=c.rank)),
    "reduce overlap": (*OVERLAP, lambda c: c.reduce(*overlapping(), root=c.rank)),
    "a list": (BufferTypeError, "got list; numpy.asarray makes one of numbers", lambda c: c.allreduce([1.0])),
    "a dict": (BufferTypeError, "got dict; numpy.asarray makes", lambda c: c.gather({}, root=c.rank)),
    "gather dtypes": (*DTYPES, lambda c: c.gather(new(), new(c.size, INT), c.rank)),
    "gather counts": (ArgumentError, "recvbuf: wanted", lambda c: c.gather(new(), new(c.size + 1), c.rank)),
    "gather overlap": (*OVERLAP, lambda c: c.gather(*overlapping(1, c.size), c.rank)),
    "scatter dtypes": (*DTYPES, lambda c: c.scatter(new(c.size), new(dtype=INT), c.rank)),
    "scatter counts": (ArgumentError, "sendbuf: wanted", lambda c: c.scatter(new(c.size + 1), new(), c.rank)),
    "scatter nowhere": (ArgumentError, "recvbuf: wanted an array, got None", lambda c: c.scatter(new(c.size))),
    "scatter overlap": (*OVERLAP, lambda c: c.scatter(*overlapping(c.size, 1), c.rank)),
    "alltoall dtypes": (*DTYPES, lambda c: c.alltoall(new(c.size), new(c.size, INT))),
    "alltoall counts": (ArgumentError, "recvbuf: wanted", lambda c: c.alltoall(new(c.size), new(c.size + 1))),
    "alltoall overlap": (*OVERLAP, lambda c: c.alltoall(*overlapping(c.size, c.size))),
    "alltoall one table": (
        ArgumentError, "wanted both or neither", lambda c: c.alltoall(new(c.size), new(c.size), sendcounts=[4] * c.size)
    ),
    "alltoall tables": (
        ArgumentError, "sendbuf: wanted",
        lambda c: c.alltoall(new(c.size), new(c.size), sendcounts=[5] * c.size, recvcounts=[4] * c.size),
    ),
    "alltoall own part": (
        ArgumentError, "recvcounts: wanted sendcounts",
        lambda c: c.alltoall(new(2 * c.size), new(c.size), sendcounts=[8] * c.size, recvcounts=[4] * c.size),
    ),
    "alltoall unequal in place": (
        *OVERLAP, lambda c: c.alltoall(a := new(c.size), a, sendcounts=[4] * c.size, recvcounts=[4] * c.size)
    ),
    "allgatherv dtypes": (*DTYPES, lambda c: c.allgatherv(new(), new(c.size, INT), [4] * c.size)),
    "allgatherv send": (ArgumentError, "sendbuf: wanted 3", lambda c: c.allgatherv(new(), new(c.size), [3] * c.size)),
    "allgatherv recv": (
        ArgumentError, "recvbuf: wanted", lambda c: c.allgatherv(new(), new(c.size + 1), [4] * c.size)
    ),
    "allgatherv overlap": (*OVERLAP, lambda c: c.allgatherv(*overlapping(1, c.size), [4] * c.size)),
    "counts too few": (ArgumentError, "counts of 0 or more, one a rank, got", lambda c: c.allgatherv(new(), new(), [])),
    "counts negative": (
        ArgumentError, "counts of 0 or more, one a rank, got", lambda c: c.allgatherv(new(), new(), [-4] * c.size)
    ),
    "counts of parts": (
        BufferTypeError, "counts: wanted a whole number, got 4.5",
        lambda c: c.allgatherv(new(), new(c.size), [4.5] * c.size),
    ),
    "counts alone": (
        BufferTypeError, "one a rank, got 4", lambda c: c.allgatherv(new(), new(), 4)
    ),
    "reduce_scatterv dtypes": (
        *DTYPES, lambda c: c.reduce_scatterv(new(c.size), new(dtype=INT), counts=[4] * c.size)
    ),
    "reduce_scatterv send": (
        ArgumentError, "sendbuf: wanted", lambda c: c.reduce_scatterv(new(c.size + 1), new(), counts=[4] * c.size)
    ),
    "reduce_scatterv recv": (
        ArgumentError, "recvbuf: wanted 4", lambda c: c.reduce_scatterv(new(c.size), new()[1:], counts=[4] * c.size)
    ),
    "reduce_scatterv overlap": (
        *OVERLAP, lambda c: c.reduce_scatterv(*overlapping(c.size, 1), counts=[4] * c.size)
    ),
    # What is no array, or cannot be one here.
    "not an array": (BufferTypeError, "sendbuf: wanted an array", lambda c: c.allreduce([1.0, 2.0])),
    "a dictionary": (BufferTypeError, "buf: wanted an array", lambda c: c.broadcast({"weight": [1.0]})),
    "a meta tensor": (BufferTypeError, "buf: this Meta has no memory that DLPack knows", lambda c: c.broadcast(Meta())),
    "a tensor without memory": (
        BufferTypeError, "buf: this Array has no memory: its address is 0",
        lambda c: c.broadcast(dlpack_arrays.Array(kind=1, address=8)),  # of which 8 are the offset
    ),
    "reduce op where recvbuf is": (
        BufferTypeError, "got 'max'; write op='max'", lambda c: c.reduce(new(), "max")
    ),
    "reduce number where recvbuf is": (
        BufferTypeError, "recvbuf: wanted an array or None", lambda c: c.reduce(new(), ReduceOp.MAX)
    ),
    "allreduce op where recvbuf is": (
        BufferTypeError, "got 'max'; write op='max'", lambda c: c.allreduce(new(), "max")
    ),
    "reduce_scatter op where recvbuf is": (
        BufferTypeError, "got ReduceOp.MAX; write op=ReduceOp.MAX", lambda c: c.reduce_scatter(new(), ReduceOp.MAX)
    ),
    "reduce_scatterv op where recvbuf is": (
        BufferTypeError, "got 'max'; write op='max'", lambda c: c.reduce_scatterv(new(), "max", counts=[1] * c.size)
    ),
    "no receiver": (BufferTypeError, "recvbuf: wanted an array", lambda c: c.allgather(new(), 3)),
    "strided": (BufferTypeError, "sendbuf: wanted a C-contiguous", lambda c: c.allreduce(new(2)[::2])),
    "read-only": (BufferTypeError, "sendbuf: wanted a writable array", lambda c: c.allreduce(read_only())),
    "read-only receiver": (BufferTypeError, "recvbuf: wanted a writable", lambda c: c.allreduce(new(), read_only())),
    "read-only root": (BufferTypeError, "sendbuf: wanted a writable", lambda c: c.reduce(read_only(), root=c.rank)),
    "no such type": (BufferTypeError, "buf: dtype datetime64", lambda c: c.broadcast(np.zeros(3, "datetime64[s]"))),
    "register": (BufferTypeError, "buf: wanted an array", lambda c: c.register("text")),
    "memory that was released": (
        BufferTypeError, "buf: this memoryview cannot be read: operation forbidden", lambda c: c.broadcast(released())
    ),
    # Without an array for the result, what is given is looked at first.
    "allgather of a class": (BufferTypeError, "sendbuf: wanted an array", lambda c: c.allgather(np.ndarray)),
    "alltoall of a class": (BufferTypeError, "sendbuf: wanted an array", lambda c: c.alltoall(np.ndarray)),
    "reduce_scatter of a list": (BufferTypeError, "sendbuf: wanted an array", lambda c: c.reduce_scatter([1.0])),
    "gather of what was released": (
        BufferTypeError, "sendbuf: this memoryview cannot be read", lambda c: c.gather(released(), root=c.rank)
    ),
    "allgatherv of too much": (
        ArgumentError, "recvbuf: wanted less than 2**63 bytes", lambda c: c.allgatherv(new(), None, [1 << 62] * c.size)
    ),
    "allgatherv of infinitely much": (
        BufferTypeError, "counts: wanted a whole number, got inf",
        lambda c: c.allgatherv(new(), None, [math.inf] * c.size),
    ),
    # Reductions.
    "op name": (ArgumentError, "op: wanted one of sum, prod, max", lambda c: c.allreduce(new(), op="mean")),
    "op number": (ArgumentError, "got 3", lambda c: c.allreduce(new(), op=3)),
    "op on floats": (ArgumentError, "op: band is not defined on float64", lambda c: c.reduce(new(), op="band")),
    "op on complex": (
        ArgumentError, "op: max is not defined on complex64",
        lambda c: c.reduce_scatter(new(c.size, np.complex64), new(dtype=np.complex64), "max"),
    ),
    "op on bool": (ArgumentError, "op: avg is not defined on bool", lambda c: c.allreduce(new(dtype=bool), op="avg")),
    # Ranks.
    "root above": (ArgumentError, "root: wanted a rank in [0, ", lambda c: c.broadcast(new(), c.size)),
    "root below": (ArgumentError, "got -1", lambda c: c.reduce(new(), root=-1)),
    "gather root": (ArgumentError, "root: wanted", lambda c: c.gather(new(), None, c.size)),
    "scatter root": (ArgumentError, "root: wanted", lambda c: c.scatter(None, new(), -1)),
    "send to nobody": (ArgumentError, "peer: wanted a rank in [0, ", lambda c: c.send(new(), c.size)),
    "recv from nobody": (ArgumentError, "peer: wanted a rank in [0, ", lambda c: c.recv(new(), -2)),
    "recv from anyone": (ArgumentError, "ANY_SOURCE wants a tag above 0", lambda c: c.recv(new(), hetcoll.ANY_SOURCE)),
    "send to oneself": (ArgumentError, "needs both halves in a group()", lambda c: c.send(new(), c.rank)),
    "send what": (BufferTypeError, "buf: wanted an array", lambda c: c.send(3, c.size - 1)),
    "recv into read-only": (BufferTypeError, "buf: wanted a writable", lambda c: c.recv(read_only(), 0)),
    "sendrecv dest": (ArgumentError, "dest: wanted a rank", lambda c: c.sendrecv(new(), c.size, new(), 0)),
    "sendrecv source": (ArgumentError, "source: wanted a rank", lambda c: c.sendrecv(new(), 0, new(), -1)),
    "sendrecv dest type": (
        BufferTypeError, "dest: wanted a rank, got 'a'",
        lambda c: c.sendrecv(new(), "a", new(), 0),
    ),
    "sendrecv dtypes": (*DTYPES, lambda c: c.sendrecv(new(), 0, new(dtype=INT), 0)),
    "sendrecv overlap": (*OVERLAP, lambda c: c.sendrecv(a := new(), 0, a, 0)),
    "sendrecv with oneself": (
        ArgumentError, "do not match", lambda c: c.sendrecv(new(), c.rank, new()[1:], c.rank)
    ),
    # Everything else.
    "timeout zero": (ArgumentError, "timeout: wanted seconds above 0, got 0", lambda c: c.allreduce(new(), timeout=0)),
    "timeout below": (ArgumentError, "got -1", lambda c: c.barrier(timeout=-1)),
    "timeout nan": (ArgumentError, "got nan", lambda c: c.broadcast(new(), timeout=math.nan)),
    "timeout of a bool": (ArgumentError, "wanted seconds above 0, got True", lambda c: c.barrier(timeout=True)),
    "callback": (
        TypeError, "callback: wanted a function of a Work, got None",
        lambda c: hetcoll.Work().add_done_callback(None),
    ),
    "asynchronous": (ArgumentError, "recvbuf: wanted 4", lambda c: c.allreduce(new(), new()[1:], async_op=True)),
    "asynchronous message": (ArgumentError, "peer: wanted", lambda c: c.send(new(), c.size, async_op=True)),
    "split color": (
        BufferTypeError, "color: wanted a whole number, got 1.5", lambda c: c.split(1.5)
    ),
    "split key": (ArgumentError, "key: wanted 64 bits", lambda c: c.split(0, 1 << 63)),
    "empty type": (BufferTypeError, "dtype: ", lambda c: c.empty(3, "float7")),
    "empty byte order": (
        BufferTypeError, "dtype: >f8 is not supported", lambda c: c.empty(3, np.dtype(np.float64).newbyteorder(">"))
    ),
    "dump": (ArgumentError, "most: wanted 0 or more, got -1", lambda c: c.dump(-1)),
    "trace to a descriptor": (BufferTypeError, "path: wanted a file's name, got 5", lambda c: c.trace(5)),
    "trace to no folder": (
        ArgumentError, "path: wanted a file that can be written, in a folder that is there, got '/no/such/file'",
        lambda c: c.trace("/no/such/file"),
    ),
    "trace to a folder": (ArgumentError, "path: wanted a file that can be written", lambda c: c.trace("/")),
    "trace to no name": (ArgumentError, "path: wanted a file that can be written", lambda c: c.trace("")),
    "trace to a name of bytes": (ArgumentError, "path: wanted a file that can be written", lambda c: c.trace(b"a\0")),
    "trace to nothing": (BufferTypeError, "path: wanted a file's name, got None", lambda c: c.trace(None)),
    "compress with weight": (
        ArgumentError, "compress: wanted one of none, bf16",
        lambda c: c.allreduce(new(), op="avg", weight=1.0, compress="zip"),
    ),
    "weight of several": (
        BufferTypeError, "weight: wanted a number, got array", lambda c: c.allreduce(new(), op="avg", weight=new())
    ),
    "weight too large": (
        ArgumentError, "weight: wanted a number of 0 or more, got inf",
        lambda c: c.allreduce(new(), op="avg", weight=10**400),
    ),
    "shards too heavy": (ArgumentError, "weight: wanted a number above 0, got inf", lambda c: c.shards(8, 10**400)),
    "empty device of an array": (
        ArgumentError, "device: wanted 'cpu', got array(['cpu', 'cpu']",
        lambda c: c.empty(3, device=np.array(["cpu"] * 2)),
    ),
    "empty, too many axes": (ArgumentError, "shape: ", lambda c: c.empty([1] * 100)),
    "empty device": (ArgumentError, "device: wanted 'cpu', got 'tpu'", lambda c: c.empty(3, device="tpu")),
    "explain op": (ArgumentError, "op: wanted one of allreduce, allgather", lambda c: c.explain("reduce_all", 8)),
}  # fmt: skip


def _still_works(comm: hetcoll.Communicator) -> None:
    values = np.arange(COUNT, dtype=np.float64) + comm.rank
    comm.allreduce(values)
    assert (values == comm.size * np.arange(COUNT) + comm.size * (comm.size - 1) / 2).all()


def _make(comm: hetcoll.Communicator, name: str) -> None:
    kind, text, call = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call(comm)
    assert type(caught.value) is kind, name
    assert text in str(caught.value), name
    assert traceback.extract_tb(caught.value.__traceback__)[1].filename == __file__, name
    assert isinstance(caught.value, ValueError if kind is ArgumentError else TypeError)


def _mistakes(comm: hetcoll.Communicator, who: str) -> None:
    """All that a repeated call remembers is there before the second round."""
    for _ in range(2):
        for name in MISTAKES:
            if who == "all" or comm.rank == comm.size - 1:
                _make(comm, name)
            _still_works(comm)
        comm.allgather(new(), new(comm.size))
        comm.reduce_scatter(new(comm.size), new())
        comm.alltoall(new(comm.size), new(comm.size))
        comm.broadcast(new())
        for root in range(comm.size):
            comm.reduce(new(), new(), root=root)
            comm.gather(new(), new(comm.size), root)
            comm.scatter(new(comm.size), new(), root)


@pytest.mark.parametrize(("size", "who"), [(1, "all"), (2, "all"), (2, "one")])
def test_a_mistake_leaves_the_ranks_whole(pool: Pool, size: int, who: str) -> None:
    pool(size).run(_mistakes, who)


def _indivisible(comm: hetcoll.Communicator) -> None:
    with pytest.raises(ArgumentError, match="sendbuf: wanted a multiple of 2 elements, got 3"):
        comm.alltoall(np.ones(3), np.ones(3))
    with pytest.raises(ArgumentError, match="dest and source: a message to oneself needs both"):
        comm.sendrecv(new(), comm.rank, new(), 1 - comm.rank)
    with pytest.raises(ArgumentError, match=f"shape: shared memory: wanted {1 << 50} bytes"):
        comm.empty(1 << 50, "u1")
    with pytest.raises(ArgumentError, match="already inside a group"), comm.group(), comm.group():
        pass
    with pytest.raises(ArgumentError, match="to itself do not match its receives"), comm.group():
        comm.send(new(), comm.rank)
    for what, call in {
        "allreduce": lambda: comm.allreduce(new()),
        "broadcast": lambda: comm.broadcast(new(), async_op=True),
        "barrier": lambda: comm.barrier(),
        "split": lambda: comm.split(0),
    }.items():
        for _ in range(2):
            call()  # so that it is one that the fast path knows
        with (
            pytest.raises(ArgumentError, match=rf"group\(\): wanted sends and receives only, got {what}"),
            comm.group(),
        ):
            call()
    with pytest.raises(ArgumentError, match="wanted send and recv, got sendrecv"), comm.group():
        comm.sendrecv(new(), 1 - comm.rank, new(), 1 - comm.rank)
    for words in ({"timeout": 1.0}, {"stream": 7}):
        with pytest.raises(ArgumentError, match="without a timeout or stream of their own"), comm.group():
            comm.recv(new(), 1 - comm.rank, **words)
    into = new()
    with comm.group():
        comm.send(np.full(COUNT, float(comm.rank)), 1 - comm.rank)
        comm.recv(into, 1 - comm.rank)
    assert (into == 1 - comm.rank).all()
    _still_works(comm)


def test_mistakes_that_take_two_ranks(pool: Pool) -> None:
    pool(2).run(_indivisible)


def _in_place(comm: hetcoll.Communicator) -> None:
    n, me = comm.size, comm.rank
    part = slice(COUNT * me, COUNT * (me + 1))
    mine, total = np.arange(COUNT) + 10.0 * me, n * np.arange(COUNT) + 5.0 * n * (n - 1)
    everyone = (np.arange(COUNT) + 10.0 * np.arange(n)[:, None]).ravel()
    counts = [COUNT] * n
    for _ in range(2):  # the second time they are repeated calls
        for recvbuf in (None, "same"):
            a = mine.copy()
            comm.allreduce(a, None if recvbuf is None else a)
            assert (a == total).all()
            a = mine.copy()
            comm.reduce(a, None if recvbuf is None else a, root=n - 1)
            assert (a == (total if me == n - 1 else mine)).all()
        for gathers in (comm.allgather, lambda s, r: comm.allgatherv(s, r, counts)):
            a = np.zeros(COUNT * n)
            a[part] = mine
            gathers(a[part], a)
            assert (a == everyone).all()
        for reduces in (comm.reduce_scatter, lambda s, r: comm.reduce_scatterv(s, r, counts=counts)):
            a = everyone.copy()
            reduces(a, a[part])
            assert (a[part] == n * mine).all()
        for root in range(n):
            a = np.zeros(COUNT * n)
            a[part] = mine
            comm.gather(a[part], a, root)
            assert me != root or (a == everyone).all()
            a = everyone.copy() if me == root else np.zeros(COUNT * n)
            comm.scatter(a, a[part], root)
            assert (a[part] == mine).all()
        a = np.repeat(10.0 * me + np.arange(n), COUNT)
        comm.alltoall(a, a)
        assert (a == np.repeat(me + 10.0 * np.arange(n), COUNT)).all()


@pytest.mark.parametrize("size", [1, 2])
def test_in_place_where_it_is_allowed(pool: Pool, size: int) -> None:
    pool(size).run(_in_place)


def _explained(comm: hetcoll.Communicator) -> None:
    for collective in Collective:
        for nbytes in (0, 8, 1 << 20):
            found = comm.explain(collective.label, nbytes)
            assert (found.collective, found.nbytes) == (collective.label, nbytes)
            assert found.algorithm
            assert found.reason
            assert found.transport == ("self" if comm.size == 1 else "shm")
            assert found.channels >= (comm.size > 1)
            assert math.isnan(found.seconds) or found.seconds >= 0
            text = str(found)
            assert text.startswith(f"{collective.label} of {nbytes} bytes: {found.algorithm} over {found.transport}, ")
            assert text.endswith(f"({found.reason})")
    assert comm.explain("allreduce", 1 << 24).seconds >= comm.explain("allreduce", 8).seconds
    for op in (None, 3, "", "sum"):
        with pytest.raises(ArgumentError, match=r"op: wanted one of allreduce, .*, got"):
            comm.explain(op, 8)


@pytest.mark.parametrize("size", [1, 2])
def test_explain(pool: Pool, size: int) -> None:
    pool(size, HETCOLL_TRANSPORT="shm").run(_explained)


def _numbers_of_other_kinds(comm: hetcoll.Communicator) -> None:
    for timeout in (np.float32(60), np.int64(60), 1 << 63, 10**400, 1e300, math.inf):
        values = np.ones(COUNT)
        comm.allreduce(values, timeout=timeout)
        comm.allreduce(values, async_op=True).wait(timeout)
        assert (values == comm.size**2).all()
        assert comm.agree(comm.rank + 2, timeout=timeout) == (2 if comm.size == 1 else 2 & 3)
        if comm.size > 1:
            comm.send(values, 1 - comm.rank, tag=1, async_op=True, timeout=timeout)
            comm.recv(values, hetcoll.ANY_SOURCE, tag=1, timeout=timeout)
        comm.window(values, timeout=timeout).close()


@pytest.mark.parametrize("size", [1, 2])
def test_timeouts_are_any_real_numbers(pool: Pool, size: int) -> None:
    """Also those that are longer than clocks of the system can count."""
    pool(size).run(_numbers_of_other_kinds)


def _waited_wrongly(comm: hetcoll.Communicator) -> None:
    """What runs is not ended by a time that is none; nor is its communicator."""
    into, other = np.zeros(COUNT), 1 - comm.rank
    window = comm.window(np.zeros(COUNT))
    works = [
        comm.recv(into, other, async_op=True),
        comm.recv(new(), other, tag=1, async_op=True),
        window.wait_signal(async_op=True),
    ]
    for work in works:
        for timeout in (0, -1, math.nan, "a", True):
            with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got"):
                work.wait(timeout)
    for send in (comm.send(new(), other, async_op=True), comm.send(new(), other, tag=1, async_op=True)):
        send.wait()
    window.put(new(), other, signal=0)
    for work in works:
        wait_until(lambda: work.done)  # noqa: B023  (it is called here)
        with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got -1"):
            work.wait(-1)
        work.wait(5.0)
    assert (into == 1).all()
    comm.barrier()
    window.close()


def test_a_wait_for_no_time_ends_nothing(pool: Pool) -> None:
    pool(2).run(_waited_wrongly)


def _wrong_kinds(comm: hetcoll.Communicator) -> None:
    x, y = np.zeros(4), np.zeros(4 * comm.size)
    comm.allreduce(x)
    comm.broadcast(x)
    for wrong in (
        lambda: comm.allreduce(None),
        lambda: comm.allreduce(x, op=None),
        lambda: comm.broadcast(x, root="0"),
        lambda: comm.broadcast(x, root=None),
        lambda: comm.broadcast(x, root=0.0),
        lambda: comm.broadcast(x, root=False),
        lambda: comm.broadcast(x, root=1 << 40),
        lambda: comm.send(x, 1.5),
        lambda: comm.send(0, x),
        lambda: comm.send(x, y),
        lambda: comm.recv(x, y),
        lambda: comm.recv(x, y, tag=1),
        lambda: comm.broadcast(x, root=np.array([None])),
        lambda: comm.grow(1 << 40),
        lambda: comm.scatter(None, x, root=comm.rank),
        lambda: comm.sendrecv(x, 1 << 40, y, 0),
        lambda: comm.allreduce(x, timeout="a"),
        lambda: comm.explain("allreduce", "a"),
        lambda: comm.explain("allreduce", -1),
        lambda: comm.empty(-1),
        lambda: comm.empty((2, -2)),
        lambda: comm.empty(1.5),
    ):
        with pytest.raises((ArgumentError, BufferTypeError)):
            wrong()
    assert comm.empty(np.int64(3)).shape == (3,)
    assert comm.explain("ALLREDUCE", 8).collective == "allreduce"
    x[:] = 1
    comm.allreduce(x)
    assert (x == comm.size).all()


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_number_or_no_array_is_refused_in_our_words(pool: Callable[..., Ranks], size: int) -> None:
    pool(size).run(_wrong_kinds)
