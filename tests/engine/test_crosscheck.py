"""HETCOLL_CHECK=1: right programs run as ever, wrong ones are told what is wrong before or after the call."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import run_cases
from ranks import Ranks, wait_until
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll import Work, calls
from hetcoll.calls import Call
from hetcoll.calls.buffers import array_of
from hetcoll.runtime.crosscheck import CrossCheck
from hetcoll.runtime.tags import Mailbox
from hetcoll.types import REDUCING, ROOTED, Collective

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]
SIZE = 3


TYPES = (("float32", "sum"), ("int64", "max"), ("bfloat16", "sum"), ("bool", "lor"), ("complex64", "sum"))


def every_case() -> list[Case]:
    kinds = [kind for kind in Collective if kind not in (Collective.BARRIER, Collective.P2P, Collective.ALLTOALLV)]
    found = []
    for kind in kinds:
        for dtype, op in TYPES:
            counts = (5, 0, 4) if kind.label.endswith("v") else ()
            root = SIZE - 1 if kind in ROOTED else 0
            found.append(Case(kind.label, dtype, 7, op if kind in REDUCING else "sum", root, counts=counts))
    large = [Case(kind, "float64", 3001, exact=False) for kind in ("allreduce", "reduce_scatter", "alltoall")]
    return [*found, *large, Case("alltoallv", "uint8", 30)]


@parametrize("transport", ["auto", "tcp"], first=1)
@pytest.mark.parametrize("async_op", [False, True])
def test_right_calls_are_as_ever(pool: Pool, transport: str, async_op: bool) -> None:
    ranks = pool(SIZE, HETCOLL_CHECK="1", HETCOLL_TRANSPORT=transport)
    ranks.run(run_cases, every_case(), {}, async_op)


def use_the_rest(comm: hetcoll.Communicator) -> None:
    comm.barrier()
    part = comm.split(comm.rank % 2)
    assert part is not None
    part.allreduce(np.ones(3))
    part.close()
    comm.allreduce(np.empty(0))
    first = comm.allreduce(x := np.ones(3000), async_op=True) if comm.rank == 0 else None
    if comm.rank < 2:  # rank 1 begins its own later
        comm.send(np.ones(3), 1) if comm.rank == 0 else comm.recv(np.ones(3), 0)
    (first or comm.allreduce(x := np.ones(3000), async_op=comm.rank > 1)).wait()  # of rank 1 it blocks
    assert (x == comm.size).all()
    threads = [threading.Thread(target=call_at_once, args=(comm,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()


def call_at_once(comm: hetcoll.Communicator) -> None:
    """The same as other threads do."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(5):
        comm.allreduce(x := np.ones(3))
        assert (x == comm.size).all()
        works = [comm.send(np.ones(3), right, async_op=True), comm.recv(np.ones(3), left, async_op=True)]
        comm.sendrecv(np.ones(3), right, np.ones(3), left)
        for work in works:
            work.wait()


def test_the_rest(pool: Pool) -> None:
    pool(SIZE, HETCOLL_CHECK="1").run(use_the_rest)


def message(n: int, rank: int, count: int, dtype: Any) -> Any:
    return (np.arange(count) * (n + 1) % 100 + rank).astype(dtype)


