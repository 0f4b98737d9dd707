"""Who may be with another store: those that fell silent, and those of the store before that have yet to come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from heard import Heard, count

from hetcoll.rendezvous.protocol.wire import F64, I64, U32, WORLD, Frame, Op, pack, unpack
from hetcoll.rendezvous.store.groups import Groups
from hetcoll.rendezvous.store.successors import _GATHER, SILENCES, Successors

DECISIONS = {
    Op.EXCHANGE: (b"tag", pack([b"shared"]), pack([]), b""),
    Op.SHRINK: (U32.pack(1),),
    Op.AGREE: (U32.pack(1), I64.pack(1)),
    Op.GROW: (U32.pack(1), U32.pack(1), b"told"),
}


@pytest.mark.parametrize("op", DECISIONS)
def test_nothing_is_decided_while_more_than_half_may_be_elsewhere(op: Op) -> None:
    """All said it before the store was stopped, or cut off, and may have asked another one since."""
    now = [0.0]
    groups = Groups(lambda: now[0], charge=pack((b"charge",)))
    members, newcomer = [Heard(f"rank {rank}") for rank in range(3)], Heard("a newcomer")

    def ask(who: Heard, op: Op, *fields: bytes) -> None:
        groups.handle(who, Frame(op, 0, 1, pack((*fields, F64.pack(9.0)))))

    for rank, member in enumerate(members):
        ask(member, Op.JOIN, WORLD, U32.pack(rank), U32.pack(3), bytes([rank == 0]))
    for member in members:
        ask(member, Op.EXCHANGE, WORLD, b"where", pack([b"shared"]), pack([]), b"")
    ask(newcomer, Op.ADMIT)
    for member in members:
        member.told.clear()
    groups.successors.reaches = lambda member: member is members[0]
    for member in members:
        ask(member, op, WORLD, *DECISIONS[op])
    now[0] += 1.0
    groups.tick()
    assert all(Op.REPLY not in dict(member.told) for member in members)
    groups.successors.reaches = lambda member: member is not members[2]
    now[0] += 1.0
    groups.tick()
    assert all(Op.REPLY in dict(member.told) for member in members)


@pytest.mark.parametrize(
    ("certain", "listens", "early", "settled", "alone"),
    [
        *((False, None, False, True, True), (True, None, False, False, True), (True, 1, False, True, False)),
        *((True, 2, False, True, True), (True, 3, False, True, True), (True, 3, True, True, True)),
    ],
    ids=[
        *("the store before may live", "it is dead, and who might serve after it has yet to come", "who might is here"),
        *("who might is away", "who might fell silent first", "before this store served"),
    ],
)
def test_those_that_fell_silent_may_be_with_one_that_has_yet_to_come(
    certain: bool, listens: int | None, early: bool, settled: bool, alone: bool
) -> None:
    """Of six processes one hosted the store before, and one did not come to the next: two of four are no half. It finds
    those that fell silent where the store before lives, or by the list of that one."""
    successors = Successors(pack((b"charge",)), lambda *_: None, certain=certain)
    members = [Heard(f"rank {rank}", world=rank) for rank in range(4)]
    for rank, member in enumerate(members):
        successors.take_back(member, rank == 0, b"where it listens" * (rank == listens), pack((count(5),)))
    if early:
        successors.drop(members[3], silent=True)
        members[3].ranks.clear()  # as it is of no group any more
    successors.confirm()
    if settled:
        successors.release()
    assert not successors.doubts()
    successors.drop(members[3], silent=True)
    assert not successors.doubts(), "three of five"
    successors.reaches = lambda member: member is not members[2]
    successors._sure_until = 0.0
    assert successors.doubts() is alone
    successors.drop(members[2], silent=True)
    assert bool(successors.cut_off) is alone


@pytest.mark.parametrize("came", [3, 2])
def test_a_newcomer_that_listens_may_serve_those_that_have_yet_to_come(came: int) -> None:
    """It is of no group as yet, and all those of them."""
    successors = Successors(pack((b"charge",)), lambda *_: None)
    members, newcomer = [Heard(f"rank {rank}", world=rank) for rank in range(came)], Heard("a newcomer")
    for member in (*members, newcomer):
        places = b"where it listens" * (member is newcomer)
        successors.take_back(member, member is members[0], places, pack((count(5),)))
    successors.confirm()
    successors.release()
    assert not successors.doubts()
    successors.reaches = lambda member: member is not newcomer
    successors._sure_until = 0.0
    assert successors.doubts() is (came == 2)
    successors.drop(newcomer, silent=True)
    assert bool(successors.cut_off) is (came == 2)


@pytest.mark.parametrize("host", [Heard("rank 0", world=0), Heard("a newcomer")], ids=lambda host: host.name)
def test_a_newcomer_with_the_store_is_none_of_those_that_were_told_of(host: Heard) -> None:
    successors = Successors(pack((b"charge",)), lambda *_: None, certain=False)
    members = [host, *(Heard(f"rank {rank}", world=rank) for rank in range(1, 5))]
    for member in members:
        successors.take_back(member, member is host, b"", pack((count(5),)))
    successors.confirm()
    for member in members[3:]:
        assert not successors.cut_off
        successors.drop(member, silent=True)
    assert bool(successors.cut_off) is not bool(host.ranks), "two are here, two fell silent, and one has yet to come"


def test_who_comes_when_nobody_is_expected_any_more_brings_no_others() -> None:
    """Or the number that is told would be too high for ever, and nobody more than half of it one day."""
    later = dict[float, Callable[[], None]]()

    def after(seconds: bytes, action: Callable[[], None]) -> None:
        later[F64.unpack(seconds)[0]] = action

    successors = Successors(pack((b"charge",)), after)
    host, first, late = Heard("rank 1", world=1), Heard("rank 2", world=2), Heard("rank 3")
    for member in (host, first):
        successors.take_back(member, member is host, b"where it listens", pack((count(5),)))
    successors.confirm()
    later[SILENCES]()
    successors.take_back(late, False, b"", pack((count(5),)))
    successors.confirm()
    for _ in range(2):  # it is asked to listen, and says nothing
        later[_GATHER]()
    assert unpack(first.told[-1][1])[0] == count(1)


def test_a_newcomer_is_not_one_of_those_that_have_yet_to_come() -> None:
    """Or those might be more than half of what was told, together with others that lose the store."""
    later = list[Callable[[], None]]()
    successors = Successors(pack((b"charge",)), lambda _, action: later.append(action))
    members, newcomer = [Heard(f"rank {rank}", world=rank) for rank in range(4)], Heard("a newcomer")
    for member in members:
        successors.take_back(member, member is members[0], b"where it listens", pack((count(5),)))
    successors.confirm()
    successors.release()
    successors.add(newcomer)
    newcomer.ranks[b"larger"] = 4
    successors.grow()
    assert unpack(newcomer.told[-1][1])[0] == count(5, 1), "five without this store's, of which one has yet to come"
    successors.begin([*members, newcomer])
    for member in members[2:]:
        successors.drop(member, silent=True)
    assert not successors.cut_off, "three are here, two fell silent, and one has yet to come"
    successors.drop(members[1], silent=True)
    assert successors.cut_off == "4 of 6 processes fell silent, and may go on without this part"


@pytest.mark.parametrize("serves", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("silent", [False, True])
def test_who_came_and_died_is_not_expected_any_more(serves: bool, silent: bool) -> None:
    """Nor because another one comes, that was told of it. But who fell silent may be elsewhere."""
    successors = Successors(pack((b"charge",)), lambda *_: None, certain=False)
    members = [Heard(f"rank {rank}", world=rank) for rank in range(5)]
    for member in members[:4]:
        successors.take_back(member, member is members[0], b"where it listens", pack((count(5),)))
    if serves:
        successors.confirm()
    successors.drop(members[3], silent)
    members[3].ranks.clear()
    successors.take_back(members[4], False, b"where it listens", pack((count(5),)))
    successors.confirm()
    successors.release()
    assert unpack(members[1].told[-1][1])[0] == count(4 if silent else 3, silent, silent and serves)
    successors.drop(members[4], silent=True)
    successors.drop(members[2], silent=True)
    assert bool(successors.cut_off) is silent, "two are here, and two fell silent"
