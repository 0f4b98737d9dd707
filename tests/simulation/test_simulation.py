"""The control plane on a simulated system: schedules that seeds decide, and what must hold at the end of each."""

from __future__ import annotations

from collections.abc import Iterable

from thorough import HOUSE, parametrize

from .job import draw
from .lanes import Result, campaign

SEEDS = 3000
PARTS = 60
FOUND = {
    "away": (
        *(94000056, 94000095),  # rank 0 woke and took some for dead that had gone elsewhere
        94002785,  # who was behind a relay that was stopped as well had gone, and the relay did not say so
        94001369,  # nothing was heard of one for no more than 9 s: it found the next store so soon
        *(96216513, 99009052),  # the last answer was under way, and all who had it were lost to the others
    ),
    "cut": (
        *(69, 273),  # a store that gave up told its own rank to go on alone
        *(26, 293),  # newcomers made a majority, or were not counted among the others
        813,  # the smaller part of a job was more than half of what its store had told
        110,  # who could reach the store had to wait for a place at a relay
        *(4008657, 6003282),  # two successors waited for more than half, each with a half of that
        72921,  # a store that could not reach most decided who goes on, a moment before it gave up
        *(
            20133977,
            20226573,
            20345855,
            20412898,
        ),  # the last answer was under way: who has it, and who has not, is right
        20182893,  # nobody that might serve was in the larger part
        21070503,  # all who had the last answer had lost their store when the network was whole again
        99127402,  # two successors began at once, and each had a half of those that are left
    ),
    "kill": (
        86,  # a relay looked for a store that was gone, closed or not
        *(7010525, 51213),  # two parts of a job went by different lists of successors
        5003296,  # a store that had taken another's place died before it had successors
        # The store and the next one died at about the same time, and one rank went by an old list of successors, in
        # another order.
        *(20031598, 20059053, 20153856, 20039099, 20092201),
        20179109,  # rank 0 died with all who had the last answer
        20217215,  # one asked what the dead had told, or those who had yet to come, and the others waited for it
        *(20112756, 20351606),  # the next one listened where the store had, died too, and one rank looked no further
        21226204,  # one waited in a group for another, which had left it, and had told that to nobody but a dead store
        80185627,  # all successors ended within half a second of the store's death, and one was left without an answer
        91187819,  # one ended whose relay and store died before it had heard of any successor
    ),
    "reset": (1000452,),  # a second welcome took the place of an answer
    "stop": (
        *(88, 90),  # a successor that others had passed over woke, and served as well
        20142673,  # the last answer was under way, as in a cut
        20005778,  # a newcomer was one of the job's processes that had yet to hear it
        *(9100471, 9101496),  # the next store did not know who had gone on, since all of these had left their old group
    ),
    "storm": (
        4004365,  # rank 0 woke after others had gone on, and newcomers made more than half of what it knew
        9116168,  # a relay lost a child while its own way was lost, and the store took that for one of its half
        1006658,  # who was behind a relay that is stopped had gone elsewhere, and counted as one of its half, too
        3005734,  # who closed while it went to another store said goodbye to the lost one, and stayed
        20285787,  # a relay whose way up was lost for good had yet to tell of a child that it lost, and left all open
        1005751,  # who was left behind asked again, and was told who goes on as if it were one of them
        21095752,  # one was stopped while it ended, and had no time to close what it had open when it woke
        # Rank 0 woke, took one for dead that had gone on elsewhere and ended there, and went on without more than half.
        *(70028767, 80164385),
        91010161,  # a store ended before it had missed all who had gone on elsewhere, and its successor served the rest
        91163670,  # a successor woke when all whom it knew had ended, and did not know of those that came after them
        96130177,  # the same while it looked for another one
    ),
    "torn": (
        *(99501195, 99501218),  # whom the store before had lost was taken for one of more than half
        99202422,  # the store was in a newcomer's process, and one more of the job had yet to come than was thought
        *(99501236, 99501288),  # those that fell silent found others that had yet to come, and were more than half
        101037142,  # the same, where the store before was dead: that one looked by its list for one that fell silent
    ),
    "vanish": (
        *(663, 728),  # a successor passed by one that was about to notice
        80154434,  # the time of a call was over before the next store could tell it the answer
    ),
}
"""What failed once, by what was done."""


def check(results: Iterable[Result]) -> None:
    failed = [f"{draw(each.seed, each.only)}\n" + "\n".join(each.problems) for each in results if each.problems]
    again = "`make simulation SEEDS='--seed N'` plays N again, and tells all of it; of some kind with `--only KIND`"
    assert not failed, "\n\n".join([f"{len(failed)} failed", *failed[:3], again])


@parametrize("part", range(PARTS), first=1)
def test_every_schedule_ends_in_time_with_one_answer_for_all(part: int) -> None:
    check(campaign((seed, "") for seed in range(part, SEEDS, PARTS)))


@HOUSE
def test_the_same_where_it_went_wrong_once_and_each_time_in_the_same_way() -> None:
    found = [(seed, only) for only, seeds in FOUND.items() for seed in seeds]
    results = list(campaign([*found, *found[:4]]))
    check(results)
    played = {(each.seed, each.only): each for each in results}
    assert len(results) == len(played) + 4
    assert all(each == played[each.seed, each.only] for each in results), "a seed decides all"