def exchange_messages(comm: hetcoll.Communicator) -> None:
    """In each form that there is, around the ranks, with messages of each to itself."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n, (count, dtype) in enumerate(((3, np.float32), (0, bool), (200_001, np.int64), (7, ml_dtypes.bfloat16))):
        sent, got = message(n, comm.rank, count, dtype), [np.zeros(count, dtype) for _ in range(7)]
        comm.sendrecv(sent, right, got[0], left)
        with comm.group():
            comm.send(sent, right)
            comm.recv(got[1], left)
            comm.send(sent, comm.rank)
            comm.recv(got[2], comm.rank)
            comm.recv(got[3], left)
            comm.send(sent, right)
        works = [comm.send(sent, right, async_op=True), comm.send(sent, right, tag=2, async_op=True)]
        comm.recv(got[4], left)
        works.append(comm.recv(got[5], left, tag=2, async_op=True))
        if comm.rank == 0:
            comm.send(sent, right)
        comm.recv(got[6], left)
        if comm.rank > 0:
            comm.send(sent, right)
        for work in reversed(works):
            work.wait()
        for number, each in enumerate(got):
            want = message(n, comm.rank if number == 2 else left, count, dtype)
            assert each.tobytes() == want.tobytes(), (n, number)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_right_messages_are_as_ever(pool: Pool, transport: str) -> None:
    pool(SIZE, HETCOLL_CHECK="1", HETCOLL_TRANSPORT=transport).run(exchange_messages)


def both_ways(comm: hetcoll.Communicator, x: Any, y: Any) -> None:
    comm.sendrecv(x, 1, y, 1) if comm.rank == 0 else comm.sendrecv(y, 0, x, 0)


def in_a_group(comm: hetcoll.Communicator, x: Any) -> None:
    with comm.group():
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    # rank 0 sends the array to rank 1
    "send": lambda c, x: c.send(x, 1) if c.rank == 0 else c.recv(x, 0),
    "async": lambda c, x: (c.send(x, 1, async_op=True) if c.rank == 0 else c.recv(x, 0, async_op=True)).wait(),
    "sendrecv": lambda c, x: both_ways(c, x, np.ones(5, x.dtype)),
    "group": in_a_group,
    "tag": lambda c, x: c.send(x, 1, tag=4) if c.rank == 0 else c.recv(x, 0, tag=4),
}  # fmt: skip


def send_oddly(comm: hetcoll.Communicator, name: str) -> str:
    """Both ranks are told, and can go on."""
    x = np.arange(5, dtype=np.float32)
    x[3:] = np.inf if comm.rank == 0 else 1
    with pytest.raises(hetcoll.ArgumentError) as caught:
        FORMS[name](comm, x)
    comm.sendrecv(np.full(3, comm.rank), 1 - comm.rank, got := np.zeros(3, int), 1 - comm.rank)
    assert got.tolist() == [1 - comm.rank] * 3
    return str(caught.value)


@pytest.mark.parametrize("name", FORMS)
def test_a_message_that_is_not_finite(pool: Pool, name: str) -> None:
    (text,) = set(pool(2, HETCOLL_CHECK="1").run(send_oddly, name))
    wanted = (
        r"HETCOLL_CHECK: what rank 0 sends to rank 1 is not finite: 2 of 5 elements, the first is inf at 3, sent at "
        r".*test_crosscheck\.py:\d+"
    )
    assert re.fullmatch(wanted, text), text


def spoil_messages(comm: hetcoll.Communicator) -> dict[str, str]:
    """In each form, each in a communicator of its own: rank 0's memory changes before it is sent."""
    return {name: spoil_message(comm, form) for name, form in FORMS.items()}


def spoil_message(whole: hetcoll.Communicator, form: Callable[[Any, Any], Any]) -> str:
    comm = whole.split(0)
    assert comm is not None
    x, start, tagged = np.ones(5), comm._host.exchange, Mailbox._write

    def change(send: Any, *rest: Any, **how: Any) -> Any:
        if comm.rank == 0:
            x[-1] += 1
        return start(send, *rest, **how)

    def change_tagged(self: Any, *rest: Any) -> None:
        x[-1] += 1
        tagged(self, *rest)

    comm._host.__dict__["exchange"] = change
    Mailbox._write = change_tagged  # type: ignore[method-assign]
    try:
        form(comm, x)
        comm.barrier()  # who sends hears of it here
    except hetcoll.CommunicationError as error:
        return str(error)
    finally:
        Mailbox._write = tagged  # type: ignore[method-assign]
        comm.close()
    return ""


