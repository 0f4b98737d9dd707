"""In a guest: what becomes of RDMA between the memory of fake GPUs when cables fail. See suite_gpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import fakes
import numpy as np
import pytest
from cables import all_plugged, allow_resets, cut_and_mend, plug, unplug
from faults import Progress, in_the_middle
from gpu_calls import device_of_rank
from gpus import PROMPT, Launch, check, direct, sealed, told
from ranks import Outcome, Ranks, wait_until
from reference import Case
from window_moves import PIECE

import hetcoll
from hetcoll.gpu.array import DeviceArray

BIG = 100_001  # many frames, and soon reduced by an emulated processor
# A fake of NVIDIA's holds up a copy where a stream that waits shares its queue; an H200 was not seen to, with one.
APART = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.fixture(autouse=True)
def _cables() -> Iterator[None]:
    yield
    all_plugged()


def add_up(comm: hetcoll.Communicator, calls: int) -> None:
    """All-reduces whose every element is checked."""
    device = device_of_rank(comm.rank)
    for i in range(calls):
        array = DeviceArray.of(device, np.full(BIG, comm.rank + i, np.float32))
        comm.allreduce(array.buffer()).wait(60)
        assert (array.get() == sum(range(comm.size)) + comm.size * i).all(), i


def reduced(comm: hetcoll.Communicator, x: np.ndarray) -> np.ndarray:
    """The sum of the ranks' `x`, by their GPUs."""
    array = DeviceArray.of(device_of_rank(comm.rank), x)
    comm.allreduce(array.buffer()).wait(60)
    return array.get()


def run_while(ranks: Ranks, happens: Callable[[Progress], None]) -> list[Outcome]:
    """`happens` in the middle of calls; then how they ended on each rank."""
    return in_the_middle(ranks, happens, reduced, BIG, seconds=90)


def test_one_cable_is_cut(launch: Launch) -> None:
    def cut(progress: Progress) -> None:
        unplug("veth2")
        progress.until(lambda counters: counters["gpu_lost_rails"] > 0)

    ranks = direct(launch, "na", **PROMPT)
    ranks.run(sealed)
    for outcome in run_while(ranks, cut):
        assert outcome.error is None, outcome.trace
    for counters, paths in ranks.run(told):
        assert counters["gpu_lost_rails"] == 1, paths
        assert counters["gpu_staged_bytes"] == counters["gpu_links_over_tcp"] == 0, counters
        assert re.search(r"rxe[23] to rxe[23] \(down: ", "".join(paths)), paths
    assert any("lost a rail, 1 left" in ranks.output(rank) for rank in range(2))
    # It is taken up again, with its own way to see that what it wrote is there.
    plug("veth2")
    wait_until(lambda: all(counters["gpu_recovered_rails"] == 1 for counters, _ in ranks.run(told)), 60)
    before = ranks.run(told)
    ranks.run(add_up, 3, timeout=60)
    for (was, _), (now, paths) in zip(before, ranks.run(told), strict=True):
        assert now["gpu_direct_bytes"] > was["gpu_direct_bytes"], paths
        assert "(down" not in "".join(paths), paths
        assert re.search(r"rxe[23] to rxe[23] \([^)]*, taken up again 1 times\)", "".join(paths)), paths


@pytest.mark.parametrize("cross", ["auto", "staged"])
def test_both_cables_are_cut(launch: Launch, cross: str) -> None:
    """TCP goes on, with pinned memory and with a device's, and ranks that meet again find no port that is up."""

    def cut(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["gpu_tcp_bytes"] > 4 * BIG)

    ranks = direct(launch, "na", HETCOLL_CROSS=cross, **APART, **PROMPT)
    if cross == "auto":
        ranks.run(sealed)
    for outcome in run_while(ranks, cut):
        assert outcome.error is None, outcome.trace
    for counters, paths in ranks.run(told):
        assert counters["gpu_links_over_tcp"] > 0, paths
        assert cross == "staged" or counters["gpu_staged_bytes"] == 0, counters
    for paths in ranks.run(go_on, timeout=60):
        assert re.search(r"through pinned slots and \d+ sockets", "".join(paths)), paths


