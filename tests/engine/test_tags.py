"""Messages with tags match by them, also from any rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll
from hetcoll.errors import InitError
from hetcoll.links import descriptors
from hetcoll.runtime import tags

CLOSED = "rank 0 has left|left while it was needed|closed its connection|was lost"


def _out_of_order(comm: hetcoll.Communicator) -> None:
    """Receives in another order than the sends, tag 0 among them, of sizes that no buffer holds."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (3, 0, 1_000_003):
        works = [comm.send(np.full(count, tag + comm.rank / 4), right, tag=tag, async_op=True) for tag in (1, 0, 2, 7)]
        got = {tag: np.zeros(count) for tag in (7, 2, 0, 1)}
        works += [comm.recv(x, left, tag=tag, async_op=True) for tag, x in got.items()]
        for work in works[::-1]:
            work.wait()
            assert work.done
            assert work.error is None
        for tag, x in got.items():
            assert (x == tag + left / 4).all(), (tag, x)
        assert [work.source for work in works[4:]] == [left, left, -1, left]
    if comm.rank == 0:
        for i in range(20):
            comm.send(np.array(i), 1, tag=4 + i % 2)
    if comm.rank == 1:
        found = [int(_received(comm, 0, tag)[0]) for tag in (5, 4) for _ in range(10)]
        assert found == [*range(1, 20, 2), *range(0, 20, 2)]
    comm.barrier()


def _received(comm: hetcoll.Communicator, source: int, tag: int) -> tuple[np.ndarray, int]:
    x = np.zeros((), int)
    return x, comm.recv(x, source, tag=tag).source