def test_messages_that_are_spoiled(pool: Pool) -> None:
    one, other = pool(2, HETCOLL_CHECK="1").run(spoil_messages)
    assert one == other
    for name, text in one.items():
        wanted = (
            r"HETCOLL_CHECK: rank 1 received something else than rank 0 sent at .*test_crosscheck\.py:\d+: "
            r"recv\(float64, count=5.*\) from rank 0"
        )
        assert re.fullmatch(wanted, text), (name, text)


def odd(dtype: Any, *where: int) -> Any:
    values = np.ones(5, dtype)
    values[list(where)] = np.nan if np.dtype(dtype).kind != "f" else np.inf
    return values


ODD: dict[str, tuple[Callable[..., Any], Any, str]] = {
    # a call with the odd array on rank 1, its dtype, and what is said
    "allreduce": (lambda c, x, **how: c.allreduce(x, **how), np.float32, r"allreduce\(float32, count=5, op=sum\)"),
    "reduce": (
        lambda c, x, **how: c.reduce(x, root=2, **how),
        np.float64,
        r"reduce\(float64, count=5, op=sum, root=2\)",
    ),
    "allgather": (lambda c, x, **how: c.allgather(x, np.ones(5 * c.size, x.dtype), **how), np.float16, "allgather"),
    "gather": (lambda c, x, **how: c.gather(x, np.ones(5 * c.size, x.dtype), 0, **how), np.complex64, "gather"),
    "broadcast": (lambda c, x, **how: c.broadcast(x, root=1, **how), ml_dtypes.bfloat16, "broadcast"),
    "alltoall": (
        lambda c, x, **how: c.alltoall(x[:5].repeat(c.size), np.ones(5 * c.size, x.dtype), **how),
        np.float32,
        "alltoall",
    ),
}


def call_oddly(comm: hetcoll.Communicator, name: str, async_op: bool) -> tuple[str, bool]:
    call, dtype, _ = ODD[name]
    x = odd(dtype, 3, 4) if comm.rank == 1 else np.ones(5, dtype)
    before = x.copy()
    if async_op:
        work = call(comm, x, async_op=True)
        other = comm.allreduce(y := np.ones(2), async_op=True)
        with pytest.raises(hetcoll.ArgumentError) as caught:
            work.wait()
        assert work.done
        assert str(work.error) == str(caught.value)
        other.wait()
    else:
        with pytest.raises(hetcoll.ArgumentError) as caught:
            call(comm, x)
        comm.allreduce(y := np.ones(2))  # nothing is broken
    return str(caught.value), x.tobytes() == before.tobytes() and y.tolist() == [comm.size] * 2


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_input_that_is_not_finite(pool: Pool, name: str, async_op: bool) -> None:
    said = pool(SIZE, HETCOLL_CHECK="1").run(call_oddly, name, async_op)
    ((text, untouched),) = set(said) if not async_op else {(text, True) for text, _ in said}
    assert untouched
    what = rf"the input of {ODD[name][2]}.* is not finite: rank 1: \d.* elements, the first is .* at \d"
    assert re.fullmatch(f"HETCOLL_CHECK: {what}", text), text


def wait_for_nothing(comm: hetcoll.Communicator) -> str:
    """What is logged of an asynchronous call whose Work is dropped, at a later call."""
    said, log = io.StringIO(), logging.getLogger("hetcoll")
    log.addHandler(handler := logging.StreamHandler(said))
    try:
        comm.allreduce(np.full(3, np.nan), async_op=True)
        wait_until(lambda: bool(comm.barrier()) and "nobody" in said.getvalue() and not comm.error, 20)
        comm.barrier()
    finally:
        log.removeHandler(handler)
    return said.getvalue()


def test_a_work_that_is_dropped_is_looked_at_all_the_same(pool: Pool) -> None:
    (text,) = set(pool(1, HETCOLL_CHECK="1").run(wait_for_nothing))
    assert re.search(r"nobody has waited for allreduce\(float64, count=3.*is not finite: rank 0: 3 of 3 elements", text)


