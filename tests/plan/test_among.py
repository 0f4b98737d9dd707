"""Any algorithm among islands: proved for islands of any sizes, ordered by the plans of few ranks, chosen by cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import missed, structural_mutants
from plan_executor import execute
from star import star
from thorough import examples, parametrize
from topologies import any_groups, any_islands, side_by_side
from waits import Waits, proved

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import ALGORITHMS, Algorithm, Draft, Hosts, find, inp, out
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import runs_among
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.order import Frame, joined, ordered
from hetcoll.plan.pieces import SLOTS, Cut, Lengths
from hetcoll.plan.pipeline import pipelined, ramp
from hetcoll.plan.simulator import check, serialisable
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.plan.tuner import UNLIMITED, table_among
from hetcoll.types import REDUCING, ROOTED, Collective

FLAT = [entry for kind in AMONG for entry in ALGORITHMS[kind].values() if runs_among(entry)]
ALL = [pytest.param(entry, id=f"{entry.collective.label}-{entry.name}") for entry in FLAT]


SHAPES = [side_by_side(*s) for s in [(2, 2), (3, 1), (1, 1, 2), (2, 2, 2, 2), (2, 3, 5), (1, 1, 1, 2), (2, 1, 1, 3, 1)]]
SHAPES += [((0, 2, 4), (1, 3)), ((3, 1), (0,), (2, 4, 5), (6,))]


def build(entry: Algorithm, islands: Hosts, *, root: int = 0, scale: bool = False) -> list[Plan]:
    n = sum(map(len, islands))
    return [among(entry).build(n, r, root=root, scale=scale, hosts=islands) for r in range(n)]


def prove(plans: list[Plan], *, inplace: bool, scale: bool, credits: int) -> None:
    check(plans, inplace=inplace, scale=scale)
    serialisable(plans, Waits(plans, credits).orders(), credits)


@parametrize("entry", ALL, first=3)
def test_they_are_proved_whole_and_in_pieces(entry: Algorithm) -> None:
    for turn, islands in enumerate(shape for shape in SHAPES if entry.supports(len(shape))):
        n = sum(map(len, islands))
        scale = turn % 2 == 1 and entry.collective in REDUCING
        plans = build(entry, islands, root=(turn * 2) % n if entry.collective in ROOTED else 0, scale=scale)
        prove(plans, inplace=turn % 2 == 0, scale=scale, credits=1)
        prove(pipelined(plans, (0, 1, 3)), inplace=turn % 2 == 1, scale=scale, credits=2)


@given(st.data())
@settings(max_examples=examples(15))
def test_any_islands_give_numpys_result_in_any_order(data: st.DataObject) -> None:
    islands = data.draw(any_groups())
    n, m = sum(map(len, islands)), len(islands)
    entry = data.draw(st.sampled_from([e for e in FLAT if e.supports(m)]))
    scale = data.draw(st.booleans()) and entry.collective in REDUCING
    root = data.draw(st.integers(0, n - 1)) if entry.collective in ROOTED else 0
    plans = build(entry, islands, root=root, scale=scale)
    if data.draw(st.booleans()):
        plans = pipelined(plans, ramp(data.draw(st.integers(1, 4)), 2))
    prove(plans, inplace=data.draw(st.booleans()), scale=scale, credits=data.draw(st.integers(1, 3)))
    counts = [data.draw(st.integers(0, 40))] * n
    if entry.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):  # the v forms
        counts = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    execute(plans, counts, data.draw(st.booleans()), rng, max(plans[0].credits, data.draw(st.integers(1, 3))))


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_every_single_edit_is_caught(name: str) -> None:
    for kind in AMONG:
        if name not in ALGORITHMS[kind]:
            continue
        scale, islands = kind in REDUCING, side_by_side(2, 1, 1)
        plans = build(find(kind, name), islands, root=1 if kind in ROOTED else 0, scale=scale)
        assert not missed(plans, scale, kinds=[structural_mutants]), kind.label


# --------------------------------------------------------------------------------------------------------- schedules


def test_a_ring_of_three_islands() -> None:
    """The second member of the first island owns a half, and passes thirds of it to the second members beside it."""
    plan = build(find(Collective.ALLREDUCE, "ring"), side_by_side(2, 2, 2))[1]
    assert [str(step) for step in plan.steps] == [
        "4:local reduce_scatter of send[0:3],send[3:6] -> recv[3:6]",
        "0:send recv[5:6] peer 3 after 0",
        "1:recv_reduce recv[4:5] -> recv[4:5] peer 5 after 0",
        "0:send recv[4:5] peer 3 after 2",
        "1:recv_reduce recv[3:4] -> recv[3:4] peer 5",
        "2:send recv[3:4] peer 3 channel 1 after 0,4",
        "3:recv -> recv[5:6] peer 5 channel 1 after 0",
        "2:send recv[5:6] peer 3 channel 1 after 6",
        "3:recv -> recv[4:5] peer 5 channel 1",
        "4:local allgather of recv[0:3],recv[3:6] recv[3:6] after 4,8",
    ]


@parametrize("sizes", [(2, 2, 2), (1, 1, 2, 3), (3, 1, 5, 7), (8,) * 16], first=3)
def test_a_ring_has_two_neighbours_and_no_more_bytes_than_direct(sizes: tuple[int, ...]) -> None:
    islands, m = side_by_side(*sizes), len(sizes)
    where = {r: i for i, island in enumerate(islands) for r in island}
    for kind in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        plans = build(find(kind, "ring"), islands)
        if kind is Collective.ALLREDUCE or len(set(sizes)) == 1:
            direct = [ISLANDS[kind].build(plans[0].size, r, hosts=islands) for r in range(plans[0].size)]
            for island in islands:
                assert sent(plans, island) == pytest.approx(sent(direct, island))
        for plan in plans:
            near = {where[peer] - where[plan.rank] for peer, _ in plan.edges}
            assert near <= {1, -1, m - 1, 1 - m}
    for plan in build(find(Collective.ALLREDUCE, "tree"), islands):
        assert len({where[peer] for peer, _ in plan.edges}) <= 6


def sent(plans: list[Plan], island: tuple[int, ...]) -> float:
    """What leaves an island, in buffers."""
    spans = [s.src for r in island for s in plans[r].steps if s.op is Op.SEND and s.src is not None]
    return sum(span.count for span in spans) / max(plans[0].send_units, plans[0].recv_units)


def test_what_a_user_writes_runs_among_islands() -> None:
    for turn, islands in enumerate(SHAPES):
        scale = turn % 2 == 1
        plans = build(Algorithm("star", Collective.ALLREDUCE, star), islands, scale=scale)
        prove(plans, inplace=scale, scale=scale, credits=1)


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(ArgumentError, match="by hypercube is for shares of one length, not among islands"):
        among(find(Collective.REDUCE_SCATTER, "hypercube"))
    with pytest.raises(ArgumentError, match="gather among islands has one way: that of `islands`"):
        among(find(Collective.GATHER, "direct"))
    with pytest.raises(ArgumentError, match="allgather by doubling does not support 3 islands"):
        build(find(Collective.ALLGATHER, "doubling"), side_by_side(1, 1, 2))


# ------------------------------------------------------------------------------------------------------------- order


@given(st.data())
@settings(max_examples=examples(11))
def test_each_rank_has_its_row_of_an_order_of_all_from_its_own_plan(data: st.DataObject) -> None:
    """With what `GpuPlans` knows, compared to the plans of all ranks: pieces, what waits for what, who meets whom."""
    islands = data.draw(st.one_of(st.sampled_from([((1,), (0,)), ((2,), (0,), (1,))]), any_islands()))
    n, m = sum(map(len, islands)), len(islands)
    flat = [among(e) for e in (*FLAT, Algorithm("star", Collective.ALLREDUCE, star)) if e.supports(m)]
    entry = data.draw(st.sampled_from([*flat, *ISLANDS.values()]))
    root = data.draw(st.integers(0, n - 1)) if entry.collective in ROOTED else 0
    how: dict[str, Any] = {"scale": entry.collective in REDUCING and data.draw(st.booleans()), "groups": ()}
    compress = entry.compresses and data.draw(st.booleans())
    if compress and m > 2 and data.draw(st.booleans()):
        how["groups"] = ((*islands[0], *islands[1]), *islands[2:])
    elif compress and data.draw(st.booleans()):  # hosts that islands do not keep to
        where = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
        hosts = tuple(host for at in range(3) if (host := tuple(r for r in range(n) if where[r] == at)))
        how["groups"] = joined(hosts, islands)
    cuts = data.draw(st.sampled_from([(0, 1), (0, 3), (0, 1, 4, 5), (0, 1, 2, 3, 4, 5)])) if m > 1 else (0, 1)
    made = Cut(cuts, cuts[-1] if compress else data.draw(st.integers(1, cuts[-1])), 1)
    whole = [entry.build(n, r, root=root, hosts=islands, compress=compress, **how) for r in range(n)]
    frames = [Frame(plan, entry, islands, **how) for plan in whole]
    assert {frame.lengths for frame in frames} == {Lengths.of(whole)}
    proved([ordered(frame, made) for frame in frames], pipelined(whole, *made[:2]), islands)


@pytest.mark.parametrize("kind", ISLANDS, ids=lambda kind: kind.label)
def test_each_way_among_islands_has_such_an_order(kind: Collective) -> None:
    """What is drawn above may leave one out."""
    entry = ISLANDS[kind]
    for islands in SHAPES[-2:]:
        n = sum(map(len, islands))
        whole = [entry.build(n, r, root=n - 1 if kind in ROOTED else 0, hosts=islands) for r in range(n)]
        for made in (Cut((0, 1), 1, 1), Cut((0, 1, 4, 5), 2, 1)):
            found = [ordered(Frame(plan, entry, islands), made) for plan in whole]
            proved(found, pipelined(whole, *made[:2]), islands)


def test_a_copy_in_the_lane_of_messages() -> None:
    """Where an island is one rank, that copies its own part as the flat plan does; else the library has done it."""

    def gather(p: Draft) -> None:
        p.copy(0, out(p.rank), inp())
        for step in range(1, p.size):
            p.send(0, inp(), (p.rank + step) % p.size)
        for step in range(1, p.size):
            p.recv(1, out((p.rank - step) % p.size), (p.rank - step) % p.size)

    entry = among(Algorithm("own", Collective.ALLGATHER, gather))
    for islands in (side_by_side(2, 1), side_by_side(1, 3, 2)):
        n = sum(map(len, islands))
        whole, made = [entry.build(n, r, hosts=islands) for r in range(n)], Cut((0, 1, 3), 1, 1)
        proved([ordered(Frame(plan, entry, islands), made) for plan in whole], pipelined(whole, *made[:2]), islands)


def test_groups_that_cut_islands() -> None:
    """Islands 0, 2 and 1, 3: where rank 0 exchanges with 1 only, and 2 with 3, these two pairs say what is near."""
    islands = ((0, 2), (1, 3))
    assert joined(((0, 1), (2, 3)), islands) == (*islands, (0, 2, 1, 3))
    assert joined(((0, 1), (2,), (3,)), islands) == islands
    assert joined(((0, 1, 2, 3),), islands) == ((0, 1, 2, 3),)
    assert joined(((0, 1), (2, 3)), ((0, 2, 3), (1,))) == ((0, 2, 3), (1,))
    assert joined(((1, 2, 3, 4), (0,)), ((0, 2, 3), (1, 4))) == ((0, 2, 3), (1, 4))
    made = Cut((0, 1, 2, 3), 3, 1)
    for hosts in (((0, 1), (2, 3)), ((0, 1), (2,), (3,))):
        for entry in ISLANDS.values():
            how: dict[str, Any] = {"groups": joined(hosts, islands)}
            if entry.compresses:
                whole = [entry.build(4, r, hosts=islands, compress=True, **how) for r in range(4)]
                found = [ordered(Frame(plan, entry, islands, **how), made) for plan in whole]
                proved(found, pipelined(whole, *made[:2]), islands)


@pytest.mark.parametrize("ordered_too", [False, True])
def test_ranks_that_are_islands_each(ordered_too: bool) -> None:
    """Any algorithm, without any library."""
    for kind, table in ALGORITHMS.items():
        for entry in table.values() if kind is not Collective.BARRIER else ():
            n = 4 if entry.supports(4) else 2
            if entry.stretches is not None or (ordered_too and not entry.ordered):
                continue
            root = 1 if kind in ROOTED else 0
            whole = [entry.build(n, r, root=root, ordered=ordered_too) for r in range(n)]
            alone, made = tuple((r,) for r in range(n)), Cut((0, 1, 3, 5, 6), 1, 1)
            frames = [Frame(plan, entry, alone) for plan in whole]
            assert {frame.lengths for frame in frames} == {Lengths.of(whole)}
            proved([ordered(frame, made) for frame in frames], pipelined(whole, *made[:2]), alone)


@pytest.mark.parametrize("sizes", [[*range(1, 45), 34], [8] * 127 + [7, 1]], ids=["1 to 44", "eights"])
def test_one_of_1024_ranks(sizes: list[int]) -> None:
    """Islands of 1 to 44 cut a buffer into more units than NumPy's numbers have."""
    islands = side_by_side(*sizes)
    for entry in (*(among(find(kind, "ring")) for kind in AMONG), *(ISLANDS[kind] for kind in AMONG)):
        frame = Frame(entry.build(1024, 500, hosts=islands), entry, islands)
        assert set(ordered(frame, Cut((0, 1), 1, 1)).order) == set(range(len(frame.own.steps)))


