"""What all ranks tell each other: any values come back, garbled ones are errors, and equal ones travel once."""

from __future__ import annotations

import contextlib
import json
import random
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetcoll.config.env import Config
from hetcoll.errors import CommunicationError, InitError
from hetcoll.links.edges import Address, unpack_addresses
from hetcoll.links.facts import Facts, Gpu
from hetcoll.links.introduction import Introduction, Introductions, Process, Reach, read_cards
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.rendezvous.protocol.columns import pack_columns, unpack_columns

columns = st.integers(1, 40).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.lists(st.binary(max_size=5), min_size=size, max_size=size), max_size=4),
    )
)


@given(columns)
def test_any_values_come_back(told: tuple[int, list[list[bytes]]]) -> None:
    size, values = told
    for column, untold in zip(values, unpack_columns(pack_columns(values, size, len(values)), size), strict=True):
        first = dict[bytes, int]()
        assert list(untold) == [b"%d" % first.setdefault(value, len(first)) for value in column]
    found = unpack_columns(pack_columns(values, size), size)
    assert [list(column) for column in found] == values
    for column in found:
        assert len(set(column.values)) == len(column.values)
        assert column.each(lambda value: value * 2) == [value * 2 for value in column]
        assert [column[rank] for rank in range(size)] == column[:] == list(column)


@pytest.mark.parametrize("count", [1, 2, 256, 257, 65537])
def test_numbers_are_as_wide_as_needed(count: int) -> None:
    size = 66000
    values = [b"%06d" % (rank % count) for rank in range(size)]
    body = pack_columns([values], size)
    (column,) = unpack_columns(body, size)
    assert list(column) == values
    assert len(body) < 4 + 12 + 6 * count + 1500, "numbers that follow a rule take little"
    width = {1: 0, 2: 1, 256: 1, 257: 2, 65537: 4}[count]
    mixed = list(values)
    random.Random(1).shuffle(mixed)
    body = pack_columns([mixed], size)
    assert [list(column) for column in unpack_columns(body, size)] == [mixed]
    assert len(body) <= 4 + 12 + 6 * count + width * size, "and others no more than they are wide"


@given(st.data())
def test_garbled_columns_are_errors(data: st.DataObject) -> None:
    body = pack_columns([[b"a", b"bb", b"a"], [b"c"] * 3], 3)
    cut = data.draw(st.integers(1, len(body) - 1))
    garbled = body[:cut] + data.draw(st.binary(max_size=len(body)))
    with contextlib.suppress(CommunicationError):  # anything else would end the thread that reads
        assert all(len(column) == 3 for column in unpack_columns(garbled, 3))
    with pytest.raises(CommunicationError, match="garbled"):
        unpack_columns(pack_columns([[b"a", b"b", b"a"]], 3), 4)


GPU = Gpu("cuda", "0000:1b:00.0", "sm_90", "NVIDIA H200", "", 22800, "ocp", True)


def introduced(size: int) -> tuple[list[list[bytes]], list[list[bytes]], list[bytes]]:
    """What `size` ranks on hosts of eight, each with a GPU of its own, tell: introductions and reaches, by column, and
    where each listens."""
    mine = Introduction.here(Config(), 0)
    gpus = [replace(GPU, bus=f"0000:{number:02x}:00.0") for number in range(8)]
    rows, reaches, places = [], [], []
    for rank in range(size):
        one = replace(mine, host=f"host {rank // 8}", pid=rank, name=b"%016d" % rank, gpus=[gpus[rank % 8]]).telling()
        assert Process.read(one.own) == (rank, b"%016d" % rank, f"host {rank // 8}")
        rows.append([*one.shared, *one.alike])
        host = rank // 8
        address = Address(f"10.1.{host >> 8}.{host & 255}", 20000 + rank % 40000, "eth0", b"%016d" % rank)
        reach = Reach([address], [], "no RDMA here", (25000, 0), True, 64).telling()
        reaches.append(reach.shared)
        places.append(reach.own)
    return [list(column) for column in zip(*rows, strict=True)], [list(c) for c in zip(*reaches, strict=True)], places


@pytest.mark.calm
def test_what_a_rank_does_with_16384_introductions_takes_little_time_and_memory() -> None:
    size = 16384
    told, reaches, places = introduced(size)
    body, more = pack_columns(told, size, 1), pack_columns(reaches, size)
    assert len(body) < 6000, "bytes that each rank is sent"
    assert len(more) < 100
    started = time.process_time()
    intros = Introductions(unpack_columns(body, size))
    topology = Topology(intros.infos)
    cards = read_cards(*unpack_columns(more, size))
    facts = Facts(topology, intros.gpus, intros.no_gpu)
    islands = topology.equipped([("cuda", gpus[0].bus) for gpus in facts.gpus]).islands
    seconds = time.process_time() - started
    assert len(topology.hosts) == size // 8
    assert [len(island) for island in islands] == [size]
    assert cards == [((), "no RDMA here", (25000, 0), True, 64)] * size
    assert unpack_addresses(places[9]) == (Address("10.1.0.1", 20009, "eth0", b"%016d" % 9),)
    assert seconds < 1.2, seconds  # 0.3 where nothing else runs
    tracemalloc.start()
    kept = Introductions(unpack_columns(body, size)), read_cards(*unpack_columns(more, size))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20, peak
    del kept


def test_unequal_settings_name_the_first_rank_that_differs() -> None:
    told, _, _ = introduced(4)
    other = json.loads(told[1][2]) | {"HETCOLL_ALGO": "ring"}
    told[1][2] = json.dumps(other).encode()
    with pytest.raises(InitError, match="HETCOLL_ALGO is None on rank 0 and 'ring' on rank 2"):
        Introductions(unpack_columns(pack_columns(told, 4), 4))


ranks = st.lists(
    st.tuples(st.sampled_from(["", "cuda", "hip"]), st.sampled_from("ab"), st.sampled_from(["", "0", "1"]))
)


@given(ranks.filter(bool))
def test_islands_take_each_gpu_once_and_the_first_that_fits(places: list[tuple[str, str, str]]) -> None:
    infos = tuple(RankInfo(r, host, vendor=vendor, device=device) for r, (vendor, host, device) in enumerate(places))
    found: list[list[int]] = []
    for info in infos:  # as it is said: one after another, each into the first island where it fits
        for island in found:
            others = [infos[r] for r in island]
            taken = any(info.device and (o.host, o.device) == (info.host, info.device) for o in others)
            if info.vendor and others[0].vendor == info.vendor and not taken:
                island.append(info.rank)
                break
        else:
            found.append([info.rank])
    assert Topology(infos).islands == tuple(map(tuple, found))