def receive_into_rubbish(comm: hetcoll.Communicator) -> list[float]:
    """What a rank does not give may hold anything."""
    x, part = np.full(2, np.nan), np.full(1, np.nan)
    if comm.rank == 0:
        x[:] = 1
    comm.broadcast(x)
    comm.scatter(np.ones(comm.size), part) if comm.rank == 0 else comm.scatter(None, part)
    return [*x.tolist(), *part.tolist()]


def test_what_is_overwritten_may_be_rubbish(pool: Pool) -> None:
    assert pool(SIZE, HETCOLL_CHECK="1").run(receive_into_rubbish) == [[1.0] * 3] * SIZE


def call_different_things(comm: hetcoll.Communicator) -> tuple[str, bool]:
    x = np.ones(4 + comm.rank)
    with pytest.raises(hetcoll.CollectiveMismatchError) as caught:
        comm.allreduce(x)
    return str(caught.value), x.tolist() == [1.0] * x.size


def test_different_calls_are_found_before_anything_moves(launch: Launch) -> None:
    for text, untouched in launch(2, HETCOLL_CHECK="1").run(call_different_things):
        assert untouched
        assert "rank 0 called HETCOLL_CHECK before allreduce(float64, count=4, op=sum) at" in text
        assert "rank 1 called HETCOLL_CHECK before allreduce(float64, count=5, op=sum) at" in text


def spoil(whole: hetcoll.Communicator, async_op: bool) -> str:
    """Rank 2's result of a sum loses a bit on its way, as rounding might; the next call of any kind says so."""
    comm = whole.split(0)
    assert comm is not None
    start = comm._core.start

    def flip(call: Any, *rest: Any) -> Any:
        work = start(call, *rest)
        if comm.rank == 2 and not call.label and call.send is not None:
            work.wait()
            array_of(call.recv).view(np.uint8)[0] ^= 1
        return work

    comm._core.__dict__["start"] = flip
    try:
        for _ in range(3):
            comm.allreduce(np.ones(4), async_op=async_op).wait()
            comm.barrier(async_op=async_op).wait()
    except hetcoll.CommunicationError as error:
        return str(error)
    finally:
        comm.close()
    return ""


@pytest.mark.parametrize("async_op", [False, True])
def test_results_that_differ(pool: Pool, async_op: bool) -> None:
    (text,) = set(pool(SIZE, HETCOLL_CHECK="1").run(spoil, async_op))
    wanted = (
        r"HETCOLL_CHECK: the result of allreduce\(.*\) is not the same everywhere: ranks 0-1: \w{16}; rank 2: \w{16}"
    )
    assert re.fullmatch(wanted, text), text


SPOILED: dict[str, tuple[Callable[..., Any], str]] = {
    # a call, and what is said when the last element of rank 2's result is another one
    "reduce_scatter": (lambda c, **how: c.reduce_scatter(np.ones(2 * c.size), np.zeros(2), **how), "sum of"),
    "reduce": (lambda c, **how: c.reduce(np.ones(70), np.zeros(70), op="max", root=2, **how), "max of"),
    "allreduce": (lambda c, **how: c.allreduce(np.ones(7, np.int32), np.zeros(7, np.int32), **how), "sum of"),
    "broadcast": (lambda c, **how: c.broadcast(np.ones(3), root=1, **how), "what rank 1 gave came changed"),
    "allgather": (lambda c, **how: c.allgather(np.ones(3), np.zeros(3 * c.size), **how), "what rank 2 gave"),
    "gather": (lambda c, **how: c.gather(np.ones(2), np.zeros(2 * c.size), root=2, **how), "what rank 2 gave"),
    "scatter": (lambda c, **how: c.scatter(np.ones(2 * c.size), np.zeros(2), root=1, **how), "what rank 1 gave"),
    "alltoall": (lambda c, **how: c.alltoall(np.ones(c.size), np.zeros(c.size), **how), "what rank 2 gave"),
}