def test_one_rank_alone_has_few_steps_or_none() -> None:
    for kind, table in ALGORITHMS.items():
        for entry in table.values():
            if kind is not Collective.BARRIER and entry.supports(1):
                found = ordered(Frame(entry.build(1, 0), entry, ((0,),)), Cut((0, 1), 1, 1))
                assert sorted(found.order) == [*range(len(found.plan.steps))]


def test_parts_take_turns() -> None:
    """Islands of 7 and 8: who shares its interval with two gives each a piece in turn. Else the second would wait for
    all of the first, and so on through all ranks: the last message would come when all bytes had gone one by one."""
    islands, made = side_by_side(7, 8), Cut(tuple(range(41)), 1, 1)
    entry = ISLANDS[Collective.ALLREDUCE]
    plans = pipelined([entry.build(15, r, hosts=islands) for r in range(15)], *made[:2])
    assert [step.peer for step in plans[1].steps if step.op is Op.SEND][:6] == [8, 9, 8, 9, 8, 9]
    levels = Waits(plans, SLOTS).levels()
    assert max(map(max, levels)) < 3 * 40


# ------------------------------------------------------------------------------------------------------------ choice


def chosen(kind: Collective, hosts: str, each: int = 1) -> list[tuple[int, str]]:
    """Islands of so many ranks, one for each letter, which names its host."""
    ranks = [host for host in hosts for _ in range(each)]
    topology = Topology(tuple(RankInfo(r, host) for r, host in enumerate(ranks)))
    islands = side_by_side(*[each] * len(hosts))

    def able(entry: Algorithm) -> bool:
        return runs_among(entry) and entry.supports(len(hosts))

    return table_among(kind, topology, islands, able)


def test_costs_choose_among_islands() -> None:
    assert chosen(Collective.ALLREDUCE, "aa") == [(UNLIMITED, "oneshot")]
    assert chosen(Collective.BROADCAST, "aaaa")[-1] == (UNLIMITED, "ring")  # direct: three times through one link
    rows = [name for _, name in chosen(Collective.ALLREDUCE, "aabbccdd")]
    assert rows[-1] == "ring"  # a host's card carries one island's bytes, not those of both
    assert "direct" not in rows
    alone, eights = chosen(Collective.ALLREDUCE, "abcdefgh"), chosen(Collective.ALLREDUCE, "abcdefgh", 8)
    assert [(8 * upper, name) for upper, name in alone[:-1]] == eights[:-1]  # each member has an eighth
