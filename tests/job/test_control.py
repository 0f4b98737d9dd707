"""The control plane: the store, its clients, and what they say when ranks are missing, lost or strangers."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from members import Events, first_line, in_parallel, join_all, member
from ranks import wait_until

from hetcoll.config.env import Config
from hetcoll.errors import ClosedError, InitError, PeerLostError
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.news import Event, Left, Lost, StoreLost, Verdict
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.store import server as store


def test_exchange_gives_every_blob_in_the_order_of_ranks(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 3)
    for tag in (b"a", b"b", b"a"):  # a tag may be used again
        results = in_parallel(
            [lambda c=c, r=r, tag=tag: c.exchange(WORLD, tag, b"%d" % r * 100000) for r, c in enumerate(clients)]
        )
        assert results == [[b"%d" % r * 100000 for r in range(3)]] * 3
    for client in clients:
        client.close()


def test_missing_ranks_are_named(unique_id: UniqueId) -> None:
    one, two = ControlClient(unique_id, 1, 8, 5), ControlClient(unique_id, 4, 8, 5)
    with pytest.raises(InitError, match=r"ranks 0, 2-7 never came to 'topology'; ranks 0, 2-3, 5-7 of 8 never joined"):
        one.exchange(WORLD, b"topology", b"", 0.2)
    with pytest.raises(InitError, match="ranks 0, 2-7 never came"):  # a late rank is told the same
        two.exchange(WORLD, b"topology", b"", 60)
    one.close()
    two.close()


def test_a_second_process_of_a_rank_and_another_size_are_refused(unique_id: UniqueId) -> None:
    first = ControlClient(unique_id, 1, 3, 5)
    with pytest.raises(InitError, match=r"two processes say that they are rank 1: .* came first"):
        ControlClient(unique_id, 1, 3, 5)
    with pytest.raises(InitError, match=r"two processes say that they are rank 1: "):  # nobody knows who is right
        first.exchange(WORLD, b"t", b"")
    first.close()
    first = ControlClient(unique_id, 1, 3, 5)  # when all have left it begins anew
    with pytest.raises(InitError, match=r"rank 2 .* says that the job has 4 ranks; rank 1 said 3"):
        ControlClient(unique_id, 2, 4, 5)
    first.close()


def test_the_first_verdict_wins_and_late_members_get_it(unique_id: UniqueId) -> None:
    clients, events = join_all(unique_id, 2)
    clients[0].join(b"sub", 0, 2, events[0])
    assert clients[0].post_verdict(b"sub", b"abort", b"why") == Verdict(b"abort", b"why", 0)
    clients[1].join(b"sub", 1, 2, events[1])
    assert events[1].wait_for(lambda e: isinstance(e, Verdict)) == Verdict(b"abort", b"why", 0)
    assert clients[1].post_verdict(b"sub", b"mismatch", b"else") == Verdict(b"abort", b"why", 0)
    for client in clients:
        client.close()


def test_query_collects_answers(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 3)
    assert clients[2].query(WORLD, b"where?", 5)[0] == {r: b"answer of %d" % r for r in range(3)}
    for client in clients:
        client.close()


def test_put_and_get(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].get, b"key", 5)
        clients[1].put(b"key", b"value")
        assert waiting.result(5) == b"value"
    with pytest.raises(InitError, match=r"nobody put 'other' within 0.1 s"):
        clients[0].get(b"other", 0.1)
    for client in clients:
        client.close()


def test_a_goodbye_is_seen_and_ends_exchanges(unique_id: UniqueId) -> None:
    clients, events = join_all(unique_id, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].exchange, WORLD, b"t", b"", 30)
        clients[1].close()
        events[0].wait_for(lambda e: e == Left(1))
        with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
            waiting.result(5)
    assert caught.value.rank == 1
    for client in clients:
        client.close()


@pytest.mark.parametrize("last", [False, True])
def test_who_has_left_answers_with_its_last_words(unique_id: UniqueId, last: bool) -> None:
    clients, events = join_all(unique_id, 3)
    if last:
        clients[1].close(WORLD, b"gone")
    else:
        clients[1].leave(WORLD, b"gone")
    clients[2].leave(WORLD)
    events[0].wait_for(lambda e: e == Left(1))
    assert clients[0].query(WORLD, b"?", 5.0) == ({0: b"answer of 0", 1: None, 2: None}, {1: b"gone"})
    for client in clients:
        client.close()


def test_who_left_a_group_waits_for_no_rank_of_it(unique_id: UniqueId) -> None:
    client = ControlClient(unique_id, 0, 1, 5.0)
    client.join(b"part", 0, 2)
    client.check_present(b"part", [1])
    with client.while_wanted(b"part") as give_up:
        give_up("enough")
        with pytest.raises(InitError, match="enough"):
            client.check_present(b"part", [1])
    give_up("too late")
    client.check_present(b"part", [1])
    client.leave(b"part")
    with pytest.raises(ClosedError, match="has left the group"):
        client.check_present(b"part", [1])
    client.close()


def test_a_store_to_which_nobody_else_will_come_ends_with_the_last() -> None:
    made = get_unique_id(Config(linger=0))
    server = store._hosted[made.job_id]
    clients = in_parallel([lambda rank=rank: ControlClient(made, rank, 2, 5.0) for rank in range(2)])  # type: ignore[misc]
    server.retire()
    clients[0].close()
    clients[1].put(b"key", b"value")
    assert server.holds().threads
    clients[1].close()
    wait_until(lambda: not server.holds().threads)
    assert made.job_id not in store._hosted


def test_ranks_that_all_left_may_come_back(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 2)
    clients[0].close()
    with pytest.raises(InitError, match=r"rank 0 left and is back, but rank 1 did not leave within 0\.\d+ s"):
        ControlClient(unique_id, 0, 2, 0.2)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(ControlClient, unique_id, 0, 2, 10)
        clients[1].close()
        again = [back.result(10), ControlClient(unique_id, 1, 2, 10)]
    assert in_parallel([lambda c=c: c.exchange(WORLD, b"t", b"x") for c in again]) == [[b"x", b"x"]] * 2
    for client in again:
        client.close()


@pytest.mark.calm
def test_256_ranks_join_and_exchange_in_little_time(unique_id: UniqueId) -> None:
    size, blob = 256, bytes(1000)
    started = time.process_time()
    clients, _ = join_all(unique_id, size)
    results = in_parallel([lambda c=c: c.exchange(WORLD, b"topology", blob, 60) for c in clients])
    took = time.process_time() - started  # of all clients and the store, and whatever else the machine does
    assert all(result == [blob] * size for result in results)
    in_parallel([client.close for client in clients])
    assert took < 5, took  # about one second


def test_a_killed_rank_is_noticed_at_once(unique_id: UniqueId) -> None:
    events = Events(0)
    client = ControlClient(unique_id, 0, 2, 20, events)
    with member(1, 2, unique_id) as process, ThreadPoolExecutor(1) as pool:
        first_line(process)
        waiting = pool.submit(client.exchange, WORLD, b"t", b"", 60)
        process.kill()
        killed = time.monotonic()
        lost = events.wait_for(lambda e: isinstance(e, Lost))
        with pytest.raises(PeerLostError, match="rank 1 was lost: its process died") as caught:
            waiting.result(5)
        assert time.monotonic() - killed < 5  # at once; what is left is for a busy machine
    assert isinstance(lost, Lost)
    assert (lost.rank, caught.value.rank) == (1, 1)
    client.close()


def test_a_job_whose_store_may_not_have_its_descriptors_is_told_how_many_it_needs(
    unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(store, "_ITSELF", hard)  # in place of 256
    for rank in (0, 3):  # every rank that comes is told
        with pytest.raises(InitError, match=rf"the job's 100 ranks do not fit .* and {hard} are allowed") as caught:
            ControlClient(unique_id, rank, 100, 20)
        needed = re.search(r"(\d+) file descriptors are needed", str(caught.value))
        assert needed is not None
        assert int(needed[1]) > hard
    joined = ControlClient(unique_id, 0, 1, 20)  # the store serves whom it can serve
    joined.close()


def test_a_stopped_rank_does_not_answer(unique_id: UniqueId) -> None:
    client = ControlClient(unique_id, 0, 2, 20, Events(0))
    with member(1, 2, unique_id) as process:
        first_line(process)
        assert client.query(WORLD, b"?", 10)[0] == {0: b"answer of 0", 1: b"here"}
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # the signal is only sent so far
        started = time.monotonic()
        assert client.query(WORLD, b"?", 3)[0] == {0: b"answer of 0", 1: None}  # long enough for a busy machine
        assert time.monotonic() - started < 30
    client.close()


@pytest.mark.calm
def test_a_stopped_store_costs_little_more_than_the_timeout() -> None:
    with member(0, 2, None) as process:
        client = ControlClient(UniqueId.parse(first_line(process)), 1, 2, 20)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        calls: list[Callable[[], Any]] = [
            lambda: client.exchange(WORLD, b"t", b"", 1.0),
            lambda: client.post_verdict(WORLD, b"k", b"", 1.0),
            lambda: client.get(b"k", 1.0),
            lambda: client.join(b"other", 0, 1, timeout=1.0),
            lambda: client.leave(WORLD, timeout=1.0),
        ]

        def wait(call: Callable[[], Any]) -> float:
            started = time.monotonic()
            with pytest.raises(InitError, match="did not answer in 1 s"):
                call()
            return time.monotonic() - started

        took = in_parallel([lambda c=c: wait(c) for c in calls])
        assert all(1.0 < seconds < 3.0 for seconds in took), took
        process.send_signal(signal.SIGCONT)
        client.close()


def test_the_death_of_the_stores_host_is_the_loss_of_its_rank() -> None:
    events = Events(1)
    with member(0, 2, None) as process:
        client = ControlClient(UniqueId.parse(first_line(process)), 1, 2, 20, events)
        process.kill()
        lost = events.wait_for(lambda e: isinstance(e, Lost))
        gone = events.wait_for(lambda e: isinstance(e, StoreLost))
    assert isinstance(lost, Lost)
    assert lost.rank == 0
    # The kernel says the latter where the process had not read all that it was sent, such as where a successor listens.
    assert gone in [StoreLost(why, False) for why in ("the connection ended", "connection reset by peer")]
    with pytest.raises(PeerLostError, match="rank 0, which hosts the job's store, was lost") as caught:
        client.exchange(WORLD, b"t", b"")
    assert caught.value.rank == 0
    client.close()


def test_the_ordered_end_of_the_stores_host_is_told_as_such() -> None:
    events = Events(1)
    with member(0, 2, None) as process:
        client = ControlClient(UniqueId.parse(first_line(process)), 1, 2, 20, events)
        assert process.stdin is not None
        process.stdin.close()
        events.wait_for(lambda e: isinstance(e, StoreLost))
        assert process.wait(10) == 0
    assert events.seen == [Left(0), StoreLost("its process ended in order", True)]
    with pytest.raises(PeerLostError, match="rank 0, which hosts the job's store, has ended"):
        client.put(b"k", b"v")
    client.close()


@pytest.mark.calm
def test_the_interpreter_ends_cleanly_and_quickly_with_open_clients(unique_id: UniqueId) -> None:
    events = Events(0)
    client = ControlClient(unique_id, 0, 2, 20, events)
    with member(1, 2, unique_id) as process:
        first_line(process)
        started = time.monotonic()
        _, errors = process.communicate("", 10)
        assert (process.returncode, errors) == (0, "")
        assert time.monotonic() - started < 3
    assert events.wait_for(lambda e: True) == Left(1)
    client.close()


FORK = """
pid = os.fork()
if pid == 0:
    try:
        client.put(b"k", b"v")
    except ClosedError as error:
        os.write(1, f"{error}\\n".encode())
    sockets = [fd for fd in os.listdir("/proc/self/fd") if "socket" in target(fd)]
    os.write(1, f"{sockets}\\n".encode())
    time.sleep(60)
