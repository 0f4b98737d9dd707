"""Steps of calls and messages in graphs: captured once, replayed with new inputs, beside calls that no graph has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cases import Call
from device_checks import Capture
from gpu_kinds import Own, device_of, kinds_of, stream_of
from on_gpu import Copies
from reference import Case

import hetcoll
from hetcoll.types import REDUCING, Collective
from hetcoll.vendors.devices.base import Device

from .program import values

_LIBRARIES = ("float32", "float64", "int32", "int64")  # whose sums every vendor's library has
_LONG = 1_800_001  # float32s: more than one kernel does


class OnStream:
    """The collectives of `comm`, enqueued on `stream` and not waited for, on what `copies` has of their arrays."""

    def __init__(self, comm: hetcoll.Communicator, copies: Copies, stream: int) -> None:
        self._comm, self._copies, self._stream = comm, copies, stream
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> Callable[..., hetcoll.Work]:
        method = getattr(self._comm, name)

        def call(*args: Any, **options: Any) -> hetcoll.Work:
            moved = [self._copies.buffer(each) if isinstance(each, np.ndarray) else each for each in args]
            work: hetcoll.Work = method(*moved, stream=self._stream, **options)
            return work

        return call


@contextlib.contextmanager
def captured(device: Device, stream: int, capture: Callable[[], object]) -> Iterator[Capture]:
    """A graph of what is enqueued on `stream`, which is gone afterwards."""
    graph = Capture(device, stream)
    try:
        with graph:
            capture()
        yield graph
    finally:
        graph.close()


def why_not(comm: hetcoll.Communicator, case: Case) -> bool | None:
    """Whether no graph may capture such a call, as docs/gpus.md has it. None: it depends on the libraries."""
    topology, ranks = comm.topology, range(comm.size)
    if "c" in kinds_of(comm):
        return True
    if all(topology.way(a, b) == "mapped" for a in ranks for b in ranks if a != b):
        return False
    if len(set(kinds_of(comm))) > 1:
        return True
    plain = Collective[case.collective.upper()] not in REDUCING or (case.dtype in _LIBRARIES and case.op == "sum")
    alone = comm._config.islands is not None or comm._config.reproducible
    return False if plain and not alone else None


def graphs(
    comm: hetcoll.Communicator, cases: Sequence[Case], seeds: Sequence[int], beside: str, late: int, seconds: float
) -> None:
    """`cases` in one graph, which all ranks replay with the inputs of each of `seeds`. `beside`: what comes between
    two replays, or while one is under way."""
    kinds = kinds_of(comm)
    if beside == "under way" and len(set(kinds)) < len(kinds):
        beside = "between"  # the fakes of vendors' libraries take a replay and a call as they come, not as launched
    # As of one whose vendor's library averages, which multiplies floats by 1/n before it adds them.
    calls = [Call(comm, replace(case, exact=case.op != "avg" or "int" in case.dtype)) for case in cases]
    whole = Own(comm, np.ones(_LONG if beside == "under way" else 1000, np.float32))
    with stream_of(comm) as stream, stream_of(comm) as other:
        comm.allreduce(whole.array, stream=stream)  # a library is set up by what no graph captures
        check(comm, whole, comm.size)
        refused = [why_not(comm, case) for case in cases]
        if stream is None or other is None:  # then others are refused
            return
        device = device_of(comm)
        device.activate()
        with contextlib.ExitStack() as stack:
            copies = [stack.enter_context(Copies(device, call.arrays)) for call in calls]
            said: list[str] = []

            def capture() -> None:
                for call, memory, wrong in zip(calls, copies, refused, strict=True):
                    try:
                        call.begin(OnStream(comm, memory, stream))  # type: ignore[arg-type]
                    except hetcoll.ArgumentError as error:
                        if wrong is False or "a graph is being captured" not in str(error):
                            raise
                        said.append(str(error))
                    else:
                        assert not wrong, f"{call.case} was captured"

            with captured(device, stream, capture) as graph:
                if said:
                    return
                for turn, seed in enumerate(seeds):
                    for call, memory in zip(calls, copies, strict=True):
                        call.again(call.case.seed if call.case.collective == "alltoallv" else seed)  # its counts, too
                        memory.__enter__()
                    if comm.rank == late:
                        time.sleep(seconds)
                    graph.replay(stream)
                    if beside == "under way":
                        comm.allreduce(whole.array, stream=other)
                    device.synchronize()
                    if comm.error is not None:  # then streams go on without the data, and the next call says why
                        comm.barrier()
                    for call, memory in zip(calls, copies, strict=True):
                        memory.fetch()
                        try:
                            call.check()
                        except AssertionError as error:
                            raise AssertionError(
                                f"replay {turn + 1} of {call.case}, rank {comm.rank}: {error}"
                            ) from error
                    if beside == "between":
                        comm.allreduce(whole.array, stream=stream)
                    elif beside == "barrier":
                        comm.barrier()
                    if beside in ("between", "under way"):
                        check(comm, whole, comm.size ** (turn + 2))


def _may_pass(comm: hetcoll.Communicator, a: int, b: int) -> bool:
    """Whether a graph may have messages from one rank to the other, as docs/gpus.md has it."""
    kinds = kinds_of(comm)
    return "c" not in (kinds[a], kinds[b]) and (kinds[a] == kinds[b] or comm.topology.way(a, b) == "mapped")


def passing(
    comm: hetcoll.Communicator, edges: list[tuple[int, int, int]], grouped: bool, seeds: Sequence[int], beside: str
) -> None:
    """Messages in one graph on each rank that has some, replayed with what each of `seeds` makes of them."""
    mine = [
        (n, src, dst) for n, (src, dst, _) in enumerate(edges) if comm.rank in (src, dst) and _may_pass(comm, src, dst)
    ]
    arrays = {n: np.zeros(max(1, edges[n][2]), np.int64) for n, *_ in mine}
    whole = Own(comm, np.ones(1000, np.float32))
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(stream_of(comm))
        comm.allreduce(whole.array, stream=stream)
        check(comm, whole, comm.size)
        replay: Callable[[], None] = lambda: None  # noqa: E731
        if mine and stream is not None:
            device = device_of(comm)
            device.activate()
            memory = stack.enter_context(Copies(device, list(arrays.values())))

            def move() -> None:
                with comm.group() if grouped else contextlib.nullcontext():
                    for n, src, dst in mine:
                        buffer = replace(memory.buffer(arrays[n]), stream=stream)
                        if comm.rank == src:
                            comm.send(buffer, dst)
                        else:
                            comm.recv(buffer, src)

            move()  # the first message of two ranks is no graph's
            device.synchronize()
            if comm.error is not None:
                comm.barrier()
            graph = stack.enter_context(captured(device, stream, move))

            def replay() -> None:
                memory.__enter__()
                graph.replay(stream)
                device.synchronize()
                if comm.error is not None:  # then streams go on without the data, and the next call says why
                    comm.barrier()
                memory.fetch()

        for turn, seed in enumerate(seeds):
            for n, src, _ in mine:
                arrays[n][:] = values(seed, n, count=len(arrays[n])) if comm.rank == src else -1
            replay()
            for n, *_ in mine:
                right = (arrays[n] == values(seed, n, count=len(arrays[n]))).all()
                assert right, f"replay {turn + 1}: message {n} of {edges} is wrong on rank {comm.rank}"
            if beside == "between":
                comm.allreduce(whole.array, stream=stream)
                check(comm, whole, comm.size ** (turn + 2))
            elif beside == "barrier":
                comm.barrier()


def check(comm: hetcoll.Communicator, array: Own, want: int) -> None:
    found = array.get()
    if comm.error is not None:
        comm.barrier()
    assert (found == want).all(), "a call beside a graph is wrong"
