"""HETCOLL_CHECK=sampled on GPUs: of sums some are checked, by the GPUs, or by hosts where some ranks have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_kinds import Own, device_of, has_gpu, start
from gpu_places import PLACES
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.errors import BufferTypeError, CommunicationError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import Collective, DType

COUNT = 20_010  # float32s: some blocks fold them
LABEL = "HETCOLL_CHECK "


class Sampled:
    """What a communicator begins, and a call of which the next one is due."""

    def __init__(self, comm: hetcoll.Communicator) -> None:
        self.comm, self.labels, self.spoils = comm, list[str](), False
        self._start = comm._core.start
        comm._core.__dict__["start"] = self._begin

    def _begin(self, call: Any, async_op: bool, seconds: float, stream: object) -> Any:
        work = self._start(call, async_op, seconds, stream)
        self.labels += [call.label] if call.label.startswith(LABEL) else []
        if self.spoils and self.comm.rank == 0 and not call.label:
            self._spoil(call.recv or call.send, stream)
        return work

    def _spoil(self, result: Any, stream: Any) -> None:
        """Its last number, once it is there."""
        device = self.comm._core.gpus.device_of(result)
        nine = Own(self.comm, np.full(1, 9e9, np.float32))
        device.copy(result.ptr + result.nbytes - 4, nine.array.ptr, 4, stream or 0)
        device.synchronize(stream or 0)

    def due(self) -> None:
        """As so many calls that the next one pays for a check."""
        assert not self.comm._core.engine.take_due(Collective.ALLREDUCE, 10**12, DType.UINT8, has_gpu(self.comm))


def refuse(comm: hetcoll.Communicator) -> list[str]:
    """Rank 0 is refused calls that the others never hear of, one before a call that is due and one that is due."""
    from hetcoll.vendors.devices import cuda

    each, x = Sampled(comm), Own(comm, np.ones(2, np.float32))
    apart = DeviceArray(cuda.devices()[1 - device_of(comm).index], 2)
    comm.allreduce(x.array).wait()

    def refused() -> None:
        if comm.rank == 0:
            with pytest.raises(BufferTypeError, match="wanted memory of cuda"):
                comm.allreduce(apart)

    call, check = 3_000_000 + 2 * 8, 100 * (2_000_000_000 + 20 * 8)  # picoseconds: `Sampling`
    each.due()
    comm.allreduce(x.array).wait()  # the count begins anew
    before = len(each.labels)
    nbytes = (check - call // 2 - 3_000_000) // 2
    assert not comm._core.engine.take_due(Collective.ALLREDUCE, nbytes, DType.UINT8, True)
    refused()
    comm.allreduce(x.array).wait()  # which makes the next one due
    assert len(each.labels) == before
    refused()
    comm.allreduce(x.array).wait()
    assert len(each.labels) == before + 1
    comm.allreduce(x.array).wait()
    comm.barrier()
    return each.labels


@pytest.mark.fakes
def test_calls_that_are_refused_do_not_count() -> None:
    with start("nn") as ranks:
        one, other = ranks.run(refuse, timeout=60)
        assert one == other


def sums(comm: hetcoll.Communicator, x: Own, y: Own, async_op: bool) -> list[Callable[[], Any]]:
    size, part = comm.size, Own(comm, np.zeros(COUNT // comm.size, np.float32))
    return [
        lambda: comm.allreduce(x.array, y.array, async_op=async_op),
        lambda: comm.reduce_scatter(x.array, part.array, op="max", async_op=async_op),
        lambda: comm.reduce(x.array, y.array if comm.rank == size - 1 else None, root=size - 1, async_op=async_op),
        lambda: comm.allreduce(x.array, op="avg", async_op=async_op),
    ]


def end(comm: hetcoll.Communicator, work: hetcoll.Work, turn: int) -> None:
    """The host waits, or, where hosts look at results, the stream on which the next call is."""
    work.wait_stream() if turn > 1 and comm.topology.some_without_gpu else work.wait(20)


def pass_right_ones(whole: hetcoll.Communicator) -> int:
    """How many calls were checked."""
    comm = whole.split(0)
    assert comm is not None
    sampled, taken = Sampled(comm), list[list[tuple[int, int]]]()
    for turn in range(4):
        x, y = (Own(comm, np.full(COUNT, value, np.float32)) for value in (np.inf if turn == 3 else 1.0, 0.0))
        for call in sums(comm, x, y, async_op=turn % 2 == comm.rank % 2):
            end(comm, call(), turn)
            sampled.due()
            for _ in range(2):
                end(comm, call(), turn)
        assert (y.get() == comm.size * x.get()).all() or comm.rank != comm.size - 1
        executor: Any = comm._core.gpus.executor
        arenas = () if executor is None else executor.replays._folds._arenas
        taken.append([(len(arena._chunks), arena._at) for arena in arenas])
    assert taken[-1] == taken[0], "memory is used again"
    comm.close()
    return len(sampled.labels)


def begin(kinds: str, place: str) -> Ranks:
    return start(kinds, place=place, HETCOLL_TIMEOUT="20")


@parametrize("kinds", ["na", "nc", "nn"], first=2)
@pytest.mark.parametrize("place", PLACES)
def test_right_sums_that_are_due_are_passed_once_each(kinds: str, place: str) -> None:
    with begin(kinds, place) as ranks:
        assert set(ranks.run(pass_right_ones, timeout=100)) == {16}


def spoil(comm: hetcoll.Communicator, async_op: bool) -> str:
    x, y = (Own(comm, np.ones(COUNT, np.float32)) for _ in range(2))
    sampled, call = Sampled(comm), sums(comm, x, y, async_op)[0]
    call().wait(20)
    comm.barrier()
    sampled.spoils = True
    call().wait(20)  # is not due
    comm.barrier()
    sampled.due()
    try:
        call().wait(20)
        wait_until(lambda: comm.error is not None, 20)  # without a call
        comm.barrier()
    except CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kinds", "async_op"), [("na", True), ("an", False), ("nc", False), ("nc", True)])
def test_a_sum_that_is_spoiled_on_a_gpu_is_found_on_every_rank(kinds: str, async_op: bool) -> None:
    with start(kinds, HETCOLL_TIMEOUT="20") as ranks:
        for text in ranks.run(spoil, async_op, timeout=60):
            what, _, problem = text.partition(" op=sum) ")
            assert f"HETCOLL_CHECK: the result of allreduce(float32, count={COUNT}," in what, text
            # The first one to look says so: rank 0, or another one, whose hash is not rank 0's.
            assert problem.startswith(("on rank 0 is wrong: sum of", "is not the same everywhere: rank ")), text
