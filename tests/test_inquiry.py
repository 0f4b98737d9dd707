"""What follows from the answers of stuck ranks: never a false alarm, and both sides named when there is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetcoll.health.desync_report import Answer, Called, find_deadlock, find_mismatch, find_wrong_message

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
)


@given(answers)
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


def waiting(what: str, **changes: Any) -> Answer:
    return Answer(4, {}, called(what), "4 0 0 of 1 steps done", True)._replace(**changes)


RECEIVES = {0: waiting("recv(float32, count=4) from rank 1"), 1: waiting("recv(float32, count=4) from rank 0")}
LATER = {rank: answer._replace(idle=2) for rank, answer in RECEIVES.items()}


def test_ranks_that_wait_for_each_other() -> None:
    assert find_deadlock(RECEIVES, LATER) == (
        "all ranks wait for each other: rank 0 called recv(float32, count=4) from rank 1 at train.py:12;"
        " rank 1 called recv(float32, count=4) from rank 0 at train.py:12"
    )


@pytest.mark.parametrize(
    "change",
    [
        None,  # no answer
        {"inside": None},  # one is not in a call: it may come yet
        {"alone": False},  # it has another thread, which may send
        {"progress": "5 0 "},  # it has moved on since the last look
        {"inside": called("barrier()")},  # and is in another call
        {"idle": 1},  # it has not looked since at what it waits for
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_no_deadlock_where_one_may_go_on(rank: int, change: dict[str, Any] | None) -> None:
    now = LATER | {rank: None if change is None else LATER[rank]._replace(**change)}
    assert find_deadlock(RECEIVES, now) == ""
    assert find_deadlock(RECEIVES | {rank: None}, LATER) == "", "the first look must have seen it, too"


def test_no_deadlock_in_one_collective() -> None:
    """There the network is to blame, and the timeout will say so."""
    same, later = ({rank: waiting(SUM, idle=idle) for rank in (0, 1)} for idle in (0, 9))
    assert find_deadlock(same, later) == ""
    assert find_deadlock({}, later) == ""


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
