"""What follows from the answers of stuck ranks: never a false alarm, and both sides named when there is one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from hetcoll.health.desync_report import (
    Answer,
    Called,
    Edge,
    Wait,
    doubts,
    find_absent,
    find_deadlock,
    find_mismatch,
    find_stalls,
    find_wrong_message,
    unsure,
)

SUM, MAX = "allreduce(float32, count=4, op=sum)", "allreduce(float32, count=4, op=max)"


def called(what: str, site: str = "train.py:12", exactly: bool = True) -> Called:
    return Called(what, site, exactly)


calls = st.builds(Called, st.text(max_size=30), st.text(max_size=30), st.booleans())
answers = st.builds(
    Answer,
    st.integers(0, 1 << 60),
    st.dictionaries(st.integers(1, 1 << 60), calls, max_size=4),
    st.none() | calls,
    st.text(),
    st.booleans(),
    st.text(),
    st.lists(calls, max_size=3).map(tuple),
    st.none() | st.tuples(st.integers(0, 6), st.integers(-1, 9), st.text()),
    st.integers(0, 1 << 60),
    st.lists(st.builds(Wait), max_size=3).map(tuple),
    st.floats(0, 1e9),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(st.tuples(*[st.integers(0, 1 << 60)] * 4), max_size=3).map(tuple),
)


@given(answers)
@settings(max_examples=examples(40))
def test_answers_travel_whole(answer: Answer) -> None:
    assert Answer.decode(answer.encode()) == answer


def test_the_first_call_that_differs_counts() -> None:
    zero = Answer(9, {6: called("barrier()"), 7: called(SUM), 8: called("barrier()"), 9: called(SUM)})
    one = Answer(8, {7: called(MAX, "other.py:3", False), 8: called(SUM)})
    two = Answer(7, {6: called("barrier()"), 7: called(SUM)})
    assert find_mismatch({0: zero, 1: one, 2: two, 3: None}) == (
        f"operation #7: ranks 0, 2 called {SUM} at train.py:12; rank 1 called {MAX} as first called at other.py:3"
    )


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {0: None},
        {0: Answer(3, {3: called(SUM)}), 1: None},
        {0: Answer(3, {3: called(SUM)}), 1: Answer(2, {2: called(MAX)})},  # not the same call
        {0: Answer(3, {3: called(SUM, "a.py:1")}), 1: Answer(3, {3: called(SUM, "b.py:2")})},  # from other lines
        {0: Answer(0, {}), 1: Answer(0, {})},
    ],
)
def test_ranks_that_agree_or_say_nothing_of_it(rows: dict[int, Answer | None]) -> None:
    assert find_mismatch(rows) == ""


# Deadlocks. A row has each rank's answer; `later` has those of the second look.


def waiting(what: str, *waits: Wait, **changes: Any) -> Answer:
    return Answer(4, {}, called(what), "4 0 0", True, waits=waits)._replace(**changes)


def receives(peer: int, done: int = 0, total: int = 16, channel: int = 2, messages: int = 3) -> Wait:
    return Wait(peer, channel, False, done, total, 64 + done, messages)


def sends(peer: int, done: int = 0, total: int = 16, channel: int = 2) -> Wait:
    return Wait(peer, channel, True, done, total, 64 + done, 3)


def later(row: dict[int, Answer], handed: bool = True) -> dict[int, Answer]:
    """`row` as of the next look, when all have looked at their links again.

    `handed`: what has come on each edge is all that was sent on it.
    """
    rows: dict[int, list[tuple[int, int, int, int]]] = {rank: [] for rank in row}
    for rank, answer in row.items():
        for wait in answer.waits:
            if handed and not wait.sends and wait.peer in rows:
                rows[wait.peer].append((rank, wait.channel, wait.bytes, wait.messages))
    return {rank: answer._replace(idle=2, handed=tuple(rows[rank])) for rank, answer in row.items()}


RECV, SEND = "recv(float32, count=4) from rank {}", "send(float32, count=4) to rank {}"
RECEIVES = {0: waiting(RECV.format(1), receives(1)), 1: waiting(RECV.format(0), receives(0))}
LATER = later(RECEIVES)

DEADLOCKS = {
    "both receive": RECEIVES,
    "both send": {0: waiting(SEND.format(1), sends(1, 9)), 1: waiting(SEND.format(0), sends(0, 9))},
    "a receive and a collective": {
        0: waiting(RECV.format(1), receives(1)),
        1: waiting(SUM, receives(2, channel=0), sends(2, channel=0)),
        2: waiting(SUM, receives(0, channel=0)),
    },
    "a ring": {rank: waiting(RECV.format((rank + 1) % 5), receives((rank + 1) % 5)) for rank in range(5)},
    "one whose message waits for nobody": {
        0: waiting(SEND.format(2), sends(2, 9)),
        1: waiting(RECV.format(0), receives(0)),
        2: waiting(RECV.format(1), receives(1)),
    },
    "on another channel": {
        0: waiting(SUM, receives(1, channel=0), sends(1, channel=0)), 1: waiting(RECV.format(0), receives(0))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLOCKS)
def test_ranks_that_wait_for_each_other(name: str) -> None:
    row = DEADLOCKS[name]
    now = later(row)
    text = find_deadlock(row, now)
    assert text.startswith("all ranks wait for each other: ")
    for rank in row:
        assert re.search(rf"ranks? (\d, |\d-)*{rank}\b", text), text
    # Whatever else may be going on beside it.
    for other in (
        Answer(4, {}),
        waiting(RECV.format(0), receives(0)),
        waiting(RECV.format(0), receives(0), alone=False),
    ):
        more = row | {len(row): other}
        assert "wait for each other: rank 0 called " in find_deadlock(more, later(more))
    assert "wait for each other: rank 0 called " in find_deadlock(row, now | {len(row): None})


def test_both_sides_of_a_deadlock() -> None:
    assert find_deadlock(RECEIVES, LATER) == (
        "all ranks wait for each other: rank 0 called recv(float32, count=4) from rank 1 at train.py:12;"
        " rank 1 called recv(float32, count=4) from rank 0 at train.py:12"
    )
    outside = {2: Answer(4, {})}
    assert find_deadlock(RECEIVES | outside, LATER | outside).startswith("ranks 0-1 wait for each other: ")


def test_what_is_asked_before_ranks_are_said_to_wait_for_each_other() -> None:
    unasked = later(RECEIVES, handed=False)
    assert find_deadlock(RECEIVES, unasked) == ""
    assert doubts(RECEIVES, unasked) == [Edge(0, 1, 2), Edge(1, 0, 2)]
    assert doubts(RECEIVES, RECEIVES) == [], "nobody has looked again"
    assert doubts(UNDER_WAY["a stalled message"], later(UNDER_WAY["a stalled message"])) == []


@pytest.mark.parametrize(
    "change",
    [
        None,  # no answer
        {"inside": None},  # one is not in a call: it may come yet
        {"alone": False},  # it has another thread, which may send
        {"progress": "5 0 "},  # it has moved on since the last look
        {"inside": called("barrier()")},  # and is in another call
        {"idle": 1},  # it has not looked since at what it waits for
        {"waits": ()},  # nothing keeps it from moving
        {"connecting": (2,)},  # a link is being made
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_no_deadlock_where_one_may_go_on(rank: int, change: dict[str, Any] | None) -> None:
    now = LATER | {rank: None if change is None else LATER[rank]._replace(**change)}
    assert find_deadlock(RECEIVES, now) == ""
    assert find_deadlock(RECEIVES | {rank: None}, LATER) == "", "the first look must have seen it, too"


UNDER_WAY = {
    "a stalled message": {
        0: waiting(SEND.format(1), sends(1, 9)), 1: waiting(RECV.format(0), receives(0, 7))
    },
    "not yet begun": {0: waiting(SEND.format(1), sends(1)), 1: waiting(RECV.format(0), receives(0))},
    "a sendrecv round a ring": {
        rank: waiting(f"sendrecv of {rank}", sends((rank + 1) % 3, 8), receives((rank - 1) % 3)) for rank in range(3)
    },
    "one of a ring": {
        0: waiting(RECV.format(1), receives(1)),
        1: waiting(RECV.format(2), receives(2)),
        2: waiting(SUM, sends(1, 9), receives(0)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", UNDER_WAY)
def test_a_message_that_is_under_way_is_slow_but_no_deadlock(name: str) -> None:
    row = UNDER_WAY[name]
    assert find_deadlock(row, later(row)) == ""


@pytest.mark.parametrize("handed", [(65, 3), (64, 4), (128, 9)])
def test_what_was_sent_and_has_not_come_is_no_deadlock(handed: tuple[int, int]) -> None:
    """Bytes, or a message without any: its sender has gone on."""
    row = RECEIVES | {1: LATER[1]._replace(handed=((0, 2, *handed),))}
    assert find_deadlock(RECEIVES, LATER | {1: row[1]}) == ""
    ring = DEADLOCKS["a ring"]
    now = later(ring)
    assert find_deadlock(ring, now | {3: now[3]._replace(handed=((2, 2, *handed),))}) == ""


def test_no_deadlock_in_one_collective() -> None:
    """There the network is to blame, and the timeout will say so."""
    same = {rank: waiting(SUM, receives(1 - rank, channel=0)) for rank in (0, 1)}
    assert find_deadlock(same, later(same)) == ""
    assert find_deadlock({}, later(same)) == ""


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[int, Answer], set[int]]:
    """Ranks of which each sends to or receives from some others, and those that may go on by what is known of them:
    worked out here by trying until nothing changes."""
    size = draw(st.integers(2, 6))
    ranks = st.integers(0, size - 1)
    steps = draw(
        st.lists(st.tuples(ranks, ranks, st.booleans()).filter(lambda s: s[0] != s[1]), max_size=12, unique=True)
    )
    awake = draw(st.sets(ranks, max_size=2))
    late = draw(st.sets(st.tuples(ranks, ranks), max_size=2))  # (from, to): bytes that have not come
    row = {}
    for rank in range(size):
        waits = [sends(b) if out else receives(b) for a, b, out in steps if a == rank]
        row[rank] = waiting(f"call of rank {rank}", *waits, alone=rank not in awake)
    free = {rank for rank in row if rank in awake or not row[rank].waits}
    while True:
        able = {a for a, b, out in steps if b in free or (b, a, not out) in steps or (not out and (b, a) in late)} | {
            b for a, b, out in steps if not out and (b, a) in late and a not in awake
        }  # what comes to one that is awake is for that one alone
        if able <= free:
            break
        free |= able
    now = later(row)
    for source, target in late:
        there = tuple((p, c, n + (p == target), m) for p, c, n, m in now[source].handed)
        now[source] = now[source]._replace(handed=there)
    row["now"] = now  # type: ignore[index, assignment]
    return row, free


@given(networks())
def test_only_ranks_that_no_message_can_help_are_accused(found: tuple[dict[int, Answer], set[int]]) -> None:
    row, free = found
    now: Any = row.pop("now")  # type: ignore[call-overload]
    text = find_deadlock(row, now)
    stuck = set(row) - free
    assert bool(text) == (len(stuck) > 1)
    assert {int(rank) for rank in re.findall(r"call of rank (\d+)", text)} == (stuck if text else set())


def test_who_left_before_a_call_that_others_made_keeps_it_from_ending() -> None:
    answers = {0: Answer(5, {}), 1: Answer(5, {}), 2: Answer(4, {}), 3: None}
    assert find_absent(answers, {1, 2, 3, 4}) == [2], "the others have made it, or nothing is known of them"
    assert find_absent(answers, set()) == []


def test_what_stalls_is_named_with_its_bytes() -> None:
    late = waiting(RECV.format(0), receives(0, 8_388_608, 24_000_000))._replace(still=5.2)
    rows = {0: waiting(SEND.format(1), sends(1, 12_000_000, 24_000_000)), 1: late, 2: Answer(4, {}), 3: None}
    assert find_stalls(rows) == ["8.4 of 24 MB from rank 0 to rank 1 came, none for 5 s"]
    none_yet = waiting(SUM, receives(0, 0, 16, channel=0))
    rows = {0: waiting(SUM, sends(1, 0, 16, channel=0), receives(1, 0, 12, channel=0)), 1: none_yet}
    assert find_stalls(rows) == ["0 of 16 bytes from rank 0 to rank 1 came"], "rank 1 has not begun to send"
    assert unsure(rows) == [Edge(1, 0, 0)]
    sent = {1: rows[1]._replace(handed=((0, 0, 76, 4),))}
    assert "0 of 12 bytes from rank 1 to rank 0 came" in find_stalls(rows | sent), "it has, and went on"


def test_both_sides_of_a_wrong_message() -> None:
    wanted = called("recv(float32, count=5) from rank 0", "b.py:2")
    sent = (
        called("send(float32, count=5) to rank 1"),
        called("send(float32, count=55) to rank 1", "a.py:1", False),
        called("send(float32, count=3) to rank 1"),
    )
    assert find_wrong_message({0: Answer(0, {}, sent=sent), 1: Answer(0, {})}, 1, 0, wanted) == (
        "rank 0 called send(float32, count=55) to rank 1 as first called at a.py:1;"
        " rank 1 called recv(float32, count=5) from rank 0 at b.py:2"
    )
    both = called("send(float32, count=1) to rank 0 and recv(float32, count=55) from rank 0")
    assert "rank 0 called send(float32, count=5) to rank 1" in find_wrong_message(
        {0: Answer(0, {}, sent=sent)}, 1, 0, both
    )
    assert find_wrong_message({0: None}, 1, 0, wanted) == f"rank 1 called {wanted}"
