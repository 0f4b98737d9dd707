"""Plans that nobody ships, on the engine: random ones that the checker accepts, and the smallest that it refuses."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from definitions import defines
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_executor import execute
from random_plans import Scene, inputs, play, play_all, prove, scene, shape
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll.plan import simulator
from hetcoll.plan.ir import Buf, Op, Plan, Span, Step
from hetcoll.plan.simulator import PlanError, check
from hetcoll.types import Collective

Pool = Callable[..., Ranks]
EXAMPLES = int(os.environ.get("HETCOLL_RANDOM_PLANS", "10"))  # of each transport; more of them make a campaign
# One after another, whose ranks stay for all examples of a size.
SIZES = range(2, 9) if "HETCOLL_RANDOM_PLANS" in os.environ else (2, 3, 4, 6, 8)
COUNTS = (3, 40_000)  # of int64: the second is long enough to be lent


@parametrize("way", ["shm", "tcp"], first=1)
def test_random_plans(pool: Pool, way: str) -> None:
    """Deps are left out as far as the checker accepts it: so what it proves must be what the engine does."""
    env = {"HETCOLL_TRANSPORT": way, "HETCOLL_SHM_READ": "always"}

    def play_some(size: int) -> None:
        @given(st.integers(0, 1 << 40))
        @settings(
            max_examples=-(-EXAMPLES // len(SIZES)), deadline=None, database=None,
            derandomize="HETCOLL_RANDOM_PLANS" not in os.environ, suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def some(seed: int) -> None:
            found = scene(seed, size)
            assume(found is not None)
            pool(size, **env).run(play_all, found, COUNTS)

        some()

    for size in SIZES:
        play_some(size)


def test_most_random_plans_are_accepted_and_rely_on_messages() -> None:
    """Else the test above would be empty."""
    found = [scene(seed, 2 + seed % 7) for seed in range(40)]
    whole = [scene(seed, 2 + seed % 7, loosen=0) for seed in range(40)]
    kept = [s for s in found if s is not None]
    assert len(kept) > 30

    def deps(scenes: list[Scene]) -> int:
        return sum(len(step.deps) for s in scenes for plan in s.plans for step in plan.steps)

    assert deps(kept) < 0.9 * deps([s for s in whole if s is not None])
    assert {s.plans[0].staged for s in kept} == {s.plans[0].credits > 0 for s in kept} == {False, True}
    assert {step.op for s in kept for plan in s.plans for step in plan.steps} >= set(Op) - {
        Op.SCALE,
        Op.LOCAL,
        Op.ROUND,
    }


# ---------------------------------------------------------------------------------------- what the checker refuses


def _in(unit: int, count: int = 1) -> Span:
    return Span(Buf.SEND, unit, count)


def _out(unit: int, count: int = 1) -> Span:
    return Span(Buf.RECV, unit, count)


def _place(unit: int, count: int = 1) -> Span:
    return Span(Buf.SCRATCH, unit, count)


def _plans(name: str, *rows: tuple[Step, ...], staged: bool) -> list[Plan]:
    more = {"scratch_copies": 1, "staged": staged}
    kind = Collective.ALLREDUCE
    return [Plan(kind, name, len(rows), r, 2, 2, row, **more) for r, row in enumerate(rows)]  # type: ignore[arg-type]


def posted_ahead(waits: bool) -> list[Plan]:
    """Rank 0 sends unit 0 to rank 2, then unit 1 to rank 1. Rank 1 answers what it got, and rank 0 writes unit 0 by
    that: `waits` for rank 2 or not, which may not have come yet."""
    send, recv, add, copy = Op.SEND, Op.RECV, Op.RECV_REDUCE, Op.COPY
    zero = (
        Step(send, 0, _in(0), peer=2),
        Step(send, 0, _in(1), peer=1),
        Step(add, 1, _in(0), _out(0), 1, 1, deps=(0,) if waits else ()),
        Step(add, 2, _out(0), _out(0), 2, 0, deps=(2,)),
        Step(recv, 3, None, _out(1), 2, 1),
    )
    one = (
        Step(add, 0, _in(1), _place(1), 0),
        Step(send, 1, _in(0), peer=0, channel=1, deps=(0,)),
        Step(send, 2, _in(0), peer=2),
        Step(send, 2, _place(1), peer=2, deps=(0,)),
        Step(recv, 3, None, _out(0), 2, deps=(1, 2)),
        Step(recv, 3, None, _out(1), 2),
    )
    two = (
        Step(recv, 0, None, _place(0), 0),
        Step(send, 1, _in(0), peer=0),
        Step(add, 2, _place(0), _place(0), 1, deps=(0,)),
        Step(Op.REDUCE, 3, _in(0), _place(0), deps=(2,)),
        Step(copy, 3, _place(0), _out(0), deps=(1,)),
        Step(send, 4, _out(0), peer=1, deps=(4,)),
        Step(add, 2, _in(1), _out(1), 1),
        Step(send, 4, _out(1), peer=1, deps=(6,)),
        Step(send, 5, _out(1), peer=0, channel=1, deps=(6,)),
    )
    return _plans("posted ahead", zero, one, two, staged=False)


def given_away(in_turn: bool) -> list[Plan]:
    """Rank 0 adds to what rank 1 lends it and sends the sum back, so its own place for that stays empty. It reads a
    part of it once rank 1 has answered: by a step that stands in the plan before the sum, or behind it."""
    send, recv, add, copy = Op.SEND, Op.RECV, Op.RECV_REDUCE, Op.COPY
    late = (Step(recv, 2, None, _out(0), 1, 1), Step(copy, 2, _place(1), _out(1)))
    first = 0 if in_turn else 2
    sums = (Step(add, 0, _in(0, 2), _place(0, 2), 1), Step(send, 1, _place(0, 2), peer=1, deps=(first,)))
    one = (
        Step(copy, 0, _in(0, 2), _place(0, 2)),
        Step(send, 1, _place(0, 2), peer=0, deps=(0,)),
        Step(recv, 2, None, _out(0, 2), 0),
        Step(send, 3, _out(0), peer=0, channel=1, deps=(2,)),
    )
    return _plans("given away", (*sums, *late) if in_turn else (*late, *sums), one, staged=True)


def lent_on(waits: bool) -> list[Plan]:
    """Rank 1 adds to what rank 0 has lent it and lends it on to rank 2. Its word that it has come is no word that rank
    2 has it, so rank 0 must not write there unless it `waits`."""
    send, recv, add = Op.SEND, Op.RECV, Op.RECV_REDUCE
    zero = (
        Step(Op.COPY, 0, _in(0), _place(0)),
        Step(send, 1, _place(0), peer=1, deps=(0,)),
        Step(recv, 2, None, _place(0), 1, 1, deps=(1,) if waits else ()),
        Step(send, 3, _place(0), peer=2, channel=1, deps=(2,)),
    )
    one = (
        Step(add, 0, _in(0), _place(0), 0),
        Step(send, 1, _place(0), peer=2, deps=(0,)),
        Step(send, 2, _in(0), peer=0, channel=1, deps=(0,)),
    )
    two = (Step(add, 0, _in(0), _out(0), 1), Step(add, 0, _out(0), _out(0), 0, 1))
    return _plans("lent on", zero, one, two, staged=True)


AHEAD_ORDER = "00 20 01 10 11 02 21 03 12 22 23 24 13 26 25 14 27 15 28 04"
WRONG = {
    "posted ahead": (
        posted_ahead(False), posted_ahead(True), AHEAD_ORDER, AHEAD_ORDER,
        r"rank 0 of 3, step 2 .*: writes while step 0 .* may use it: what was sent may still be read where it lies",
    ),
    "given away": (
        given_away(False), given_away(True), "10 11 02 03 12 13 00 01", "10 11 00 01 12 13 02 03",
        r"rank 0 of 2, step 1 .*: uses scratch after step 2 .*, which stands behind it in the plan",
    ),
    "lent on": (
        lent_on(False), lent_on(True), "00 01 10 11 20 12 02 03 21", "00 01 10 11 20 12 02 03 21",
        r"rank 0 of 3, step 2 .*: writes while step 1 .* may use it: what was sent .* hold a sum that is lent on",
    ),
}  # fmt: skip


def _of(plans: list[Plan], order: str) -> Scene:
    return Scene(plans, [(int(rank), int(step)) for rank, step in order.split()])


@pytest.mark.parametrize("what", WRONG)
def test_what_lending_breaks_is_refused(what: str) -> None:
    wrong, right, _, _, problem = WRONG[what]
    prove(right, inplace=True)
    prove(right, inplace=False)
    if what == "posted ahead":
        prove(wrong, inplace=False)  # other memory is written there
    with pytest.raises(PlanError, match=problem):
        prove(wrong, inplace=True)
    if what != "lent on":  # which is no all-reduce
        check(right, inplace=True)
        with pytest.raises(PlanError, match=problem):
            check(wrong, inplace=True)


def test_the_reference_lends() -> None:
    """So it, too, shows that a plan writes what may still be read."""
    wrong, right, *_ = WRONG["posted ahead"]
    found = 0
    for seed in range(100):
        execute(right, [8] * 3, True, random.Random(seed))
        execute(wrong, [8] * 3, False, random.Random(seed))
        try:
            execute(wrong, [8] * 3, True, random.Random(seed))
        except AssertionError:
            found += 1
    assert found > 0


def _late(comm: hetcoll.Communicator, played: Scene, rounds: int) -> int:
    """How many calls go wrong on some rank; in place, in memory that others can read, and the last rank is late."""
    wrong, count = 0, 1 << 16
    bound = shape(comm, played.plans[comm.rank], count)
    for turn in range(rounds):
        given = inputs(comm.size, count, turn)
        if comm.rank == comm.size - 1:
            time.sleep(0.01)
        got = play(comm, bound, given[comm.rank], True, kind="of Communicator.empty")
        wrong += not np.array_equal(got, played.expected(given, [True] * comm.size)[comm.rank])
    return wrong


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_does_go_wrong(pool: Pool, what: str) -> None:
    wrong, right, order, right_order, _ = WRONG[what]
    ranks = pool(len(wrong), HETCOLL_TRANSPORT="shm")
    assert ranks.run(_late, _of(right, right_order), 8) == [0] * len(wrong)
    assert sum(ranks.run(_late, _of(wrong, order), 8)) > 0


# -------------------------------------------------------------------------------------- what the checker is about


def test_the_checker_names_what_it_models_of_the_engine() -> None:
    """``name`` in ``native/...``: the file defines it."""
    root, seen = Path(__file__).parents[2], set()
    for path in Path(simulator.__file__).parent.glob("*.py"):
        text = " ".join(path.read_text().split())
        for names, file in re.findall(r"((?:``[A-Za-z:]+``(?: and |, )?)+) in ``(native/[\w/]+\.cc)``", text):
            for name in re.findall(r"``([A-Za-z:]+)``", names):
                assert defines(root / file, name), f"{path.name}: {file} has no {name}"
                seen.add(name)
    assert seen >= {"Task::PostAhead", "Task::MayPost", "Task::FuseSlot", "BoundPlan::MarkGiven", "Neighbours"}
