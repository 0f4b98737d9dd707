"""Predictions for GPUs: plans in the pieces that the engine cuts them into, slots, queues, and what was measured."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import find
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.base import Algorithm
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.cluster import Cluster, read
from hetcoll.plan.forecast import candidates, forecast
from hetcoll.plan.one_kernel import choose, moves
from hetcoll.plan.pieces import Lengths, cut, slot_bytes
from hetcoll.plan.pipeline import pipelined
from hetcoll.plan.simulator import streams
from hetcoll.plan.simulator.graph import Tasks
from hetcoll.types import Collective

ROOT = Path(__file__).parents[2]
HOST = ROOT / "docs/examples/clusters/h200-host.toml"
AR = Collective.ALLREDUCE
MIB = 1 << 20


def host(islands: str, *changes: str) -> Cluster:
    ranks = islands.replace("|", ",").count(",") + 1
    words = (f"hosts.h200.ranks={ranks}", f"hosts.h200.islands='{islands}'", *changes)
    return read(HOST.read_text(), "h200-host.toml", words)


def seconds(cluster: Cluster, name: str, nbytes: int, collective: Collective = AR) -> float:
    return forecast(cluster, collective, name).tasks.run(nbytes).seconds


@pytest.mark.parametrize("islands", ["0|1", "0,1|2,3", "0,1,2|3", "0|1|2,3"])
@pytest.mark.parametrize("name", ["islands", "ring", "direct"])
@pytest.mark.parametrize("nbytes", [8, 3 * MIB, 64 * MIB])
def test_as_many_operations_are_simulated_as_the_engine_enqueues(islands: str, name: str, nbytes: int) -> None:
    cluster = host(islands)
    size, alone = cluster.size, len(cluster.islands) == cluster.size
    entry: Algorithm = ISLANDS[AR] if name == "islands" else find(AR, name) if alone else among(find(AR, name))
    plans = [entry.build(size, rank, hosts=cluster.islands) for rank in range(size)]
    made = cut(nbytes, nbytes, slot_bytes(size, max(map(len, cluster.islands))), Lengths.of(plans))
    enqueued = [Counter(step.op for step in plan.steps) for plan in pipelined(plans, made.at, made.most)]
    tasks = forecast(cluster, AR, name).tasks
    assert isinstance(tasks, Tasks)
    assert tasks.piecewise is not None
    first = [*streams.cut_up(tasks, tasks.piecewise, nbytes).first, None]
    total = len(streams.cut_up(tasks, tasks.piecewise, nbytes).arrays[0])
    simulated = [Counter() for _ in plans]  # type: list[Counter[object]]
    for i, (rank, step) in enumerate(tasks.steps):
        if step is not None:
            end = total if first[i + 1] is None else int(first[i + 1] or 0)
            simulated[rank][step.op] += end - int(first[i] or 0)
    assert simulated == enqueued


def test_two_gpus_go_at_the_rate_of_their_copies() -> None:
    """Each sends and receives the whole buffer, in slots of 4 MiB, whose copies leave an engine idle before each."""
    cluster, kind = host("0|1"), host("0|1").kinds[0]
    each = 4 * MIB / kind.pcie + kind.idle
    assert seconds(cluster, "direct", 1 << 30) == pytest.approx(256 * each, rel=0.02)
    assert seconds(host("0|1", "hosts.h200.pcie=24 GB/s"), "direct", 1 << 30) > 1.9 * 256 * each


def test_what_all_gpus_copy_meets_in_the_hosts_memory() -> None:
    nbytes = 256 * MIB
    fits, spills = host("0,1|2,3"), host("0|1|2|3")  # four channels of 6 MiB, and at least twelve
    for cluster, name, copied, rate in (
        (fits, "islands", 4 * nbytes, fits.kinds[0].pinned),
        (spills, "direct", 12 * nbytes, fits.kinds[0].spilled),
    ):
        found = forecast(cluster, AR, name)
        outcome = found.tasks.run(nbytes)
        assert outcome.seconds == pytest.approx(copied / rate, rel=0.05)
        assert found.links(outcome)[0][0] == "memory of h200/0"


def test_a_sender_waits_for_slots() -> None:
    """With one slot each copy out waits for the copy in before it."""
    tasks = forecast(host("0|1"), AR, "oneshot").tasks
    assert isinstance(tasks, Tasks)
    assert tasks.piecewise is not None
    usual = tasks.run(64 * MIB).seconds
    tasks.piecewise = tasks.piecewise._replace(slots=1)
    assert tasks.run(64 * MIB).seconds > 1.5 * usual


def test_the_host_enqueues_one_operation_after_another() -> None:
    quick, slow = (seconds(host("0|1|2|3", f"hosts.h200.enqueue={us} us"), "direct", 8) for us in ("0", "10"))
    calls = 8 + 3 * (5 + 8 + 5 + 5)  # those of the call, then of three peers: send, add, send, receive
    assert 0.5 * calls * 10e-6 < slow - quick <= calls * 10e-6


def test_one_kernel_moves_what_it_writes_and_reads() -> None:
    cluster = host("0|1|2|3")
    kind = cluster.kinds[0]
    assert "kernel" in candidates(cluster, AR)
    assert choose(AR, 2 * MIB, 4, 4) == "exchange"
    assert moves(AR, 2 * MIB, 4, 0) == (2, 2.5 * MIB, 3 * MIB)
    wanted = kind.kernel + 2 * kind.chunk + 5.5 * MIB / kind.pcie
    assert seconds(cluster, "kernel", 2 * MIB) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ArgumentError, match="wanted one host, of 2 to 16 GPUs that no library joins"):
        forecast(host("0,1"), AR, "kernel")
    assert "kernel" not in candidates(host("0,1"), AR)


def test_one_kernel_does_more_where_copies_would_begin_for_each_peer() -> None:
    """Of what a rank reads: 3 MiB where four and more are islands, 1 MiB where a library gathers for several ranks."""
    for size, islands, most_read in ((2, 2, 1), (3, 3, 1), (4, 4, 3), (8, 8, 3), (4, 2, 1), (4, 3, 1)):
        most = most_read * MIB // (size - 1) * size
        assert choose(Collective.ALLGATHER, most, size, islands) == "gather"
        assert choose(Collective.ALLGATHER, most + size, size, islands) is None


@pytest.mark.parametrize(
    ("kind", "root", "other"),
    [
        (Collective.BROADCAST, (0, 1, 0), (1, 0, 1)),
        (Collective.REDUCE, (1, 0, 3), (0, 1, 0)),
        (Collective.GATHER, (1, 0, 0.75), (0, 0.25, 0)),
        (Collective.SCATTER, (0, 0.75, 0), (1, 0, 0.25)),
        (Collective.ALLGATHER, (1, 0.25, 0.75), (1, 0.25, 0.75)),
        (Collective.REDUCE_SCATTER, (1, 0.75, 0.75), (1, 0.75, 0.75)),
    ],
)
def test_who_gives_writes_and_who_takes_waits_and_reads(
    kind: Collective, root: tuple[float, ...], other: tuple[float, ...]
) -> None:
    """Rounds, and what is written and read of the larger buffer; the last rank is the root."""
    for rank, (rounds, out, into) in ((3, root), (1, other)):
        assert moves(kind, 4096, 4, rank, 3) == (rounds, 4096 * out, 4096 * into)
    cluster = host("0|1|2|3")
    assert "kernel" in candidates(cluster, kind)
    parts = [cluster.kinds[0].kernel + each[0] * cluster.kinds[0].chunk for each in (root, other)]
    assert seconds(cluster, "kernel", 8, kind) == pytest.approx(max(parts), rel=0.01)
    largest = int(MIB / max(*root[1:], *other[1:]))
    assert choose(kind, largest, 4, 2) == ("exchange" if "reduce" in kind.label else "gather")
    assert choose(kind, largest + 4, 4, 2) is None


def test_one_island_is_one_call_of_the_library() -> None:
    cluster = host("0,1,2,3")
    kind = cluster.kinds[0]
    assert seconds(cluster, "islands", 8) == pytest.approx(kind.launch, rel=0.01)
    assert seconds(cluster, "islands", 1 << 30) == pytest.approx(kind.launch + 1.5 * (1 << 30) / kind.fabric, rel=1e-3)


def test_the_page_says_what_the_benchmark_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell on GPUs that was measured, predicted from the machine's own limits."""
    sys.path.append(str(ROOT / "benchmarks"))
    import predict_gpus

    ratios = [ratio for _, ratio in predict_gpus.compared(HOST)]
    assert len(ratios) > 200
    assert predict_gpus.main(["--markdown"]) == 0
    page = (ROOT / "docs/measurements/2026-11-predictions.md").read_text()
    for part in capsys.readouterr().out.strip().split("\n\n"):
        assert part in page
