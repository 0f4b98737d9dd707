"""Every collective, algorithm, transport, type and place gives what NumPy gives, and touches nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from cases import result_of, run_mixed, run_sequence, variant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from reference import Case, blank_output, interpret, make_input
from sweep import KINDS, NAMES, cases_of, check, collectives_of, counts_for
from thorough import examples, parametrize

from hetcoll.plan import ir
from hetcoll.plan.algorithms import ALGORITHMS, find
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import among_hosts, runs_among
from hetcoll.types import REDUCING, ROOTED, Collective, DType, ReduceOp, supports

Pool = Callable[..., Ranks]

SIZES = (1, 2, 3, 4, 5)
CORES = len(os.sched_getaffinity(0))
LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm-small": {"shm_bytes": 4096},
    "tcp": {"transport": "tcp"},
    "tcp-stripes": {"transport": "tcp", "socket_stripes": 3},
}


SUPPORTED = {name: [size for size in SIZES[1:] if collectives_of(name, size)] for name in NAMES}
LINKED = [  # links whose slots or sockets are others, among the most ranks alone
    (name, size, link)
    for name, sizes in SUPPORTED.items()
    for size in sizes
    for link in LINKS
    if link in ("shm", "tcp") or size == max(sizes)
]


def of_more(row: tuple[str, int, str]) -> bool:
    return row[1] != (3 if 3 in SUPPORTED[row[0]] else 2) or row[2] != "shm"


@parametrize(("name", "size", "link"), sorted(LINKED, key=of_more), first=sum(not of_more(row) for row in LINKED))
def test_every_algorithm_over_every_link(pool: Pool, name: str, size: int, link: str) -> None:
    """All counts among the most ranks over one link: plans know no sizes, and each link cuts them in its own way."""
    kinds = collectives_of(name, size)
    most = size == max(SUPPORTED[name])
    counts = counts_for(size, large=20011) if link == "shm" and most else [0, 1, size + 1, 4099]
    config = {"algo": name, **LINKS[link]}
    check(pool(size), [case for kind in kinds for case in cases_of(kind, size, counts)], config)


@parametrize("size", [7, 6, 8], first=0)
def test_every_algorithm_on_more_ranks(pool: Pool, size: int) -> None:
    for name in NAMES:
        cases = [case for kind in collectives_of(name, size) for case in cases_of(kind, size, [0, size + 1])]
        check(pool(size), cases, {"algo": name})


@parametrize("link", ["shm", "tcp"], first=1)
@parametrize("size", [2, 3, 4, 5], first=2)
def test_every_algorithm_in_place_on_some_ranks(pool: Pool, size: int, link: str) -> None:
    for name in NAMES:
        cases = [
            Case(kind.label, ("float32", "int64")[turn], count, root=turn, seed=count)
            for kind in collectives_of(name, size)
            for turn, count in enumerate((size + 1, 20_011))
            if kind is not Collective.BROADCAST
        ]
        pool(size).run(run_mixed, cases, {"algo": name, **LINKS[link]}, timeout=60)


@parametrize("size", SIZES, first=2)
def test_what_the_library_chooses(pool: Pool, size: int) -> None:
    counts = [*counts_for(size, large=10007), 100_000]
    check(pool(size), [case for kind in KINDS for case in cases_of(kind, size, counts)], {})


@parametrize("stores", ["claimed", "cached", "streaming"], first=1)
def test_slots_written_either_way(pool: Pool, stores: str) -> None:
    counts = [1009, 100_003]
    cases = [case for kind in KINDS for case in cases_of(kind, 3, counts)]
    check(pool(3, HETCOLL_SHM_STORES=stores), cases, {})


@pytest.mark.parametrize("link", LINKS)
@parametrize("size", SIZES, first=2)
def test_unequal_parts(pool: Pool, size: int, link: str) -> None:
    """The v-collectives: parts of 0, all the parts on one rank, parts that differ; AVG and MAX as well."""
    rows = [[0] * size, [5] * size, [0, *[3] * (size - 1)], [*[0] * (size - 1), 1000], list(range(size))]
    rows.append([(7919 * (rank + 1)) % 2003 for rank in range(size)])
    cases = []
    for turn, (counts, inplace) in enumerate((row, place) for row in rows for place in (False, True)):
        op = ("sum", "max", "avg")[turn % 3]
        settings = {"counts": tuple(counts), "inplace": inplace, "seed": turn, "shift": turn % 3}
        cases.append(Case("allgatherv", ("int16", "complex128")[turn % 2], **settings))
        cases.append(Case("reduce_scatterv", ("float32", "float16")[turn % 2], op=op, **settings))
    cases += [Case("alltoallv", "int32", count, seed=count) for count in (0, 1, 2, 5, 1000, 9001)]
    check(pool(size), cases, LINKS[link])


TABLE = [(dtype.label, op.label) for dtype in DType for op in ReduceOp if supports(dtype, op)]


@pytest.mark.parametrize("dtype", [dtype.label for dtype in DType])
def test_every_type_with_every_reduction(pool: Pool, dtype: str) -> None:
    """Counts around the width of vectors, odd alignments, and the streaming sizes, to which it is all one what is
    reduced; two ranks, so one addition each."""
    ops = [op for name, op in TABLE if name == dtype]
    rows = [(op, n) for op in ops for n in (1, 17, 64, 1021)] + [(op, 40_000) for op in ops if op in ("sum", "avg")]
    cases = [Case("allreduce", dtype, n, op, seed=n, shift=n % 7, inplace=n % 2 == 0) for op, n in rows]
    check(pool(2), cases, {})


@parametrize("dtype", ["float32", "bfloat16", "float64", "float16", "complex64", "float8_e4m3fn"], first=2)
@parametrize("size", [3, 5], first=1)
def test_rounded_sums_are_the_same_bits_on_all_ranks(pool: Pool, size: int, dtype: str) -> None:
    cases = [Case("allreduce", dtype, n, op, seed=n, exact=False) for n in (6, 1000, 30_011) for op in ("sum", "avg")]
    for name in (None, *collectives_names("allreduce", size)):
        check(pool(size), cases, {} if name is None else {"algo": name})


def collectives_names(label: str, size: int) -> list[str]:
    """The algorithms of a collective for so many ranks."""
    return [name for name, each in ALGORITHMS[Collective[label.upper()]].items() if each.supports(size)]


HOSTS = {"2+1": "aab", "2+2": "abab", "1+3": "abbb", "2+1+2": "aabcc"}


@parametrize("hosts", HOSTS.values(), ids=HOSTS, first=2)
def test_shared_memory_and_tcp_in_one_communicator(pool: Pool, hosts: str) -> None:
    """Ranks that say that they are on different hosts are linked by TCP, the others by shared memory."""
    size = len(hosts)
    cases = [case for kind in KINDS for case in cases_of(kind, size, [0, 1, size + 1, 5003])]
    ranks = pool(size, HETCOLL_HOST_ID=tuple(hosts))
    check(ranks, cases, {})
    assert set(ranks.run(transports)) <= {("shm", "tcp"), ("tcp",)}


UNEVEN = (7, 9, 11, 13, 8)
MANY = [
    (UNEVEN, None),
    ((1, 47), None),
    ((24, 24), None),
    *((UNEVEN, name) for name in collectives_names("allreduce", 5)),
]


@pytest.mark.calm
@parametrize(("sizes", "algo"), MANY, first=0)
def test_48_ranks_on_hosts_of_any_sizes(pool: Pool, sizes: tuple[int, ...], algo: str | None) -> None:
    """Every collective as it is chosen for few and for more bytes, with a root on the last host, and every algorithm of
    the all-reduce."""
    n, hosts = sum(sizes), tuple(name for name, size in zip("abcde", sizes, strict=False) for _ in range(size))
    cases = [Case("allreduce", "float32", 1 << 18)]
    if algo is None:
        cases += [
            Case(kind.label, "int32", count, root=n - 5 if kind in ROOTED else 0)
            for kind in KINDS
            for count in (3, 1009)
        ]
    check(pool(n, HETCOLL_HOST_ID=hosts), cases, {} if algo is None else {"algo": algo})


@parametrize("hosts", HOSTS.values(), ids=HOSTS, first=1)
def test_every_algorithm_among_hosts(pool: Pool, hosts: str) -> None:
    """By name, with few bytes, for which hosts are led, and with many."""
    size, ranks = len(hosts), pool(len(hosts), HETCOLL_HOST_ID=tuple(hosts))
    for kind in AMONG:
        for name, entry in ALGORITHMS[kind].items():
            if runs_among(entry) and entry.supports(len(set(hosts))):
                cases = list(cases_of(kind, size, [0, 1, size + 1, 60_013]))
                check(ranks, cases, {"algo": name})
                forms = ranks.run(placed, kind.label, name)[0]
                assert forms == [f"among {len(set(hosts))} hosts"] * 2


@parametrize("hosts", HOSTS.values(), ids=HOSTS, first=2)
def test_gather_and_scatter_are_led_where_bytes_are_few(pool: Pool, hosts: str) -> None:
    size, ranks = len(hosts), pool(len(hosts), HETCOLL_HOST_ID=tuple(hosts))
    for kind in (Collective.GATHER, Collective.SCATTER):
        check(ranks, list(cases_of(kind, size, [0, 1, size + 1, 60_013])), {"algo": "led"})
        # A host of one rank, or whose ranks do not follow each other, would send as many messages when it is led.
        assert ranks.run(led_or_not, kind.label)[0] == ("direct" if hosts in ("aab", "abab") else "led")


def led_or_not(comm: Any, label: str) -> str:
    return str(comm.explain(label, 8).algorithm)


def placed(comm: Any, label: str, name: str) -> list[str]:
    said = [variant(comm, algo=name).explain(label, nbytes) for nbytes in (8, 1 << 30)]
    assert {one.algorithm for one in said} == {name}
    return [one.reason.split(",")[0] for one in said]


def transports(comm: Any) -> tuple[str, ...]:
    return tuple(comm.explain("alltoall", 8).transport.split("+"))


def test_plans_of_more_units_than_the_engine_numbers(pool: Pool) -> None:
    """They are encoded by the points at which spans begin and end, and bound to offsets. Here 8 units are many."""
    ranks = pool(5, HETCOLL_HOST_ID=tuple("vvwww"), HETCOLL_ALGO="direct")
    ranks.run(number_at_most, 8)
    cases = list(cases_of(Collective.ALLREDUCE, 5, [0, 1, 4, 7, 31, 5003]))
    check(ranks, cases, {})
    assert set(ranks.run(crowded)) == {True}


def number_at_most(comm: Any, units: int) -> None:
    ir.MOST_UNITS = units


def crowded(comm: Any) -> bool:
    return (
        among_hosts(find(Collective.ALLREDUCE, "direct"), led=False)
        .build(5, comm.rank, hosts=comm.topology.hosts)
        .crowded
    )


@parametrize("size", [2, 3], first=1)
def test_large_messages(pool: Pool, size: int) -> None:
    """Beyond the cache, where results are stored around it, and beyond the ring many times over."""
    count = (13 << 20) // 4
    kinds = ("allreduce", "broadcast", "reduce_scatter", "allgather", "alltoall")
    cases = [Case(kind, "float32", count if kind in ("allreduce", "broadcast") else count // size) for kind in kinds]
    check(pool(size), [*cases, Case("allreduce", "float32", count, "avg", inplace=True)], {})


@pytest.mark.calm
@parametrize("name", ["staged", "chained"], first=1)
@parametrize("size", [2, 3, 4], first=1)
def test_large_messages_by_stretches(pool: Pool, size: int, name: str) -> None:
    """One stretch, two, some and as many as there may be, of which the last is longer."""
    counts = [(1 << 19) - 1, (1 << 20) + 1, (5 << 19) + 4999]
    cases = [
        Case("allreduce", dtype, n, op, inplace=inplace)
        for n in counts
        for dtype, op in (("float32", "sum"), ("int32", "max"))
        for inplace in (False, True)
    ]
    cases.append(Case("allreduce", "uint8", (6 << 20) + 5, "sum"))
    check(pool(size), [*cases, Case("allreduce", "float64", (65 << 18) + 77, "avg")], {"algo": name})
    check(pool(size), cases, {"algo": name, "transport": "tcp"})


def chosen(comm: Any, stores: str) -> str:
    algorithm: str = variant(comm, shm_stores=stores).explain("allreduce", 1 << 22).algorithm
    return algorithm


def test_long_sums_go_by_stretches_where_slots_are_not_claimed(pool: Pool) -> None:
    assert set(pool(4).run(chosen, "cached")) == {"chained" if CORES < 4 else "staged"}
    assert {"staged", "chained"}.isdisjoint(pool(4).run(chosen, "claimed"))


def test_asynchronous_calls_give_the_same(pool: Pool) -> None:
    cases = [case for kind in KINDS for case in cases_of(kind, 3, [0, 1, 1009, 20_011])]
    check(pool(3), cases, {}, async_op=True)
    check(pool(3), cases, {"transport": "tcp"}, async_op=True)


# The engine against a plain run of the same plans: the same additions in the same order give the same bits.

PLANNED = [
    (kind, name)
    for kind, table in ALGORITHMS.items()
    for name in table
    if kind is not Collective.BARRIER and table[name].cost is not None
]


def run_planned(comm: Any, case: Case, config: dict[str, Any]) -> bytes:
    return result_of(variant(comm, **config), case)


@st.composite
def sequences(draw: st.DrawFn, size: int) -> list[tuple[Case, bool]]:
    """Calls of all collectives, each asynchronous or not."""
    calls = []
    labels = [kind.label for kind in KINDS] + ["allgatherv", "reduce_scatterv", "alltoallv"]
    for _ in range(draw(st.integers(3, 10))):
        label = draw(st.sampled_from(labels))
        kind, (dtype, op) = Collective[label.upper()], draw(st.sampled_from(TABLE))
        case = Case(
            label,
            dtype,
            draw(st.integers(0, 9) | st.integers(10, 20_000)),
            op if kind in REDUCING else "sum",
            draw(st.integers(0, size - 1)) if kind in ROOTED else 0,
            draw(st.booleans()) and label not in ("broadcast", "alltoallv"),
            tuple(draw(st.lists(st.integers(0, 3000), min_size=size, max_size=size)))
            if label in ("allgatherv", "reduce_scatterv")
            else (),
            draw(st.integers(0, 1 << 30)),
            draw(st.integers(0, 7)),
            exact=op != "avg",
        )
        calls.append((case, draw(st.booleans())))
    return calls


@parametrize("size", [4, 2, 3], first=1)
@given(data=st.data())
@settings(max_examples=examples(14), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_calls_one_after_another(pool: Pool, size: int, data: st.DataObject) -> None:
    pool(size).run(run_sequence, data.draw(sequences(size)))


@st.composite
def planned_cases(draw: st.DrawFn, size: int) -> tuple[Case, str, dict[str, Any]]:
    kind, name = draw(st.sampled_from([(k, a) for k, a in PLANNED if ALGORITHMS[k][a].supports(size)]))
    dtype = draw(st.sampled_from(["float32", "float64", "float16", "bfloat16", "float8_e5m2", "int32", "uint8"]))
    count = draw(
        st.one_of(st.integers(0, 2 * size + 1), st.sampled_from([61, 997, 4096, 10_007]), st.integers(0, 9000))
    )
    case = Case(
        kind.label,
        dtype,
        count,
        draw(st.sampled_from(["sum", "prod", "max", "avg"])) if kind in REDUCING else "sum",
        draw(st.integers(0, size - 1)) if kind in ROOTED else 0,
        seed=draw(st.integers(0, 1 << 30)),
        shift=draw(st.integers(0, 7)),
        exact=False,
    )
    return case, name, draw(st.sampled_from(list(LINKS.values())))


@parametrize("size", [3, 5, 2, 4], first=2)
@given(data=st.data())
@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_engine_does_what_the_plans_say(pool: Pool, size: int, data: st.DataObject) -> None:
    case, name, link = data.draw(planned_cases(size))
    got = pool(size).run(run_planned, case, {"algo": name, **link})
    kind = Collective[case.collective.upper()]
    how = {"root": case.root, "scale": case.op == "avg", "cores": CORES}
    plans = [ALGORITHMS[kind][name].build(size, rank, **how) for rank in range(size)]
    sends = [make_input(case, rank, size) for rank in range(size)]
    recvs = [sends[rank] if kind is Collective.BROADCAST else blank_output(case, size) for rank in range(size)]
    interpret(plans, sends, recvs, case.op)
    for rank in range(size):
        has_result = rank == case.root or kind not in (Collective.REDUCE, Collective.GATHER)
        assert got[rank] == (recvs[rank].tobytes() if has_result else b""), f"rank {rank} of {size}"
