"""What the verdict lets pass where an answer was under way, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetcoll.rendezvous.protocol.news import Lost
from hetcoll.rendezvous.protocol.wire import WORLD

from .job import Fault, Job, Step, address
from .network import Weather
from .rank import History
from .verdict import judge

KEY = WORLD, "exchange", b"end"
LATER = WORLD, "exchange", b"later"


def told(history: History, key: tuple[bytes, str, bytes], when: float, *names: str) -> None:
    for name in names:
        history.answers[key][name] = "alike"
        history.times[key, name] = when


def loses(history: History, rank: int, when: float) -> None:
    """Those that failed hear that it is lost."""
    for name in ("1", "2"):
        history.news[name].append((when, WORLD, Lost(rank, "its process hosted the job's store: it fell silent")))


def was_stopped(history: History) -> None:
    """The store decided it; its own rank reads that when it wakes."""
    told(history, KEY, 60.0, "0")
    history.decided[KEY] = 1.0


def took_part(history: History) -> None:
    """The one that had the answer decides something after that with those that failed."""
    told(history, LATER, 50.0, "0", "1", "2")


def another_had_it(history: History) -> None:
    """Who is with those that failed, and might have told them."""
    told(history, KEY, 1.01, "3")


def came_after(history: History) -> None:
    """The store decided it when it was cut off already."""
    told(history, KEY, 20.0, "0")


def came_long_before(history: History) -> None:
    told(history, KEY, 0.05, "0")


def was_there(history: History) -> None:
    history.news.clear()


@pytest.mark.parametrize(
    ("otherwise", "passes"),
    [
        (lambda _: None, True),
        (was_stopped, True),
        (took_part, False),
        (another_had_it, False),
        (came_after, False),
        (came_long_before, False),
        (was_there, False),
    ],
)
def test_an_answer_is_missing_only_where_all_who_had_it_were_lost_as_it_was_under_way(
    otherwise: Callable[[History], None], passes: bool
) -> None:
    cut = Fault(1.1, "cut", 0, 20.0, (address(0),))
    job = Job(0, "away", 4, (0, 1, 2, 3), (Step("exchange"),), (cut,), (), Weather(), 0.0)
    history = History(places={WORLD: {rank: str(rank) for rank in range(4)}})
    history.ends = dict.fromkeys("0123", "")
    history.ended = dict.fromkeys("0123", 99.0)
    told(history, KEY, 1.0, "0")
    loses(history, 0, 30.0)
    history.failures[KEY] = dict.fromkeys("12", "rank 0 was lost: it fell silent")
    history.times |= {(KEY, name): 45.0 for name in "12"}
    otherwise(history)
    assert (judge(job, history, {}) == []) is passes