def _from_any(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        for tag in (2, 1):
            got = [_received(comm, hetcoll.ANY_SOURCE, tag) for _ in range(comm.size - 1)]
            assert sorted(source for _, source in got) == list(range(1, comm.size))
            assert all(x == 10 * source + tag for x, source in got)
        late = comm.recv(x := np.zeros((), int), hetcoll.ANY_SOURCE, tag=9, async_op=True)
        assert not late.done
        comm.barrier()  # a receive that waits holds nothing up
        late.wait()
        assert (int(x), late.source) == (9, 2)
    else:
        for tag in (1, 2):
            comm.send(np.array(10 * comm.rank + tag), 0, tag=tag)
        comm.barrier()
        if comm.rank == 2:
            comm.send(np.array(9), 0, tag=9)
    comm.barrier()


def _by_turns(comm: hetcoll.Communicator) -> None:
    """Ranks whose messages wait have their turns in receives from any."""
    if comm.rank > 0:
        for tag in (3, 3, 3, 3, 4):
            comm.send(np.array(comm.rank), 0, tag=tag)
    else:
        for rank in (1, 2):
            _received(comm, rank, 4)  # what was sent before this one is here, too
        sources = [_received(comm, hetcoll.ANY_SOURCE, 3)[1] for _ in range(8)]
        assert sources in ([1, 2] * 4, [2, 1] * 4)
    comm.barrier()


def _refuse(comm: hetcoll.Communicator) -> None:
    x, other = np.zeros(2), (comm.rank + 1) % comm.size
    for wrong, error, words in (
        (lambda: comm.send(x, other, tag=-1), hetcoll.ArgumentError, "tag: wanted 0 or more, got -1"),
        (lambda: comm.send(x, other, tag="a"), hetcoll.BufferTypeError, "tag: wanted a whole number"),  # type: ignore[arg-type]
        (lambda: comm.send(x, hetcoll.ANY_SOURCE, tag=1), hetcoll.ArgumentError, "peer: wanted a rank"),
        (lambda: comm.send(x, hetcoll.ANY_SOURCE), hetcoll.ArgumentError, "peer: wanted a rank"),
        (lambda: comm.recv(x, hetcoll.ANY_SOURCE), hetcoll.ArgumentError, "peer: ANY_SOURCE wants a tag above 0"),
        (lambda: comm.recv(x, comm.rank, tag=1), hetcoll.ArgumentError, "peer: rank . is this rank"),
        (lambda: comm.recv(bytes(3), other, tag=1), hetcoll.BufferTypeError, "wanted a writable"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    with pytest.raises(hetcoll.ArgumentError, match="wanted messages without tags"), comm.group():
        comm.send(x, other, tag=1)
    comm.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tags(pool: Callable[..., Ranks], transport: str) -> None:
    for case in (_out_of_order, _from_any, _by_turns, _refuse):
        pool(3, HETCOLL_TRANSPORT=transport).run(case)


def _send_and_receive(comm: hetcoll.Communicator) -> None:
    comm.send(np.ones(8), 1, tag=3)
    comm.recv(np.zeros(1), 1)


def _other_sizes(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(hetcoll.CollectiveMismatchError, match="tag=3"):  # of either, as the other rank is fast
            _send_and_receive(comm)
        return
    site = f"{__file__}:{_other_sizes.__code__.co_firstlineno + 7}"
    with pytest.raises(hetcoll.CollectiveMismatchError) as caught:
        comm.recv(np.zeros(4), 0, tag=3)
    assert f"rank 1 called recv(float64, count=4, tag=3) from rank 0 at {site}" in str(caught.value)
    assert "; rank 0 called send(float64, count=8, tag=3) to rank 1" in str(caught.value)


def _nobody_sends(comm: hetcoll.Communicator) -> None:
    if comm.rank == 1:
        work = comm.recv(np.zeros(4), 0, tag=3, async_op=True)
        with pytest.raises(hetcoll.CollectiveTimeoutError, match=r"tag=3\) from rank 0 at .* did not finish in 0\.5 s"):
            work.wait(0.5)
        assert isinstance(work.error, hetcoll.CollectiveTimeoutError)
    else:
        with pytest.raises(hetcoll.CollectiveTimeoutError):
            comm.recv(np.zeros(1), 1)


def _aborted(comm: hetcoll.Communicator) -> None:
    work = comm.recv(np.zeros(4), 1 - comm.rank, tag=3, async_op=True)
    if comm.rank == 0:
        assert not work.done
        comm.recv(np.zeros(1), 1)  # it waits by now
        comm.abort("enough")
    else:
        comm.send(np.zeros(1), 0)
    with pytest.raises(hetcoll.AbortedError, match="enough"):
        work.wait()


def _peer_leaves(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.arange(3), 1, tag=1)  # it may be received after this rank has left
        comm.close()
        return
    with pytest.raises(hetcoll.PeerLostError, match=CLOSED):
        comm.recv(np.zeros(4), 0, tag=3)


def _peer_never_comes(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        comm.close()  # without a message with a tag
        return
    with pytest.raises(hetcoll.PeerLostError, match="rank 0 left while it was needed"):
        comm.send(np.zeros(4), 0, tag=3)


def _all_others_leave(comm: hetcoll.Communicator) -> None:
    """What they sent before is received from any rank; then nothing comes any more."""
    if comm.rank == 0:
        comm.send(np.arange(3), 1, tag=1)
        comm.close()
        return
    comm.recv(got := np.zeros(3, int), hetcoll.ANY_SOURCE, tag=1)
    assert (got == np.arange(3)).all()
    with pytest.raises(hetcoll.PeerLostError, match="rank 0 left while it was needed") as caught:
        comm.recv(got, hetcoll.ANY_SOURCE, tag=1, timeout=20.0)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    "case", [_other_sizes, _nobody_sends, _aborted, _peer_leaves, _peer_never_comes, _all_others_leave]
)
def test_tags_that_fail(launch: Callable[..., Ranks], case: Callable[[hetcoll.Communicator], None]) -> None:
    launch(2).run(case)


def _to_anyone(comm: hetcoll.Communicator) -> None:
    if comm.rank == 0:
        comm.recv(np.zeros(3000, np.int64), hetcoll.ANY_SOURCE, tag=6)
    elif comm.rank == 1:
        comm.send(np.ones(3000, np.int64), 0, tag=6)
    comm.barrier()


def _cut_off(comm: hetcoll.Communicator) -> None:
    """The stream of rank 1 ends in a message that is received from any rank."""
    with pytest.raises(hetcoll.PeerLostError, match="and rank 1 left while it was needed") as caught:
        _to_anyone(comm)
    assert caught.value.rank == 1


@pytest.mark.parametrize("byte", [7, 5000])
def test_a_message_that_is_cut_off_names_its_sender(launch: Callable[..., Ranks], byte: int) -> None:
    launch(3, HETCOLL_TRANSPORT="tcp", HETCOLL_FAULT=f"truncate={byte},rank=1").run(_cut_off)


def _closed(comm: hetcoll.Communicator) -> None:
    work = comm.recv(np.zeros(4), 1 - comm.rank, tag=3, async_op=True)
    comm.close()
    with pytest.raises(hetcoll.HetcollError):
        work.wait()


def test_closing_ends_what_waits(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_closed)


def _half_made(comm: hetcoll.Communicator, offered: str) -> list[str]:
    """Rank 1 fetches the memory of the communicator for tags, which rank 0 does not offer until both have left."""

    def share(*args: object) -> None:
        (folder / "asked").touch()
        wait_until((folder / "left").exists)
        raise hetcoll.InitError("it came too late")

    folder = Path(offered)
    descriptors.share_fd = share  # type: ignore[assignment]
    work = comm.recv(np.zeros(4), 1 - comm.rank, tag=3, async_op=True)
    wait_until((folder / "asked").exists)
    comm.abort("enough")
    with pytest.raises(hetcoll.AbortedError, match="enough"):
        work.wait()
    if comm.rank == 1:
        comm.close()
        (folder / "left").touch()
    wait_until((folder / "left").exists)
    comm.close()
    return _threads()


def test_a_failure_ends_the_making_of_what_tags_need(launch: Callable[..., Ranks], tmp_path: Path) -> None:
    assert launch(2).run(_half_made, str(tmp_path)) == [[], []]


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hetcoll-tags")]


def _read_late(comm: hetcoll.Communicator) -> list[str]:
    """What looks for messages of any rank begins to read one while the communicator is closed."""
    comm.recv(np.zeros(1), hetcoll.ANY_SOURCE, tag=1, async_op=True)
    box = comm._core._riders[tags.Mailbox]
    assert isinstance(box, tags.Mailbox)

    def read() -> None:
        time.sleep(0.3)
        box._line(1 - comm.rank).reader.put(lambda: None)

    box._finder.put(read)
    comm.close()
    return _threads()


def test_no_reader_begins_after_the_end(launch: Callable[..., Ranks]) -> None:
    assert launch(2).run(_read_late) == [[], []]


def _left_in_between(comm: hetcoll.Communicator) -> str:
    """Rank 1 waits for a message of any, rank 2 for rank 1, in a barrier that rank 0 never called."""
    comm.barrier()
    if comm.rank == 0:
        comm.close()
        return ""
    receive = partial(comm.recv, np.zeros(1), hetcoll.ANY_SOURCE, tag=1)
    call: Callable[[], object] = receive if comm.rank == 1 else comm.barrier
    with pytest.raises(hetcoll.PeerLostError, match="rank 0 left while it was needed") as caught:
        call()
    assert caught.value.rank == 0
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_waits_for_any_does_not_hide_that_a_rank_has_left(launch: Callable[..., Ranks], transport: str) -> None:
    """Which the one in a barrier finds out, though it does not wait for the rank that left."""
    ranks = launch(3, HETCOLL_TRANSPORT=transport, HETCOLL_TIMEOUT="60")
    for error in ranks.run(_left_in_between)[1:]:
        assert "barrier" in error


def _ask_who_left(comm: hetcoll.Communicator) -> None:
    """Rank 0 has left an answer to one question; no other question takes it for its own."""
    diagnosis = comm._core.diagnosis
    diagnosis.questions.answers["fruit"] = lambda asker: f"here, {asker}"
    comm.barrier()
    if comm.rank == 0:
        diagnosis.questions.leave_answers("fruit", ["", "apple", "pear"])
        comm.close()
        return
    mine = ["", "apple", "pear"][comm.rank]
    wait_until(lambda: diagnosis.questions.ask("fruit", 5.0)[0] == mine)
    assert diagnosis.questions.ask("fruit", 5.0) == {0: mine, 1: f"here, {comm.rank}", 2: f"here, {comm.rank}"}
    assert diagnosis.questions.ask("flight recorder", 5.0)[0] is None
    comm.send(np.zeros(1), 3 - comm.rank, async_op=True)  # neither leaves before the other has asked
    comm.recv(np.zeros(1), 3 - comm.rank)


def test_who_has_left_answers_what_it_wanted_told(launch: Callable[..., Ranks]) -> None:
    launch(3).run(_ask_who_left)


def _receive_beside_a_slow_store(comm: hetcoll.Communicator, leaves: bool) -> None:
    """The job's store does not answer rank 1 at first, as where a network stalls; in which time rank 0 may leave."""
    if comm.rank == 0:
        for each in (6, 7):  # the first one has both connect
            comm.send(np.array(each), 1, tag=5)
        return comm.close() if leaves else comm.barrier()
    assert int(_received(comm, 0, 5)[0]) == 6
    diagnosis, asked, since = comm._core.diagnosis, 0, 0
    ask = diagnosis.questions.ask

    def slow(question: str, seconds: float) -> dict[int, Any]:
        nonlocal asked, since
        asked += 1
        since += diagnosis.deserted()
        if asked <= 3 or (leaves and since <= 3):
            raise InitError("the store did not answer")
        return ask(question, seconds)

    diagnosis.questions.ask = slow  # type: ignore[method-assign]
    assert int(_received(comm, hetcoll.ANY_SOURCE, 5)[0]) == 7
    assert asked > 3
    return None if leaves else comm.barrier()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_store_that_does_not_answer_for_a_while_ends_no_receive_from_any_rank(
    launch: Callable[..., Ranks], leaves: bool
) -> None:
    launch(2).run(_receive_beside_a_slow_store, leaves, timeout=60)
