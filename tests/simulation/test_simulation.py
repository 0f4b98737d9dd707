"""The control plane on a simulated system: schedules that seeds decide, and what must hold at the end of each."""

from __future__ import annotations

from collections.abc import Iterable

from thorough import parametrize

from .job import draw
from .lanes import Result, campaign

SEEDS = 3000
PARTS = 30
FOUND = (
    *((seed, "") for seed in (1269, 1863, 3819, 4178, 100736, 102286)),
    *((seed, "cut") for seed in (41, 122, 265)),
    (61, "kill"),
    (62, "vanish"),
)
"""What failed once. Two welcomes to who came through a relay whose own way changed: the second one took the place of an
answer. Stores that told their own rank to go on alone while they gave up. Successors that passed by one that was about
to notice. Newcomers that made a majority. Ranks that could reach the store, and were sent to relays that could not."""


def check(results: Iterable[Result]) -> None:
    failed = [f"{draw(each.seed, each.only)}\n" + "\n".join(each.problems) for each in results if each.problems]
    again = "`make simulation SEEDS='--seed N'` plays N again, and tells all of it; of some kind with `--only KIND`"
    assert not failed, "\n\n".join([f"{len(failed)} failed", *failed[:3], again])


@parametrize("part", range(PARTS), first=1)
def test_every_schedule_ends_in_time_with_one_answer_for_all(part: int) -> None:
    check(campaign((seed, "") for seed in range(part, SEEDS, PARTS)))


def test_the_same_where_it_went_wrong_once_and_each_time_in_the_same_way() -> None:
    results = list(campaign([*FOUND, *FOUND[:4]]))
    check(results)
    assert results[-4:] == results[:4], "a seed decides all"
