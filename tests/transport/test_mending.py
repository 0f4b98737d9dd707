"""TCP sockets that are reset between ranks that live: made again, and nothing is lost or comes twice."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netns
import numpy as np
import pytest
import resetting
from cases import run_cases
from patience import DEADLINE, PATIENCE
from ranks import Ranks, elapsed, wait_until
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.config.env import Config
from hetcoll.errors import InitError, PeerLostError
from hetcoll.links import mending
from hetcoll.links.edges import LEFT, Address, Came, EdgeKey, Request
from hetcoll.links.listener import Listener
from hetcoll.links.mending import Mending
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.rendezvous.connections.sockets import close_hard, receive_exactly
from hetcoll.types import Collective

Pool = Callable[..., Ranks]
SECRET, COMM = b"s" * 32, b"c" * 16

reset = pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_ADMIN to reset a connection")


def cases_of(size: int) -> list[Case]:
    """Every collective, short and long, in and out of place."""
    kinds = [kind for kind in ALGORITHMS if kind is not Collective.BARRIER]
    return [
        Case(
            kind.label, "float32", count, root=count % size, inplace=turn % 2 == 1 and kind is not Collective.BROADCAST
        )
        for turn, kind in enumerate(kinds)
        for count in (1, 301, 30_011)
    ] + [Case("alltoallv", "uint16", 500)]


@reset
@parametrize(
    ("fault", "settings"),
    [
        ("reset=30000,seed=5", {"socket_stripes": 3}),
        ("reset=60000", {}),
        ("reset=50000,short=0.2,seed=6", {"integrity": "all"}),
    ],
    first=1,
)
def test_every_collective_over_sockets_that_are_reset(pool: Pool, fault: str, settings: dict[str, Any]) -> None:
    pool(3).run(run_cases, cases_of(3), {"fault": fault, "transport": "tcp", **settings}, True)


def meet_over_a_connection_that_breaks(comm: hetcoll.Communicator) -> int:
    """Before rank 1 hears that rank 0 has confirmed it. Gives how many were made again."""
    if comm.rank == 1:
        listener = comm._wiring._listener
        assert listener is not None
        confirm = listener._confirm

        def break_first(promise: Any, answer: bytearray) -> None:
            listener._confirm = confirm  # type: ignore[method-assign]
            promise.sock.recv(1)
            resetting.reset(promise.sock)
            confirm(promise, answer)

        listener._confirm = break_first  # type: ignore[method-assign]
    for count in (1, 100_000):
        x = np.full(count, comm.rank + 1, np.int32)
        comm.allreduce(x)
        assert (x == 3).all()
    return comm.counters()["tcp_reconnects"]


@parametrize("tls", ["0", "1"], first=1)
def test_a_connection_that_only_one_end_has_is_made_again(launch: Pool, tls: str) -> None:
    """The end that confirmed it has a link, which it mends. The other one has none yet, and waits for its first."""
    zero, _ = launch(2, HETCOLL_TRANSPORT="tcp", HETCOLL_TLS=tls).run(meet_over_a_connection_that_breaks, timeout=20.0)
    assert zero >= 1


def everything_else(comm: hetcoll.Communicator, rounds: int) -> dict[str, int]:
    """Calls in flight, messages both ways, puts and gets, and parts of the communicator."""
    n, me = comm.size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    with comm.split(me % 2, me) as part, comm.window(np.zeros(50_000, np.float32)) as window:
        for i in range(rounds):
            sums = [np.full(count, me + i, np.float32) for count in (3, 70_000, 1)]
            works = [comm.allreduce(x, async_op=True) for x in sums]
            out, into = np.arange(20_000, dtype=np.int32) + me, np.zeros(20_000, np.int32)
            with comm.group():
                comm.send(out, right)
                comm.recv(into, left)
            assert (into == out - me + left).all()
            for work in works:
                work.wait()
            assert all((x == sum(range(n)) + n * i).all() for x in sums)
            x = np.full(1000, me, np.float32)
            part.allreduce(x)
            assert (x == sum(range(me % 2, n, 2))).all()
            window.put(np.full(50_000, i + me, np.float32), right)
            comm.barrier()
            got = np.zeros(50_000, np.float32)
            window.get(got, right)
            assert (got == i + me).all()
            comm.barrier()
    return comm.counters()


@reset
def test_messages_puts_and_parts_over_sockets_that_are_reset(launch: Pool) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT="tcp", HETCOLL_FAULT="reset=200000")
    counters = ranks.run(everything_else, 4)
    assert sum(each["tcp_reconnects"] for each in counters) > 3
    told = [line for rank in range(3) for line in ranks.output(rank).splitlines() if "was made again" in line]
    assert len(told) > 0, ranks.output(0)


def sums(comm: hetcoll.Communicator, seconds: float, reached: Path | None = None) -> tuple[int, int]:
    """Exact sums for so long, over memory that is written over in between; how many, and how many reconnects. The file
    `reached` comes to be with the first of these."""
    calls, until = 0, time.monotonic() + seconds
    while True:
        x = np.full(30_000, comm.rank + calls, np.float32)
        comm.allreduce(x)
        assert (x == sum(range(comm.size)) + comm.size * calls).all(), calls
        calls += 1
        if reached is not None and comm.counters()["tcp_reconnects"] > 0:
            reached.touch()
        on = np.array([time.monotonic() < until])
        comm.broadcast(on, 0)
        if not on[0]:
            return calls, comm.counters()["tcp_reconnects"]


def kill_connections(where: list[str] | None = None, *words: str) -> None:
    """What an administrator does: every TCP connection that `words` (of ss(8)) choose."""
    subprocess.run([*(where or []), "ss", "-K", *words], check=False, capture_output=True, timeout=PATIENCE * 20)


@reset
def test_a_rank_that_is_killed_while_it_is_reset_is_lost_at_once(launch: Pool, tmp_path: Path) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT="tcp", HETCOLL_FAULT="reset=150000")
    ranks.start(sums, 60.0, tmp_path / "reached")
    wait_until((tmp_path / "reached").exists, 30)
    ranks.kill(1)
    start = time.monotonic()
    outcomes = ranks.finish(20.0, only=[0, 2])
    assert time.monotonic() - start < 5
    for outcome in outcomes:
        assert isinstance(outcome.error, PeerLostError), outcome
        assert outcome.error.rank == 1


def last_words(comm: hetcoll.Communicator, sent: Path) -> int:
    """Rank 0 leaves when it has sent; what it sent is under way then, over a connection that is reset."""
    data = np.arange(200_000, dtype=np.int32)  # more than the kernel of who does not receive takes
    if comm.rank == 0:
        comm.send(data, 1)
        sent.touch()
        comm.close()
        return 0
    wait_until(sent.exists, 20)
    time.sleep(0.2)  # it would have left by now
    for here, there in waiting():
        kill_connections(None, "sport", "=", f":{here}", "dport", "=", f":{there}")
    got = np.zeros_like(data)
    comm.recv(got, 0)
    assert (got == data).all()
    return comm.counters()["tcp_reconnects"]


def waiting() -> Iterator[tuple[int, int]]:
    """The ports of this process's connections with data that was not received."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of those that are something else, or not connected
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as sock:
                    (unread,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
                    if sock.family == socket.AF_INET and unread > 0:
                        yield sock.getsockname()[1], sock.getpeername()[1]


@reset
@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss(8)")
def test_who_leaves_waits_until_its_last_message_is_there(launch: Pool, tmp_path: Path) -> None:
    _, reconnects = launch(2, HETCOLL_TRANSPORT="tcp").run(last_words, tmp_path / "sent")
    assert reconnects > 0


class Sockets:
    """An owner of one socket, of whose bytes so many came."""

    def __init__(self, peer: int, came: int) -> None:
        self.peer, self.came = peer, Came(came, came - 7, 5)
        self.news_read, self.news_write = socket.socketpair()
        self.tries, self.lost = 0, False
        self.resumed: list[tuple[int, Came]] = []
        self.given_up = ""
        self.gone = False
        self.left: list[dict[int, int]] = [{}]
        self.news: list[tuple[int, int, int, int, bool, bool, str]] = []

    def mend_tcp(self) -> int:
        return self.news_read.fileno()

    def lose(self) -> None:
        self.lost = True
        self.news.append((self.peer, 0, 0, self.tries, False, False, "it was reset"))
        self.news_write.send(b"!")

    def take_lost(self) -> list[tuple[int, int, int, int, bool, bool, str]]:
        self.news_read.recv(64)
        found, self.news = self.news, []
        return found

    def is_lost(self, peer: int, channel: int, stripe: int) -> bool:
        return self.lost and (peer, channel, stripe) == (self.peer, 0, 0)

    def hold_socket(self, peer: int, channel: int, stripe: int, number: int, first: bool) -> Came | None:
        known = (peer, channel, stripe) == (self.peer, 0, 0)
        if known and self.gone:
            return LEFT
        if not known or number < self.tries or (number == self.tries and not (first and self.lost)):
            return None
        if not self.lost:
            self.news.append((peer, channel, stripe, number, True, False, "the peer makes it again"))
            self.news_write.send(b"!")
        self.tries, self.lost = number, True
        return self.came

    def resume_socket(self, peer: int, channel: int, stripe: int, number: int, fd: int, came: Came) -> bool:
        if number != self.tries or not self.lost:
            return False
        self.resumed.append((fd, came))
        self.lost = False
        return True

    def give_up_socket(self, peer: int, channel: int, stripe: int, why: str) -> None:
        self.given_up = why

    def undelivered(self) -> dict[int, int]:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


class End:
    """One rank of two: its listener, one socket, and what mends it."""

    def __init__(self, rank: int, secret: bytes = SECRET, comm: bytes = COMM) -> None:
        self.listener = Listener(Config(), secret, loopback=True)
        self.places: dict[int, Any] = {}
        self.gone = False
        self.mending = Mending(rank, comm, self.listener, self.places, 3.0, self.check)
        self.owners: list[Sockets] = []
        self.sockets = self.own(Sockets(1 - rank, 100 + rank))

    def own(self, sockets: Sockets, shift: int = 0) -> Sockets:
        self.mending.add(sockets, shift)
        self.owners.append(sockets)
        return sockets

    def check(self, peer: int) -> None:
        if self.gone:
            raise PeerLostError(f"rank {peer} was lost", peer)

    def close(self) -> None:
        self.listener.close()
        for owner in self.owners:
            for fd, _ in owner.resumed:
                os.close(fd)
            owner.news_read.close()
            owner.news_write.close()


@pytest.fixture
def ends() -> Iterator[list[End]]:
    made = [End(0), End(1)]
    for rank, end in enumerate(made):
        end.places[1 - rank] = made[1 - rank].listener.addresses
    yield made
    for end in made:
        end.close()


@pytest.mark.parametrize("losers", [[0], [1], [0, 1], [1, 0]])
def test_whoever_notices_both_have_the_same_new_socket(ends: list[End], losers: list[int]) -> None:
    for turn in range(1, 4):
        for rank in losers:
            ends[rank].sockets.lose()
        wait_until(lambda turn=turn: all(len(end.sockets.resumed) >= turn and not end.sockets.lost for end in ends), 10)
        # What came to the other one, and what was spoiled.
        assert [end.sockets.resumed[-1][1] for end in ends] == [(101, 94, 5), (100, 93, 5)]
        with socket.socket(fileno=os.dup(ends[0].sockets.resumed[-1][0])) as one:
            one.send(b"from here on")
        with socket.socket(fileno=os.dup(ends[1].sockets.resumed[-1][0])) as other:
            assert receive_exactly(other, 12, time.monotonic() + 5) == b"from here on"
    assert ends[0].sockets.tries == ends[1].sockets.tries


def test_tries_that_are_late_or_foreign_are_refused(ends: list[End]) -> None:
    listener = ends[1].listener

    def attempt(key: EdgeKey, secret: bytes = SECRET, *, hurried: bool = False) -> bool:
        other = Listener(Config(), secret, loopback=True)
        try:
            made = other.connect_many([Request(key, listener.addresses, hurried)], time.monotonic() + 2)
        finally:
            other.close()
        for sock in made.values():
            sock.close()
        return bool(made)

    assert attempt(EdgeKey(COMM, 0, 1, 0, 0, 5))
    assert ends[1].sockets.tries == 5
    assert not attempt(EdgeKey(COMM, 0, 1, 0, 0, 4))  # there was a later one
    assert not attempt(EdgeKey(b"e" * 16, 0, 1, 0, 0, 9))  # of another epoch
    assert not attempt(EdgeKey(COMM, 0, 1, 3, 0, 9))  # no such channel
    assert not attempt(EdgeKey(COMM, 0, 2, 0, 0, 9))  # no rank of this edge
    assert not attempt(EdgeKey(COMM, 0, 1, 0, 0, 9), hurried=True)  # this rank itself
    with pytest.raises(InitError, match="secret"):
        attempt(EdgeKey(COMM, 0, 1, 0, 0, 9), b"x" * 32)
    assert ends[1].sockets.tries == 5
    assert not ends[1].sockets.resumed


def test_a_connection_that_breaks_in_the_handshake_is_made_once_more(ends: list[End]) -> None:
    held = threading.Event()
    connect = ends[0].listener.connect_many

    def broken(requests: Any, deadline: float, check: Callable[[], None]) -> dict[EdgeKey, socket.socket]:
        made = connect(requests, deadline, check)
        if not held.is_set():
            held.set()
            for sock in made.values():
                close_hard(sock.dup())
                sock.shutdown(socket.SHUT_RDWR)
        return made

    ends[0].listener.connect_many = broken  # type: ignore[method-assign]
    ends[0].sockets.lose()
    wait_until(lambda: all(end.sockets.resumed and not end.sockets.lost for end in ends), 15)
    assert held.is_set()
    assert ends[0].sockets.tries >= 2


def test_an_address_that_answers_nothing_is_followed_by_the_next(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two networks is dead, and no host notices: a try has no time for both."""
    monkeypatch.setattr(mending, "_TELLING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ends[0].places[1] = (Address(*silent.getsockname(), "dead", bytes(16)), *ends[0].places[1])
        ends[0].sockets.lose()
        wait_until(lambda: ends[0].sockets.resumed or ends[0].sockets.given_up, 10)
    assert not ends[0].sockets.given_up


def test_a_peer_that_is_not_there_is_given_up_in_time(ends: list[End]) -> None:
    ends[1].listener.close()
    start = time.monotonic()
    ends[0].sockets.lose()
    wait_until(lambda: ends[0].sockets.given_up, 10)
    assert time.monotonic() - start < 8
    assert "channel 0, stripe 0: it was reset" in ends[0].sockets.given_up
    assert "connection refused" in ends[0].sockets.given_up


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_the_peer_has_left_is_given_up_at_once(ends: list[End], rank: int) -> None:
    """Of that peer's links alone that one: what else broke is made again."""
    other, _ = (ends[each].own(Sockets(1 - each, 100), 1) for each in (rank, 1 - rank))
    ends[1 - rank].sockets.gone = True
    for sockets in (ends[rank].sockets, other):
        sockets.lose()
    with elapsed() as took:
        wait_until(lambda: ends[rank].sockets.given_up and other.resumed, 10)
    assert took[0] < mending._REFUSED_SECONDS
    assert f"it was reset) and could not be made again: rank {1 - rank} has left it" in ends[rank].sockets.given_up
    assert not other.given_up


def test_the_control_planes_word_counts_at_once(ends: list[End]) -> None:
    ends[1].listener.close()
    ends[0].sockets.lose()
    ends[0].gone = True
    wait_until(lambda: ends[0].sockets.given_up, 2)
    assert "rank 1 was lost" in ends[0].sockets.given_up


def test_who_leaves_waits_for_bytes_that_arrive_and_for_no_others(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "_SETTLING_SECONDS", 0.3)
    sockets, settle = ends[0].sockets, ends[0].mending.settle
    sockets.left = [*({1: n} for n in range(60, 0, -1)), {}]  # half a second
    settle()
    assert sockets.left == [{}]
    sockets.left = [{1: 7}]
    with elapsed() as took:
        settle()  # nothing arrives
    assert took[0] >= 0.3
    monkeypatch.setattr(mending, "_SETTLING_SECONDS", 1000.0)  # longer than any test has
    ends[0].mending._seconds = 1000.0
    ends[0].gone = True
    settle()  # and nobody is there


RANK = """
import sys, time
import numpy as np
import hetcoll
comm, calls = hetcoll.init(), 0
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while True:
    for count in (1, 30_000, 300_000):
        x = np.full(count, comm.rank + calls, np.float32)
        comm.allreduce(x)
        assert (x == 1 + 2 * calls).all(), calls
        calls += 1
    on = np.array([time.monotonic() < until])
    comm.broadcast(on, 0)
    if not on[0]:
        break
print(calls, comm.counters()["tcp_reconnects"], flush=True)
comm.close()
"""


@reset
@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss(8)")
@pytest.mark.slow
@pytest.mark.thorough
def test_connections_between_hosts_that_an_administrator_kills(tmp_path: Any) -> None:
    with netns.network(2, "1gbit") as net:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")}
        env |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "HETCOLL_TRANSPORT": "tcp"}
        env |= {"PYTHONPATH": os.path.dirname(os.path.dirname(hetcoll.__file__)), "HETCOLL_SOCKET_STRIPES": "2"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-c", RANK, "8"],
                env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(net.hosts)
        ]  # fmt: skip
        try:
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "ready\n", rank.communicate()
            for turn in range(12):
                time.sleep(0.3)
                # All but those to the store, which are the control plane's.
                words = ("sport", "!=", ":29500", "and", "dport", "!=", ":29500")
                kill_connections(["ip", "netns", "exec", net.hosts[turn % 2]], "state", "established", *words)
            outputs = [rank.communicate(timeout=DEADLINE) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for out, err in outputs:
        assert "Error" not in err, err
        _, reconnects = map(int, out.split())
        assert reconnects > 3, (out, err)