client.put(b"pid", str(pid).encode())
time.sleep(60)
"""


def test_a_forked_child_keeps_nothing_of_the_parent(unique_id: UniqueId) -> None:
    """Not only on paper: the child lives on, and the parent's death is seen all the same."""
    setup = """
import os, time
from hetcoll.errors import ClosedError
from hetcoll.links.listener import Listener
listener = Listener(Config(), unique_id.secret)
get_unique_id(Config(linger=0))
def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
"""
    events = Events(0)
    client = ControlClient(unique_id, 0, 2, 20, events)
    with member(1, 2, unique_id, setup + FORK) as process:
        first_line(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        child = int(client.get(b"pid", 20))
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert lines == ["this control connection belongs to the parent of this forked process\n", "[]\n"]
            process.kill()
            assert isinstance(events.wait_for(lambda e: isinstance(e, Lost), 1.0), Lost)
        finally:
            os.kill(child, signal.SIGKILL)
    client.close()


def test_a_store_that_is_not_there() -> None:
    nowhere = UniqueId((("127.0.0.1", 9),), bytes(16), bytes(32))
    with pytest.raises(InitError, match=r"not found within \d\.\d s: 127\.0\.0\.1:9: connection refused"):
        ControlClient(nowhere, 0, 1, 0.2)


def test_a_handler_that_calls_its_client_is_told_so(unique_id: UniqueId, caplog: pytest.LogCaptureFixture) -> None:
    def handler(group: bytes, event: Event) -> bytes | None:
        client.put(b"k", b"v")
        return None

    client = ControlClient(unique_id, 0, 1, 10, handler)
    assert client.query(WORLD, b"?", 0.2)[0] == {0: None}
    assert "an event handler called its ControlClient" in caplog.text
    client.close()


def test_close_is_idempotent_ends_waiting_calls_and_leaves_nothing(unique_id: UniqueId) -> None:
    ControlClient(unique_id, 0, 1, 10).close()
    fds, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    server = get_unique_id(Config(linger=0))
    clients, _ = join_all(server, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].get, b"never", 60)
        while not clients[0]._calls:
            time.sleep(0.001)
        clients[0].close()
        with pytest.raises(ClosedError):
            waiting.result(5)
    for client in clients * 2:
        client.close()
    with pytest.raises(ClosedError, match="was closed"):
        clients[0].put(b"k", b"v")
    store._hosted[server.job_id].close()
    assert threading.active_count() == threads
    assert set(os.listdir("/proc/self/fd")) == fds