def exchanged(comm: hetcoll.Communicator, x: np.ndarray) -> np.ndarray:
    """The sum of both ranks' `x`, put out of one half of a GPU's window into the other half of the peer's."""
    kept, n = vars(comm).setdefault("kept for suite_gpus_cables", {}), x.size
    if not kept:
        mine = kept["mine"] = DeviceArray.of(device_of_rank(comm.rank), np.zeros(2 * n, x.dtype))
        kept["window"], kept["calls"] = comm.window(mine), 0
        fakes.seal(mine.ptr)
    mine, window = kept["mine"], kept["window"]
    kept["calls"] += 1
    mine.set(np.concatenate([mine.get()[:n], x]))
    comm.barrier()  # neither writes over what came
    at = np.arange(0, n, PIECE)
    window.put(mine, 1 - comm.rank, at, src_offset=n + at, count=np.minimum(PIECE, n - at), signal=0)
    window.wait_signal(0, kept["calls"])
    comm.barrier()
    found: np.ndarray = x + mine.get()[:n]
    return found


@pytest.mark.parametrize(("cables", "shows"), [(["veth2"], "lost_rails"), (["veth1", "veth2"], "tcp_bytes")])
def test_cables_under_windows_are_cut(launch: Launch, cables: list[str], shows: str) -> None:
    """One, or all, and mended."""
    for outcome in in_the_middle(direct(launch, "na", **PROMPT), cut_and_mend(*cables, shows=shows), exchanged):
        assert outcome.error is None, outcome.trace


def go_on(comm: hetcoll.Communicator) -> tuple[str, ...]:
    """In another communicator, whose ranks find no port that is up."""
    with comm.shrink() as rest:
        add_up(rest, 2)
        return rest.explain("allreduce", 1 << 20).paths


def test_both_cables_are_back(launch: Launch) -> None:
    """TCP goes on with messages between GPUs, every byte of which is checked, until a device takes them again."""

    def cut_and_mend(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["gpu_tcp_bytes"] > 4 * BIG)
        all_plugged()
        progress.until(lambda counters: counters["gpu_recovered_rails"] > 0)

    ranks = direct(launch, "na", HETCOLL_INTEGRITY="all", **APART, **PROMPT)
    ranks.run(sealed)
    for outcome in run_while(ranks, cut_and_mend):
        assert outcome.error is None, outcome.trace
    before = ranks.run(told)
    ranks.run(add_up, 3, timeout=60)
    after = ranks.run(told)
    for rank, ((was, _), (now, paths)) in enumerate(zip(before, after, strict=True)):
        assert now["gpu_lost_rails"] >= 2, paths
        assert now["gpu_checked_bytes"] >= after[1 - rank][0]["gpu_tcp_bytes"], paths
        assert now["gpu_tcp_bytes"] == was["gpu_tcp_bytes"], paths
        assert now["gpu_direct_bytes"] > was["gpu_direct_bytes"], paths
        assert now["gpu_staged_bytes"] == now["gpu_links_over_tcp"] == 0, now


@pytest.mark.thorough
def test_control_sockets_are_reset(launch: Launch) -> None:
    """While they carry what goes between the GPUs, since both cables are cut."""
    allow_resets()

    def cut(progress: Progress) -> None:
        unplug("veth1")
        unplug("veth2")
        progress.until(lambda counters: counters["gpu_tcp_bytes"] > 4 * BIG and counters["gpu_tcp_reconnects"] > 3)

    ranks = direct(launch, "na", HETCOLL_FAULT="reset=300000", **APART, **PROMPT)
    ranks.run(sealed)
    for outcome in run_while(ranks, cut):
        assert outcome.error is None, outcome.trace
    for counters, paths in ranks.run(told):
        assert counters["gpu_links_over_tcp"] > 0, paths
        assert counters["gpu_staged_bytes"] == 0, counters


def test_links_that_fail_while_they_are_tried(launch: Launch) -> None:
    """No rail comes up: the direct way is given up, and the next one has a socket for that."""
    ranks = direct(launch, "na", **PROMPT)
    ranks.run(told)
    unplug("veth1")
    unplug("veth2")
    check(ranks, [Case("allreduce", count=BIG)])
    for _, paths in ranks.run(told):
        assert "staged: direct did not work: rank " in "".join(paths), paths
        assert "no rail to rank" in "".join(paths), paths
