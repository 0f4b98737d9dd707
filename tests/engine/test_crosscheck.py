"""HETCOLL_CHECK=1: right programs run as ever, wrong ones are told what is wrong before or after the call."""

from __future__ import annotations

import re
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
from hetcoll.runtime.crosscheck import view
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


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("async_op", [False, True])
def test_right_calls_are_as_ever(pool: Pool, transport: str, async_op: bool) -> None:
    ranks = pool(SIZE, HETCOLL_CHECK="1", HETCOLL_TRANSPORT=transport)
    ranks.run(run_cases, every_case(), {}, async_op)


def use_the_rest(comm: hetcoll.Communicator) -> None:
    """What is not checked works, too."""
    comm.barrier()
    comm.sendrecv(np.ones(3), (comm.rank + 1) % comm.size, np.ones(3), (comm.rank - 1) % comm.size)
    with comm.group():
        comm.send(np.full(3, np.nan), (comm.rank + 1) % comm.size)
        comm.recv(np.ones(3), (comm.rank - 1) % comm.size)
    part = comm.split(comm.rank % 2)
    assert part is not None
    part.allreduce(np.ones(3))
    part.close()
    comm.allreduce(np.empty(0))


def test_the_rest(pool: Pool) -> None:
    pool(SIZE, HETCOLL_CHECK="1").run(use_the_rest)


def odd(dtype: Any, *where: int) -> Any:
    values = np.ones(5, dtype)
    values[list(where)] = np.nan if np.dtype(dtype).kind != "f" else np.inf
    return values


ODD: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    # a call with the odd array on rank 1, its dtype, and what is said
    "allreduce": (lambda c, x: c.allreduce(x), np.float32, r"allreduce\(float32, count=5, op=sum\)"),
    "reduce": (lambda c, x: c.reduce(x, root=2), np.float64, r"reduce\(float64, count=5, op=sum, root=2\)"),
    "allgather": (lambda c, x: c.allgather(x, np.ones(5 * c.size, x.dtype)), np.float16, "allgather"),
    "gather": (lambda c, x: c.gather(x, np.ones(5 * c.size, x.dtype), root=0), np.complex64, "gather"),
    "broadcast": (lambda c, x: c.broadcast(x, root=1), ml_dtypes.bfloat16, "broadcast"),
}


def call_oddly(comm: hetcoll.Communicator, name: str) -> tuple[str, bool]:
    call, dtype, _ = ODD[name]
    x = odd(dtype, 3, 4) if comm.rank == 1 else np.ones(5, dtype)
    before = x.copy()
    with pytest.raises(hetcoll.ArgumentError) as caught:
        call(comm, x)
    y = np.ones(2)
    comm.allreduce(y)  # nothing is broken
    return str(caught.value), x.tobytes() == before.tobytes() and y.tolist() == [comm.size] * 2


@pytest.mark.parametrize("name", ODD)
def test_input_that_is_not_finite(pool: Pool, name: str) -> None:
    said = pool(SIZE, HETCOLL_CHECK="1").run(call_oddly, name)
    ((text, untouched),) = set(said)
    assert untouched
    wanted = (
        rf"HETCOLL_CHECK: the input of {ODD[name][2]}.* is not finite: rank 1: 2 of 5 elements, the first is .* at 3"
    )
    assert re.fullmatch(wanted, text), text


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


def spoil(comm: hetcoll.Communicator) -> str:
    """Rank 2's result loses a bit on its way."""
    start = comm._core.start

    def flip(call: Any, *rest: Any) -> Any:
        work = start(call, *rest)
        if comm.rank == 2 and not call.label:
            x.view(np.uint8)[7] ^= 1
        return work

    x = np.ones(4)
    comm._core.__dict__["start"] = flip
    with pytest.raises(hetcoll.CommunicationError) as caught:
        comm.allreduce(x)
    return str(caught.value)


def test_results_that_differ(launch: Launch) -> None:
    (text,) = set(launch(SIZE, HETCOLL_CHECK="1").run(spoil))
    wanted = (
        r"HETCOLL_CHECK: the result of allreduce\(.*\) is not the same everywhere: ranks 0-1: \w{16}; rank 2: \w{16}"
    )
    assert re.fullmatch(wanted, text), text


SPOILED: dict[str, tuple[Callable[[Any], Any], str]] = {
    # a call, and what is said when the last element of rank 2's result is another one
    "reduce_scatter": (lambda c: c.reduce_scatter(np.ones(2 * c.size), y := np.zeros(2)) and y, "sum of"),
    "reduce": (lambda c: c.reduce(np.ones(70), y := np.zeros(70), op="max", root=2) and y, "max of"),
    "allreduce": (lambda c: c.allreduce(np.ones(7, np.int32), y := np.zeros(7, np.int32)) and y, "not the same"),
    "broadcast": (lambda c: c.broadcast(y := np.ones(3), root=1) and y, "not the same"),
    "gather": (
        lambda c: c.gather(np.ones(2), y := np.zeros(2 * c.size), root=2) and y,
        "what rank 2 gave came changed",
    ),
    "scatter": (lambda c: c.scatter(np.ones(2 * c.size), y := np.zeros(2), root=1) and y, "what rank 1 gave"),
    "alltoall": (lambda c: c.alltoall(np.ones(c.size), y := np.zeros(c.size)) and y, "what rank 2 gave"),
}


def spoil_results(comm: hetcoll.Communicator, name: str) -> str:
    """Rank 2's memory changes an element of what came."""
    start = comm._core.start

    def change(call: Any, *rest: Any) -> Any:
        work = start(call, *rest)
        if comm.rank == 2 and not call.label:
            view(call.recv)[-1] += 1
        return work

    comm._core.__dict__["start"] = change
    try:
        SPOILED[name][0](comm)
        comm.barrier()  # the others hear of it here
    except hetcoll.CommunicationError as error:
        return str(error)
    return ""


@parametrize("name", SPOILED, first=3)
def test_a_result_that_is_not_what_the_inputs_make(launch: Launch, name: str) -> None:
    (text,) = set(launch(SIZE, HETCOLL_CHECK="1").run(spoil_results, name))
    assert text.startswith(f"HETCOLL_CHECK: the result of {name}(")
    assert SPOILED[name][1] in text
    assert "on rank 2 is wrong: " in text or name in ("allreduce", "broadcast")


def call_in_time(comm: hetcoll.Communicator) -> None:
    comm.barrier()
    if comm.rank > 0:
        with pytest.raises(hetcoll.CollectiveTimeoutError, match=r"did not finish in 0\.5 s"):
            comm.allreduce(np.ones(4), timeout=0.5)
    else:
        wait_until(lambda: comm.error, 20)


def test_the_check_has_no_more_time_than_the_call(launch: Launch) -> None:
    launch(SIZE, HETCOLL_CHECK="1").run(call_in_time)
