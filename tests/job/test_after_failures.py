"""What a communicator is good for after a failure, and whom the failure does not concern."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from calls import f32
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)
FOUND_WITHIN = 8.0  # seconds; what needs two looks at the others takes about four


def say(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def use_after_failure(comm: hetcoll.Communicator) -> tuple[set[str], str, bool, str]:
    """What every further call says, the call that failed, and a Work that was done before."""
    before = comm.allreduce(f32(4), async_op=True)
    before.wait()
    caught = say(lambda: comm.allreduce(f32(4 + comm.rank)))
    x = f32(4)
    calls: list[Callable[[], Any]] = [
        lambda: comm.allreduce(x),
        lambda: comm.allreduce(x, async_op=True),
        comm.barrier,
        lambda: comm.send(x, 1 - comm.rank),
        lambda: comm.recv(x, 1 - comm.rank),
        lambda: comm.split(0),
    ]
    before.wait()
    return {say(call) for call in calls}, caught, before.done and before.error is None, repr(comm)


@TRANSPORTS
def test_a_failed_communicator_is_fit_only_for_close(launch: Launch, transport: str) -> None:
    for said, caught, fine, name in launch(2, HETCOLL_TRANSPORT=transport).run(use_after_failure):
        assert said == {caught}
        assert caught.startswith("CollectiveMismatchError: operation #2: ")
        assert fine
        assert name.startswith("<hetcoll.Communicator rank ")


def fail_with_works_in_flight(comm: hetcoll.Communicator) -> list[str]:
    """Several asynchronous calls of which the second is wrong: what each says, waited for out of order.

    The rank that comes later may hear of it while it still launches: the launch says it then."""
    comm.barrier()
    comm.allreduce(f32(1000), async_op=True)
    works, said = [], []
    for count in (1000 + comm.rank, 1000, 50_000):
        try:
            works.append(comm.allreduce(f32(count), async_op=True))
        except hetcoll.CollectiveMismatchError as error:
            said.append(f"{type(error).__name__}: {error}")
    said += [say(work.wait) for work in reversed(works)]
    assert len(said) == 3
    assert all(work.done for work in works)
    assert {f"{type(work.error).__name__}: {work.error}" for work in works} <= set(said)
    return said


@TRANSPORTS
def test_works_in_flight_all_say_what_failed(launch: Launch, transport: str) -> None:
    said = launch(2, HETCOLL_TRANSPORT=transport).run(fail_with_works_in_flight)
    (text,) = set(said[0] + said[1])
    assert text.startswith(
        "CollectiveMismatchError: operation #3: rank 0 called allreduce(float32, count=1000, op=sum)"
    )


def fail_in_the_background(comm: hetcoll.Communicator, begun: Path) -> None:
    """Rank 0 has something in flight that goes wrong, and does not look at it; rank 1 waits for rank 0."""
    comm.barrier()
    if comm.rank == 0:
        for _ in range(3):
            comm.allreduce(f32(1000), async_op=True)
        begun.touch()
        wait_until(lambda: comm._engine.failed, 10)
        time.sleep(60)
    wait_until(begun.exists, 10)
    for _ in range(4):
        comm.allreduce(f32(1000))


@TRANSPORTS
def test_what_fails_unseen_is_told_to_who_asks(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT=transport, HETCOLL_FAULT="duplicate=2,rank=1")
    ranks.start(fail_in_the_background, tmp_path / "begun")
    (one,) = ranks.finish(15, only=[1])
    assert isinstance(one.error, hetcoll.CommunicationError), one.trace
    assert str(one.error).startswith("rank 0: the frame belongs to another operation")
    assert one.seconds < FOUND_WITHIN
    ranks.kill(0)


def fail_in_a_split(comm: hetcoll.Communicator) -> tuple[str, float]:
    """A mistake in one communicator leaves its parent and its siblings alone."""
    child, sibling = comm.split(0), comm.split(comm.rank % 2)
    assert child is not None
    assert sibling is not None
    said = say(lambda: child.allreduce(f32(4 + comm.rank)))
    x, y = np.full(4, comm.rank + 1.0), np.ones(3)
    comm.allreduce(x)
    sibling.allreduce(y)
    child.close()
    comm.allreduce(x)
    return said[: said.find(":")], float(x[0] + y[0])


@TRANSPORTS
def test_a_failure_stays_in_its_communicator(launch: Launch, transport: str) -> None:
    said = launch(3, HETCOLL_TRANSPORT=transport).run(fail_in_a_split)
    assert said == [("CollectiveMismatchError", 6.0 * 3 + n) for n in (2, 1, 2)]


def lose_a_rank_of_the_parent(comm: hetcoll.Communicator, ready: Path) -> tuple[str, float]:
    survivors = comm.split(0 if comm.rank < 2 else 1)
    assert survivors is not None
    comm.barrier()
    (ready / str(comm.rank)).touch()
    if comm.rank == 2:
        time.sleep(60)
    said = say(comm.barrier)
    x = np.full(100_000, comm.rank + 1.0)
    for _ in range(10):
        survivors.allreduce(x)
    return said[: said.find(":")], float(x[0])


@TRANSPORTS
def test_who_has_nothing_to_do_with_a_lost_rank_goes_on(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_a_rank_of_the_parent, tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 30)
    ranks.kill(2)
    for outcome in ranks.finish(10, only=[0, 1]):
        assert outcome.value == ("PeerLostError", 3.0 * 2**9), outcome.trace