def spoil_results(comm: hetcoll.Communicator) -> dict[tuple[str, bool], str]:
    """Of each call, blocking and not, each in a communicator of its own."""
    return {(name, async_op): spoil_result(comm, name, async_op) for name in SPOILED for async_op in (False, True)}


def spoil_result(whole: hetcoll.Communicator, name: str, async_op: bool) -> str:
    """Rank 2's memory changes an element of what came."""
    comm = whole.split(0)
    assert comm is not None
    start = comm._core.start

    def change(call: Any, *rest: Any) -> Any:
        work = start(call, *rest)
        if comm.rank == 2 and not call.label:
            work.wait()
            array_of(call.recv)[-1] += 1
        return work

    comm._core.__dict__["start"] = change
    try:
        SPOILED[name][0](comm, async_op=async_op).wait()
        comm.barrier()  # the others hear of it here
    except hetcoll.CommunicationError as error:
        return str(error)
    finally:
        comm.close()
    return ""


def test_a_result_that_is_not_what_the_inputs_make(pool: Pool) -> None:
    one, *others = pool(SIZE, HETCOLL_CHECK="1").run(spoil_results)
    assert all(each == one for each in others)
    for (name, async_op), text in one.items():
        assert text.startswith(f"HETCOLL_CHECK: the result of {name}("), (name, async_op, text)
        assert SPOILED[name][1] in text, (name, async_op, text)
        assert "on rank 2 is wrong: " in text, (name, async_op, text)


def test_each_of_many_ranks_is_told_what_is_for_it_alone() -> None:
    size, told = 1000, list[Call]()

    def start(call: Call, *how: object) -> Work:
        told.append(call)
        return Work()

    check = CrossCheck(0, size, start, None)  # type: ignore[arg-type]  # nothing fails
    x, y = np.ones(size, np.float32), np.zeros(size, np.float32)
    for call in (calls.alltoall(0, size, x, y), calls.reduce_scatter(0, size, x, y[:1], "sum")):
        check.tell(call, False, False, 1.0)
    for call in told:
        assert call.send is not None
        assert call.recv is not None
        assert call.send.nbytes == call.recv.nbytes <= 500 * size


def receive_what_is_spoiled(comm: hetcoll.Communicator, count: int) -> list[str]:
    """Messages and sums over a network that turns bits, until somebody is told."""
    x = np.ones(count)
    try:
        for _ in range(20):
            comm.sendrecv(x, 1 - comm.rank, y := np.zeros(count), 1 - comm.rank)
            comm.allreduce(y)
    except hetcoll.CommunicationError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("count", [1, 100_000])
def test_bytes_that_a_network_spoils(launch: Launch, count: int) -> None:
    """Large ones are mostly data; small ones mostly what goes before them."""
    env = {"HETCOLL_INTEGRITY": "off", "HETCOLL_TRANSPORT": "tcp", "HETCOLL_FAULT": "corrupt_every=5000,rank=0"}
    ((text,),) = {tuple(said) for said in launch(2, HETCOLL_CHECK="1", **env).run(receive_what_is_spoiled, count)}
    assert "HETCOLL_CHECK: " in text or "belongs to another operation" in text, text


def call_in_time(comm: hetcoll.Communicator) -> None:
    comm.barrier()
    if comm.rank > 0:
        with pytest.raises(hetcoll.CollectiveTimeoutError, match=r"did not finish in 0\.5 s"):
            comm.allreduce(np.ones(4), timeout=0.5)
    else:
        wait_until(lambda: comm.error, 20)


def test_the_check_has_no_more_time_than_the_call(launch: Launch) -> None:
    launch(SIZE, HETCOLL_CHECK="1").run(call_in_time)
